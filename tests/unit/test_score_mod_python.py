"""``score_mod`` as one first writes it, in plain Python: refusals say what to write."""

from __future__ import annotations

import gc
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from tests.unit.valid_graphs import Backward, Forward


def refused(score_mod: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Forward().sdpa(score_mod=score_mod)


#: Of two tensors, or of one and a number, and the methods in their place.
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "logical_and": operator.and_,
    "logical_or": operator.or_,
    "cmp_lt": operator.lt,
    "cmp_le": operator.le,
    "cmp_gt": operator.gt,
    "cmp_ge": operator.ge,
    "neg": lambda score, other: -score,
    "abs": lambda score, other: abs(score),
    "logical_not": lambda score, other: ~score,
}
REFLECTED = {"cmp_lt": "cmp_gt", "cmp_le": "cmp_ge", "cmp_gt": "cmp_lt", "cmp_ge": "cmp_le"}


@pytest.mark.parametrize("method", OPERATORS)
def test_operators(method: str) -> None:
    """Python's operators name the graph's methods, which take numbers as tensors, on both sides."""
    compute = OPERATORS[method]
    said = r"call graph\.{}\(.* where a number is graph\.tensor_scalar"
    refused(lambda graph, score: compute(score, 1), TypeError, said.format(method))
    refused(lambda graph, score: compute(score, score), TypeError, said.format(method))
    if method not in ("neg", "abs", "logical_not"):
        reflected = said.format(REFLECTED.get(method, method))
        refused(lambda graph, score: compute(1.0, score), TypeError, reflected)
    graph = cudnn.pygraph()
    assert callable(getattr(graph, method))
    tensors = [graph.tensor((1,)) for _ in range(2)]
    assert tensors[0] == tensors[0] != tensors[1] and len({*tensors}) == 2


def test_functions_of_other_arguments() -> None:
    """What cannot be called with a graph and a score, Python's own functions too, is refused as the
    argument that it is; errors within it are its own."""
    for function in (len, lambda score: score, lambda graph, score, b, h: score, Forward):
        refused(function, TypeError, "score_mod is called with 2 arguments.* Give a function such")
    identity = {"score_mod": lambda graph, score: score}
    with pytest.raises(TypeError, match="score_mod_bprop is called with 2 arguments"):
        Backward().sdpa(score_mod_bprop=abs, **identity)
    refused(lambda graph, score: len(graph, score), TypeError, r"len\(\) takes exactly one")
    refused(max, TypeError, "call graph.cmp_")
    Forward().sdpa(score_mod=lambda *given: given[1]).validate()


def test_other_methods() -> None:
    """A function's graph has no attention, and says what it has."""
    for name in ("sdpa", "execute", "exp2", "__deepcopy__"):
        said = f"has no '{name}': it has pointwise operations such as add"
        refused(lambda graph, score, name=name: getattr(graph, name), AttributeError, said)


@pytest.mark.parametrize("graph", [Forward, Backward])
def test_functions_are_let_go(graph: type[Forward]) -> None:
    """They are called by ``sdpa`` and its backward alone: a graph keeps neither them, nor what they
    hold, and is pickled without them."""

    class Held:
        cap = 50.0

    def declared(held: Held) -> Forward:
        def score_mod(graph: Any, score: Any) -> Any:
            return graph.mul(score, graph.tensor_scalar(held.cap))

        def bprop(graph: Any, gradient: Any) -> Any:
            return graph.mul(gradient, graph.tensor_scalar(held.cap))

        more = {} if graph is Forward else {"score_mod_bprop": bprop}
        return graph().sdpa(score_mod=score_mod, **more)

    held = Held()
    gone = weakref.ref(held)
    made = declared(held).graph
    del held
    gc.collect()
    assert gone() is None
    again = pickle.loads(pickle.dumps(made))
    text = cudnn.pygraph(handle=made._handle)
    text.deserialize(repr(made))
    assert again.key() == text.key() == made.key()


def test_an_array_is_one_tensor() -> None:
    """Of a ``Graph``, an array that the function reads twice, or that is an argument as well, is
    one tensor, which ``inputs`` lists once; under a name of its own it is another."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 5, 8), dtype=np.float32)
    table = rng.standard_normal((1, 2, 5, 5), dtype=np.float32)

    def score_mod(graph: Any, score: Any) -> Any:
        return graph.add(graph.mul(score, graph.tensor_like(table)), graph.tensor_like(table))

    with cudnn.Graph(inputs=[x, table], outputs=["n::O"]) as graph:
        arguments = {"bias": table, "score_mod": score_mod, "is_inference": True, "name": "n"}
        graph.sdpa(x, x, x, **arguments)[0].set_output(True)
    weights = np.exp(x @ x.swapaxes(2, 3) * table + 2 * table)
    expected = weights / weights.sum(-1, keepdims=True) @ x
    np.testing.assert_allclose(graph(x, table), expected, rtol=1e-4, atol=1e-5)

    def named(graph: Any, score: Any) -> Any:
        return graph.add(score, graph.tensor_like(table, name="other"))

    with cudnn.Graph(inputs=[x, "n::bias", "other"], outputs=["n::O"]) as graph:
        arguments["score_mod"] = named
        graph.sdpa(x, x, x, **arguments)[0].set_output(True)
    weights = np.exp(x @ x.swapaxes(2, 3) + table)
    expected = weights / weights.sum(-1, keepdims=True) @ x
    np.testing.assert_allclose(graph(x, 2 * table, -table), expected, rtol=1e-4, atol=1e-5)
