"""Attention as one call, forward and backward, everything but q, k and v optional."""

from dlattn.attention.backward import Gradients as Gradients
from dlattn.attention.backward import attention_backward as attention_backward
from dlattn.attention.forward import attention as attention
