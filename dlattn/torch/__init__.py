"""dlattn at home in PyTorch: differentiable, compiled, transformed, and in the place of its own.

:func:`attention` is :func:`dlattn.attention` with gradients; :func:`scaled_dot_product_attention`
is that in the words of ``torch.nn.functional``; :func:`replace_sdpa` and
:func:`register_transformers` route existing models to it.
"""

from dlattn.torch.differentiable import attention as attention
from dlattn.torch.models import register_transformers as register_transformers
from dlattn.torch.replace import replace_sdpa as replace_sdpa
from dlattn.torch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
