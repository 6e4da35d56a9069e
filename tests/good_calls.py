"""Of every public function a call that is right, in which a test makes one argument wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

import dlattn
from dlattn import flash
from tests.surface import surface
from tests.unit import test_flash_arguments as arguments

FLOAT, HALF = dlattn.data_type.FLOAT, dlattn.data_type.HALF

#: A function that takes keywords, and those of the right call.
Good = tuple[Callable[..., Any], dict[str, Any]]

GOOD: dict[str, Callable[[], Good]] = {}


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


def whole(function: Callable[..., Any], **given: Any) -> Good:
    """With defaults where nothing is given."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {it.name: it.default for it in parameters if it.kind not in kinds}
    empty = inspect.Parameter.empty
    return function, {**{name: x for name, x in named.items() if x is not empty}, **given}


def entered(made: Callable[..., AbstractContextManager[Any]]) -> Callable[..., None]:
    """A function that enters and leaves what another one makes."""

    def run(**given: Any) -> None:
        with made(**given):
            pass

    run.__signature__ = inspect.signature(made)  # type: ignore[attr-defined]
    return run


# Functions ----------------------------------------------------------------------------------------

_HEADS = {"q": zeros(2, 5, 4, 16), "k": zeros(2, 7, 2, 16), "v": zeros(2, 7, 2, 16)}
_LSE = zeros(2, 4, 5, dtype=np.float32)
_NONE = dict.fromkeys(("out_", "alibi_slopes_", "dq_", "dk_", "dv_"))

GOOD["dlattn.attention"] = lambda: whole(dlattn.attention, **_HEADS)
GOOD["dlattn.attention_backward"] = lambda: whole(
    dlattn.attention_backward, **_HEADS, dout=_HEADS["q"], out=_HEADS["q"], lse=_LSE
)
GOOD["dlattn.merge_states"] = lambda: whole(
    dlattn.merge_states, o1=_HEADS["q"], lse1=_LSE, o2=_HEADS["q"], lse2=_LSE
)
GOOD["dlattn.philox_dropout_mask"] = lambda: whole(
    dlattn.philox_dropout_mask, p=0.5, seed=1, offset=2, shape=(1, 2, 3, 4)
)


def _flash(function: Callable[..., Any], given: Mapping[str, Any], **more: Any) -> Good:
    names = inspect.signature(function).parameters
    none = {name: None for name in _NONE if name in names}
    return whole(function, **{**none, **given, **more})


_STATE = np.array([1, 2], np.uint64)
GOOD["dlattn.flash.mha_fwd"] = lambda: _flash(flash.mha_fwd, arguments.dense(), p_dropout=0.5)
GOOD["dlattn.flash.mha_varlen_fwd"] = lambda: _flash(
    flash.mha_varlen_fwd, arguments.packed(), p_dropout=0.5
)
GOOD["dlattn.flash.mha_bwd"] = lambda: _flash(
    flash.mha_bwd, arguments.backward(), p_dropout=0.5, philox_seed=_STATE
)
GOOD["dlattn.flash.mha_varlen_bwd"] = lambda: _flash(
    flash.mha_varlen_bwd, arguments.packed_backward(), p_dropout=0.5, philox_seed=_STATE
)
GOOD["dlattn.flash.flash_attn_with_kvcache"] = lambda: whole(
    flash.flash_attn_with_kvcache,
    q=zeros(2, 1, 4, 16),
    k_cache=zeros(2, 32, 2, 16),
    v_cache=zeros(2, 32, 2, 16),
    k=zeros(2, 1, 2, 16),
    v=zeros(2, 1, 2, 16),
    cache_seqlens=3,
)


def _torch(name: str, *tensors: str, **given: Any) -> Good:
    import torch

    import dlattn.torch

    shape = (2, 4, 5, 16) if "query" in tensors else (2, 5, 4, 16)
    made = {role: torch.zeros(shape, dtype=torch.half) for role in tensors}
    # With a gradient, which looks at more of them.
    made |= {role: x.requires_grad_() for role, x in made.items()}
    function = getattr(dlattn.torch, name)
    return whole(entered(function) if name == "replace_sdpa" else function, **made, **given)


GOOD["dlattn.torch.attention"] = lambda: _torch("attention", "q", "k", "v")
GOOD["dlattn.torch.scaled_dot_product_attention"] = lambda: _torch(
    "scaled_dot_product_attention", "query", "key", "value"
)
GOOD["dlattn.torch.register_transformers"] = lambda: _torch("register_transformers")
GOOD["dlattn.torch.replace_sdpa"] = lambda: _torch("replace_sdpa")


def _jax(name: str, *arrays: str) -> Good:
    import jax

    import dlattn.jax

    made = {role: jax.numpy.zeros((2, 5, 4, 16), "float16") for role in arrays}
    key = jax.random.key(0)
    return whole(getattr(dlattn.jax, name), **made, dropout_rate=0.5, dropout_key=key)


GOOD["dlattn.jax.attention"] = lambda: _jax("attention", "q", "k", "v")
GOOD["dlattn.jax.dot_product_attention"] = lambda: _jax(
    "dot_product_attention", "query", "key", "value"
)

# Graphs -------------------------------------------------------------------------------------------


def new() -> dlattn.pygraph:
    return dlattn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT)


def built() -> tuple[dlattn.pygraph, dict[Any, Any]]:
    """A graph that was built with overrides, and its pack."""
    graph, x = dlattn.pygraph(is_override_shape_enabled=True, io_data_type=HALF), zeros(1, 2, 8, 16)
    inputs = [graph.tensor_like(x, name=name) for name in "qkv"]
    o, _ = graph.sdpa(*inputs, generate_stats=False)
    o.set_output(True)
    graph.build()
    return graph, {**dict.fromkeys(inputs, x), o: x.copy()}


def _validated(operation: str, shapes: Mapping[str, tuple[int, ...]], **given: Any) -> Good:
    """An operation of a graph, which is then validated."""
    graph = new()
    types = dict.fromkeys(("seed", "offset"), dlattn.data_type.INT64) | {"stats": FLOAT}
    tensors = {
        name: graph.tensor(shape, name=name, data_type=types.get(name, HALF))
        for name, shape in shapes.items()
    }
    add, named = whole(getattr(graph, operation), **tensors, **given)

    def run(**kwargs: Any) -> None:
        found = add(**kwargs)
        for output in found if isinstance(found, list) else [found]:
            if output is not None:
                output.set_output(True)
                if not operation.startswith("sdpa"):
                    output.set_dim(_SQUARE)
        graph.validate()

    return run, named


_BHSD, _SQUARE = (2, 4, 8, 16), (2, 4, 8, 8)
_SHAPES = {
    "sdpa": dict.fromkeys("qkv", _BHSD),
    "sdpa_backward": dict.fromkeys(("q", "k", "v", "o", "dO"), _BHSD) | {"stats": (2, 4, 8, 1)},
    "rng": dict.fromkeys(("seed", "offset"), (1, 1, 1, 1)),
}
_GIVEN: dict[str, dict[str, Any]] = {
    "sdpa": {"generate_stats": False},
    "reduction": {"mode": dlattn.reduction_mode.ADD},
    "transpose": {"permutation": (0, 1, 3, 2)},
    "gen_index": {"axis": 3},
    "rng": {"bernoulli_probability": 0.5},
    "leaky_relu": {"negative_slope": 0.5},
    "leaky_relu_backward": {"negative_slope": 0.5},
}
_FACTORS = dict.fromkeys(("A", "B", "input", "input0", "input1", "mask", "loss"), _SQUARE)


def _operation(name: str) -> Good:
    given, needed = _GIVEN.get(name, {}), inspect.signature(getattr(new(), name)).parameters
    shapes = _SHAPES.get(name) or {x: it for x, it in _FACTORS.items() if x in needed}
    return _validated(name, shapes, **given)


#: Of methods of a graph that is built.
_VALUES: dict[str, Any] = {
    "heuristics": [dlattn.heur_mode.A],
    "engine_id": 0,
    "policy": dlattn.build_plan_policy.ALL,
    "index": 0,
    "notes": [],
    "names": [],
    "nbytes": 0,
    "uid": 1,
    "workspace": None,
    "handle": None,
    "cuda_graph": 1,
}


def _method(name: str) -> Good:
    graph, pack = built()
    named = inspect.signature(getattr(graph, name)).parameters
    given = {**_VALUES, "variant_pack": pack}
    return whole(getattr(graph, name), **{x: it for x, it in given.items() if x in named})


def _declared(name: str) -> Good:
    given = {"tensor": {"dim": _BHSD}, "tensor_like": {"source": zeros(2, 3)}}
    return whole(getattr(new(), name), **given.get(name, {"value": 1.0}))


def _deserialize(**given: Any) -> None:
    new().deserialize(given["args"])


def _wrapped(
    handle: Any = None,
    inputs: Any = None,
    outputs: Any = None,
    heuristics: Any = None,
    workspace_alloc: Any = True,
    **pygraph_kwargs: Any,
) -> dlattn.Graph:
    names = {"inputs": inputs, "outputs": outputs, "heuristics": heuristics}
    named = {**names, "handle": handle, "workspace_alloc": workspace_alloc, **pygraph_kwargs}
    with dlattn.Graph(**named) as graph:
        o, _ = graph.sdpa(*(zeros(1, 2, 8, 16) for _ in "qkv"), generate_stats=False, name="sdpa")
        o.set_output(True)
    return graph


_OF_GRAPHS = {
    **dict.fromkeys(("tensor", "tensor_like", "tensor_scalar"), _declared),
    **dict.fromkeys(
        (
            *("matmul", "reduction", "softmax", "transpose", "reshape", "gen_index"),
            *("binary_select", "relu", "relu_backward", "leaky_relu", "leaky_relu_backward"),
            *("swish", "swish_backward", "rng", "sdpa", "sdpa_backward"),
        ),
        _operation,
    ),
}
for _entry in surface():
    _owner, _, _name = _entry.name.rpartition(".")
    is_alias = _name.startswith("scaled_dot_product")
    if _owner == "dlattn.pygraph" and _entry.parameters and not is_alias:
        GOOD[_entry.name] = partial(_OF_GRAPHS.get(_name, _method), _name)
GOOD["dlattn.pygraph.deserialize"] = lambda: (_deserialize, {"args": built()[0].serialize()})
GOOD["dlattn.pygraph"] = lambda: whole(dlattn.pygraph)
GOOD["dlattn.Graph"] = lambda: whole(_wrapped)
GOOD["dlattn.Graph.set_io_tuples"] = lambda: (
    _wrapped().set_io_tuples,
    {"inputs": ["sdpa::q", "sdpa::k", "sdpa::v"], "outputs": ["sdpa::O"]},
)

# Tensors, handles and helpers ---------------------------------------------------------------------

_SETTERS: dict[str, dict[str, Any]] = {
    "set_name": {"name": "x"},
    "set_data_type": {"data_type": HALF},
    "set_dim": {"dim": _BHSD},
    "set_stride": {"stride": (1, 1, 1, 1)},
    "set_is_virtual": {"is_virtual": True},
    "set_output": {"is_output": True},
    "set_is_pass_by_value": {"is_pass_by_value": True},
    "set_uid": {"uid": 3},
    "set_reordering_type": {"reordering_type": dlattn.tensor_reordering.NONE},
    "set_alignment": {"alignment": 16},
    "set_vector_count_and_dimension": {"count": 1, "dimension": -1},
    "set_ragged_offset": {"ragged_offset": None},
}
for _name, _given in _SETTERS.items():
    GOOD[f"dlattn.tensor.{_name}"] = lambda name=_name, given=_given: (  # type: ignore[misc]
        getattr(new().tensor(_BHSD), name),
        given,
    )
GOOD["dlattn.tensor"] = lambda: (dlattn.tensor, {"attributes": None})
GOOD["dlattn.create_device_properties"] = lambda: (
    dlattn.create_device_properties,
    {"device": "sm_80"},
)
GOOD["dlattn.create_handle"] = lambda: (dlattn.create_handle, {"device": "cpu"})
for _name in ("destroy_handle", "get_stream", "set_stream"):
    GOOD[f"dlattn.{_name}"] = lambda name=_name: (  # type: ignore[misc]
        getattr(dlattn, name),
        {"handle": dlattn.create_handle()} | ({"stream": 0} if name == "set_stream" else {}),
    )
GOOD["dlattn.graph"] = lambda: whole(entered(dlattn.graph))
GOOD["dlattn.jit"] = lambda: whole(dlattn.jit)
GOOD["dlattn.graph_cache"] = lambda: whole(dlattn.graph_cache, key_fn=len)
