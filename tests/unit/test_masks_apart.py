"""Functions of scores as a mask of elements and what is left of the edit, against the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.problem import (
    Alibi,
    Bias,
    Direction,
    Padding,
    Problem,
    Scale,
    ScoreProgram,
    SoftCap,
    skipped_blocks,
)
from dlattn.problem.lines import Line
from dlattn.problem.score_program import evaluate
from tests.compile.programs import MODS
from tests.compile.programs import program as recognised
from tests.unit.test_score_blocks import CONDITIONS, EXACT, HEADS, program, tensors

Tree = Any


def computed(made: ScoreProgram, result: int, names: list[str], score: Any) -> Any:
    """A line, of all elements."""
    data = tensors(*score.shape[2:], 0, wild=False)
    sizes = (1, *score.shape[1:])
    places = [
        np.arange(n).reshape([-1 if a == i else 1 for a in range(4)]) for i, n in enumerate(sizes)
    ]

    def leaf(line: Line) -> Any:
        if line.operation == "score":
            return score
        number = int(line.number or 0)
        return places[number] if line.operation == "position" else data[names[number]]

    with np.errstate(all="ignore"):
        return np.broadcast_to(evaluate(made.lines, result, leaf, np.float32), score.shape)


def assert_the_same(tree: Tree) -> None:
    """The rest where conditions are true, and else -inf, is the function."""
    made, names = program(tree)
    blocks = skipped_blocks(made)
    if blocks is None:
        return
    score = np.random.default_rng(1).normal(size=(1, HEADS, 40, 50)).astype(np.float32)
    want, rest = computed(made, made.result, names, score), blocks.rest
    got = score if rest is None else computed(rest, rest.result, names, score)
    for line, wanted in blocks.conditions:
        got = np.where(computed(made, line, names, score) == wanted, got, -np.inf)
    np.testing.assert_array_equal(got, want)


@settings(max_examples=200, deadline=None)
@given(CONDITIONS, CONDITIONS)
def test_rest_and_conditions_are_all(first: Tree, second: Tree) -> None:
    """See :func:`assert_the_same`: of any conditions, of scores and of places."""
    assert_the_same(first)
    assert_the_same(("logical_and", second, ("cmp_eq", "documents_q", "documents_k")))


def test_what_masks_alone_leaves_no_edit() -> None:
    """Of documents nothing is left but a mask; what conditions of the score mask is an edit."""
    for name, tree in EXACT.items():
        made, _ = program(tree)
        blocks = skipped_blocks(made)
        assert blocks is not None, name
        assert blocks.rest is None and blocks.conditions
    blocks = skipped_blocks(program(("logical_or", ("cmp_gt", "s", 0.0), EXACT["causal"]))[0])
    assert blocks is not None and not blocks.conditions
    assert blocks.rest is not None


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(MODS)), st.booleans(), st.booleans())
def test_there_and_back(name: str, capped: bool, biased: bool) -> None:
    """A problem whose function is taken apart and put together is what it was, with its edits in
    order; without blocks, too."""
    made = recognised(name, Direction.FORWARD)
    blocks = skipped_blocks(made)
    edits = (
        Scale(), *([SoftCap()] if capped else []), made,
        *([Bias(data_type.FLOAT, True), Alibi(True)] if biased else []),
    )  # fmt: skip
    masks = (Padding(), *([] if blocks is None else [blocks]))
    whole = Problem(Direction.FORWARD, data_type.HALF, 64, 64, edits, masks)
    apart = whole.masked_apart
    assert (apart == whole) == (blocks is None)
    assert apart.masked_apart == apart and apart.masked_by_edits == whole
    assert apart.without_score_blocks == replace(whole, masks=(Padding(),))
