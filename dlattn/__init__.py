"""Fused attention for NVIDIA GPUs, called through graphs in the vocabulary of cuDNN's frontend.

``import dlattn as cudnn`` is a working program for scaled dot product attention. Nothing here
imports torch, JAX or CuPy: a framework is touched once one of its tensors comes by. Graphs need no
functions, so these are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlattn.dtypes import data_type as data_type
from dlattn.errors import CompileError as CompileError
from dlattn.errors import DlattnError as DlattnError
from dlattn.errors import InvalidArgumentError as InvalidArgumentError
from dlattn.errors import InvalidGraphError as InvalidGraphError
from dlattn.errors import InvalidVariantPackError as InvalidVariantPackError
from dlattn.errors import cudnnGraphNotSupportedError as cudnnGraphNotSupportedError
from dlattn.graph.devices import create_device_properties as create_device_properties
from dlattn.graph.handle import create_handle as create_handle
from dlattn.graph.handle import destroy_handle as destroy_handle
from dlattn.graph.handle import get_stream as get_stream
from dlattn.graph.handle import set_stream as set_stream
from dlattn.graph.helpers import backend_version as backend_version
from dlattn.graph.helpers import backend_version_string as backend_version_string
from dlattn.graph.helpers import create_kernel_cache as create_kernel_cache
from dlattn.graph.helpers import get_last_error_string as get_last_error_string
from dlattn.graph.helpers import graph_cache as graph_cache
from dlattn.graph.helpers import jit as jit
from dlattn.graph.pygraph import pygraph as pygraph
from dlattn.graph.tensor import tensor as tensor
from dlattn.graph.vocabulary import attention_implementation as attention_implementation
from dlattn.graph.vocabulary import behavior_note as behavior_note
from dlattn.graph.vocabulary import build_plan_policy as build_plan_policy
from dlattn.graph.vocabulary import diagonal_alignment as diagonal_alignment
from dlattn.graph.vocabulary import heur_mode as heur_mode
from dlattn.graph.vocabulary import knob as knob
from dlattn.graph.vocabulary import knob_type as knob_type
from dlattn.graph.vocabulary import numerical_note as numerical_note
from dlattn.graph.vocabulary import reduction_mode as reduction_mode
from dlattn.graph.vocabulary import reshape_mode as reshape_mode
from dlattn.graph.vocabulary import rng_distribution as rng_distribution
from dlattn.graph.vocabulary import scalar_type as scalar_type
from dlattn.graph.vocabulary import tensor_reordering as tensor_reordering
from dlattn.graph.wrapper import Graph as Graph
from dlattn.problem import philox_dropout_mask as philox_dropout_mask

# cuDNN has a function of the subpackage's name: ``dlattn.graph(handle)`` is the context manager,
# and modules of the subpackage are imported by their full names, ``from dlattn.graph.x import y``.
from dlattn.graph.helpers import graph as graph  # isort: skip

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from dlattn import flash as flash
    from dlattn.one_call import Gradients as Gradients
    from dlattn.one_call import attention as attention
    from dlattn.one_call import attention_backward as attention_backward
    from dlattn.states import merge_states as merge_states

_FUNCTIONS = {
    **dict.fromkeys(("Gradients", "attention", "attention_backward"), "dlattn.one_call"),
    "merge_states": "dlattn.states",
}


def __getattr__(name: str) -> Any:
    if name == "flash":
        return import_module("dlattn.flash")
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'dlattn' has no attribute {name!r}")
    function = globals()[name] = getattr(import_module(_FUNCTIONS[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), "flash", *_FUNCTIONS})
