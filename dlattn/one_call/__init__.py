"""Attention as one call, forward and backward, everything but q, k and v optional."""

from dlattn.one_call.backward import Gradients as Gradients
from dlattn.one_call.backward import attention_backward as attention_backward
from dlattn.one_call.forward import attention as attention
