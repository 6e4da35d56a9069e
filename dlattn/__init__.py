"""Fused attention for NVIDIA GPUs, called through graphs in the vocabulary of cuDNN's frontend.

``import dlattn as cudnn`` is a working program for scaled dot product attention. Nothing here
imports torch, JAX or CuPy: a framework is touched once one of its tensors comes by. Nor does it
import what the program does not name.
"""

from typing import TYPE_CHECKING

from dlattn.lazy import exports

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from dlattn import flash as flash
    from dlattn import jax as jax
    from dlattn import torch as torch
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
    from dlattn.one_call import Gradients as Gradients
    from dlattn.one_call import attention as attention
    from dlattn.one_call import attention_backward as attention_backward
    from dlattn.problem.dropout import philox_dropout_mask as philox_dropout_mask
    from dlattn.states import merge_states as merge_states

    # cuDNN has a function of the subpackage's name, and so the subpackage can be called.
    from dlattn.graph.helpers import graph as graph  # isort: skip

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "dlattn.dtypes": "data_type",
        "dlattn.errors": """
            CompileError DlattnError InvalidArgumentError InvalidGraphError InvalidVariantPackError
            cudnnGraphNotSupportedError
        """,
        "dlattn.flash": "",
        "dlattn.graph": "",
        "dlattn.graph.devices": "create_device_properties",
        "dlattn.graph.handle": "create_handle destroy_handle get_stream set_stream",
        "dlattn.graph.helpers": """
            backend_version backend_version_string create_kernel_cache get_last_error_string
            graph_cache jit
        """,
        "dlattn.graph.pygraph": "pygraph",
        "dlattn.graph.tensor": "tensor",
        "dlattn.graph.vocabulary": """
            attention_implementation behavior_note build_plan_policy diagonal_alignment heur_mode
            knob knob_type numerical_note reduction_mode reshape_mode rng_distribution scalar_type
            tensor_reordering
        """,
        "dlattn.graph.wrapper": "Graph",
        "dlattn.one_call": "Gradients attention attention_backward",
        "dlattn.problem.dropout": "philox_dropout_mask",
        "dlattn.states": "merge_states",
    },
    one_at_a_time=True,
    unlisted=("jax", "torch"),
)
