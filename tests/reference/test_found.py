"""Attention that is found is what the operations mean, however they are put together."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.problem import Problem
from tests.primitive_strategies import EDITS

DOUBLE = cudnn.data_type.DOUBLE
B, H, SQ, SKV, D = 2, 2, 6, 7, 8


class Declared:
    """A graph of scores, edits, softmax and product; with S as an output, no attention."""

    def __init__(self, edits: list[Any], given: dict[str, Any], keep_s: bool) -> None:
        self.graph = cudnn.pygraph(io_data_type=DOUBLE, intermediate_data_type=DOUBLE)
        self.given = given
        self.inputs: dict[str, Any] = {}
        scores = self.graph.matmul(self.input("q"), self.input("k"), name="bmm1")
        self.row, self.col = (self.graph.gen_index(scores, axis) for axis in (2, 3))
        for number, edit in enumerate(edits):
            scores = self.edited(scores, number, *edit)
        weights, self.stats = self.graph.softmax(scores, generate_stats=True)
        self.o = self.graph.matmul(weights, self.input("v"), name="bmm2")
        outputs = [self.o, self.stats.set_data_type(cudnn.data_type.FLOAT)]
        self.outputs = [t.set_output(True) for t in [*outputs, *[weights] * keep_s]]

    def input(self, name: str) -> Any:
        if name not in self.inputs:
            self.inputs[name] = self.graph.tensor_like(self.given[name], name)
        return self.inputs[name]

    def edited(self, scores: Any, number: int, edit: str, value: Any, mask: Any = None) -> Any:
        if edit == "bias":
            name = f"bias{number}"
            sizes = zip(value, (B, H, SQ, SKV), strict=True)
            dim = [size if whole else 1 for whole, size in sizes]
            self.given[name] = np.random.default_rng(number).standard_normal(dim)
            # A tensor of one element would be passed by value.
            return self.graph.bias(scores, self.input(name).set_is_pass_by_value(False))
        number = self.graph.tensor_scalar(value)
        if edit in ("scale", "div"):
            return getattr(self.graph, edit)(scores, number)
        operands = (scores, number) if edit == "keep" else (number, scores)
        return self.graph.binary_select(*operands, self.expression(mask))

    def expression(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return getattr(self.graph, x[0])(*map(self.expression, x[1:]))
        if isinstance(x, int):
            return self.graph.tensor_scalar(x)
        return {"row": self.row, "col": self.col}[x] if x in ("row", "col") else self.input(x)

    def run(self) -> list[Any]:
        """The outputs; a graph must be built."""
        memory = {
            t: np.empty(t.get_dim(), np.float32 if t is self.stats else np.float64)
            for t in self.outputs
        }
        self.graph.execute({t: self.given[name] for name, t in self.inputs.items()} | memory)
        return list(memory.values())


@settings(max_examples=600)
@given(EDITS, st.integers(0, 99))
def test_what_is_found_is_what_is_meant(edits: list[Any], seed: int) -> None:
    """Rows that attend to something are those of the operations one by one."""
    rng = np.random.default_rng(seed)
    given = {
        "q": rng.standard_normal((B, H, SQ, D)),
        "k": rng.standard_normal((B, H, D, SKV)).swapaxes(2, 3).copy().swapaxes(2, 3),
        "v": rng.standard_normal((B, H, SKV, D)),
        "len_q": rng.integers(0, SQ + 1, (B, 1, 1, 1)).astype(np.int32),
        "len_k": rng.integers(0, SKV + 1, (B, 1, 1, 1)).astype(np.int32),
    }
    found = Declared(edits, given, keep_s=False)
    found.graph.build()
    assume(isinstance(found.graph.lowered.problem, Problem))
    single = Declared(edits, given, keep_s=True)
    single.graph.build()
    assert not isinstance(single.graph.lowered.problem, Problem)
    (o, stats), (expected, wanted, _) = found.run(), single.run()
    attends = stats > -1e19
    assert (attends == (wanted > -1e19)).all()
    close = np.isclose(o, expected, rtol=1e-9, atol=1e-12)
    assert (close | ~attends).all()
