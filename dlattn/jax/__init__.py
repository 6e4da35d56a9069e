"""dlattn at home in JAX: under ``jit``, ``grad``, ``vmap``, ``scan`` and ``shard_map``.

:func:`attention` is :func:`dlattn.attention` as a JAX function; :func:`dot_product_attention` is
that in the words of ``jax.nn``.
"""

from dlattn.jax.differentiable import attention as attention
from dlattn.jax.nn import dot_product_attention as dot_product_attention
