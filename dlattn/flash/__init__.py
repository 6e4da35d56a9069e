"""FlashAttention's functions, on tensors of any framework.

``mha_fwd``, ``mha_varlen_fwd``, ``mha_bwd`` and ``mha_varlen_bwd`` are those of PyTorch's
``flash_api.h``: the same arguments in the same order, the same tuples; ``flash_attn_with_kvcache``
is that of FlashAttention-2's own Python interface. They run the plans that graphs run: CUDA
kernels, or for tensors in host memory the NumPy reference engine.

Tensors are ``(batch, seqlen, heads, head_size)``, or packed, ``(total, heads, head_size)``. Heads
of k and v divide those of q: query head h reads head ``h // (heads / heads_k)``. Masks are aligned
to the bottom right corner: query i of a sequence of sq queries and sk keys attends to the keys from
``i + sk - sq - window_size_left`` to ``i + sk - sq + window_size_right``, both included; negative
sizes are no bound. A query that attends to nothing has an output of 0 and, as in FlashAttention-2,
a ``softmax_lse`` of **+inf** (FlashAttention-3's and cuDNN's is -inf; backwards here read both).
"""

from dlattn.flash.backward import mha_bwd as mha_bwd
from dlattn.flash.backward import mha_varlen_bwd as mha_varlen_bwd
from dlattn.flash.forward import mha_fwd as mha_fwd
from dlattn.flash.forward import mha_varlen_fwd as mha_varlen_fwd
from dlattn.flash.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache

__all__ = ["flash_attn_with_kvcache", "mha_bwd", "mha_fwd", "mha_varlen_bwd", "mha_varlen_fwd"]
