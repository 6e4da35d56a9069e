"""Blocks that a function of scores masks, against all of their elements one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.problem import BLOCK, Read, ScoreBlocks, ScoreProgram, Values, Where, skipped_blocks
from dlattn.problem.expressions import Builder
from dlattn.problem.lines import Kind, Line
from dlattn.problem.ranges import RANGES, Range, number_range
from dlattn.problem.score import read_at
from dlattn.problem.score_program import evaluate, masked_last, score_program

Tree = Any

HEADS = 2
#: Tensor -> its type, axes of "hqk", and numbers of a seed.
TENSORS: dict[str, tuple[str, str]] = {
    "rows": ("float32", "q"),
    "columns": ("float16", "hk"),
    "documents_q": ("int32", "q"),
    "documents_k": ("int64", "k"),
    "flags": ("bool", "hk"),
    "slopes": ("float32", "h"),
    "table": ("float32", "qk"),
}
_TYPES = {
    "float32": data_type.FLOAT, "float16": data_type.HALF, "int32": data_type.INT32,
    "int64": data_type.INT64, "bool": data_type.BOOLEAN,
}  # fmt: skip
_KINDS = {
    "add": Kind.INT32, "sub": Kind.INT64, "mul": Kind.INT32, "mod": Kind.INT64, "abs": Kind.INT32,
}  # fmt: skip


def tensors(seq_q: int, seq_kv: int, seed: int, wild: bool) -> dict[str, Any]:
    """Sorted documents, and numbers, some of which are none if ``wild``."""
    rng, sizes = np.random.default_rng(seed), (HEADS, seq_q, seq_kv)
    found = {}
    for name, (dtype, axes) in TENSORS.items():
        dim = (1, *(size if x in axes else 1 for x, size in zip("hqk", sizes, strict=True)))
        axis = 2 if "q" in axes else 3
        # Every one of them is there, so that between two there are all others.
        every = np.arange(np.prod(dim)).reshape(dim) % 4
        data = np.sort(np.where(every.cumsum(axis) < 7, every, rng.integers(0, 4, dim)), axis)
        if np.dtype(dtype).kind == "f":
            data = data + rng.choice([0.0, 0.25, 0.5], dim)
        if wild and np.dtype(dtype).kind == "f":
            data = np.where(rng.random(dim) < 0.003, rng.choice([np.nan, np.inf, -np.inf]), data)
        if wild and dtype == "int64":
            data = data + rng.choice([0, 2**31, 2**62])
        found[name] = data.astype(dtype)
    return found


def program(tree: Tree) -> tuple[ScoreProgram, list[str]]:
    """The score where a condition is true, else -inf; and the tensors that it reads."""
    builder, names = Builder(), list(TENSORS)

    def line(tree: Tree) -> int:
        if isinstance(tree, tuple):
            operation, *operands = tree
            whole = operation.endswith("_whole")
            name = operation.removesuffix("_whole")
            kind = _KINDS[name] if whole else Kind.FLOAT
            return builder.pointwise(name, *map(line, operands), kind=kind)
        if isinstance(tree, (int, float)):
            return builder.constant(tree, Kind.FLOAT if isinstance(tree, float) else Kind.INT64)
        if tree in ("head", "row", "col"):
            return builder.position(("head", "row", "col").index(tree) + 1)
        if tree == "s":
            return builder.score()
        dtype, _ = TENSORS[tree]
        kinds = {"bool": Kind.BOOLEAN, "int32": Kind.INT32, "int64": Kind.INT64}
        return builder.read(names.index(tree), kinds.get(dtype, Kind.FLOAT))

    low = builder.constant(-np.inf)
    result = builder.pointwise("binary_select", builder.score(), low, line(tree))
    reads = [Read(_TYPES[dtype], "q" in axes, "k" in axes) for dtype, axes in TENSORS.values()]
    made, used = score_program(builder, result, None, reads)
    return made, [names[number] for number in used]


def kept(blocks: ScoreBlocks, values: Values) -> Any:
    """The condition of each element."""
    seq_q, seq_kv = (int(x.item()) for x in (values.len_q, values.len_kv))
    where = Where(
        *(np.zeros((1, 1, 1, 1), int), np.arange(HEADS).reshape(1, -1, 1, 1)),
        *(np.arange(seq_q).reshape(1, 1, -1, 1), np.arange(seq_kv).reshape(1, 1, 1, -1)),
    )
    places = (where.batch, where.head, where.query, where.key)
    score = np.random.default_rng(0).normal(size=(1, HEADS, seq_q, seq_kv)).astype(np.float32)

    def leaf(line: Line) -> Any:
        if line.operation == "score":
            return score
        number = int(line.number or 0)
        if line.operation == "position":
            return places[number]
        return read_at(values.score_tensors[number], where)

    found = np.ones(score.shape, bool)
    with np.errstate(all="ignore"):
        for condition, wanted in masked_last(blocks.program)[1]:
            one = evaluate(blocks.program.lines, condition, leaf, np.float32)
            found &= np.broadcast_to(one, score.shape) == wanted
    return found


def by_blocks(elements: Any, reduction: Any) -> Any:
    """Of the elements of each block."""
    rows, columns = (np.arange(0, size, BLOCK) for size in elements.shape[2:])
    return reduction.reduceat(reduction.reduceat(elements, rows, 2), columns, 3)


def told(tree: Tree, seq_q: int, seq_kv: int, seed: int = 0, wild: bool = False) -> Any:
    """What is told of blocks, and what is so."""
    made, names = program(tree)
    blocks = skipped_blocks(made)
    assert blocks is not None
    data = tensors(seq_q, seq_kv, seed, wild)
    len_q, len_kv = (np.full((1, 1, 1, 1), size) for size in (seq_q, seq_kv))
    read = tuple(data[name] for name in names)
    values = Values(1.0, len_q, len_kv, heads_q=HEADS, score_tensors=read)
    truth = blocks.truth(0, values)
    elements = kept(blocks, values)
    some, every = (by_blocks(elements, one) for one in (np.logical_or, np.logical_and))
    return truth, np.broadcast_arrays(some, truth.maybe)[0], every


EXACT: dict[str, Tree] = {
    "documents": ("cmp_eq", "documents_q", "documents_k"),
    "other documents": ("logical_not", ("cmp_neq", "documents_k", "documents_q")),
    "causal": ("cmp_ge", "row", "col"),
    "window": ("cmp_lt", ("abs_whole", ("sub_whole", "row", "col")), 130),
    "window of floats": ("cmp_le", ("sub", "row", "col"), 128.0),
    "squares": ("cmp_eq", ("floor", ("div", "row", 64.0)), ("floor", ("mul", "col", 1 / 64))),
    "of a head": ("logical_or", ("cmp_eq", "head", 1), ("cmp_gt", "col", 255)),
    "flags": ("logical_and", "flags", ("cmp_ge", "row", 128)),
    "remainder": ("cmp_lt", ("mod_whole", "row", 256), 128),
    "chosen": (
        "binary_select", ("cmp_ge", "row", 128), ("cmp_lt", "col", 128), ("cmp_eq", "head", 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seq_q, seq_kv", [(512, 512), (300, 131), (5, 700)])
def test_masks_of_blocks(name: str, seq_q: int, seq_kv: int) -> None:
    """Of documents, diagonals, windows and squares, what is told is what is so: a block is visited
    if an element of it is kept, and whole if all are."""
    for seed in range(3):
        truth, some, every = told(EXACT[name], seq_q, seq_kv, seed)
        np.testing.assert_array_equal(np.broadcast_to(truth.maybe, some.shape), some)
        np.testing.assert_array_equal(np.broadcast_to(truth.surely, every.shape), every)


_NUMBERS = st.sampled_from(
    ("row", "col", "head", "rows", "columns", "documents_q", "documents_k", "flags", "slopes",
     "table", "s", 0, 1, 3, 128, 2**31 - 1, 0.5, -1.5, 1 / 3, float("inf"), 1e10)
)  # fmt: skip


def _grown(x: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    binary = ("add", "sub", "mul", "div", "mod", "max", "min")
    return (
        st.tuples(
            st.sampled_from((*binary, *(f"{n}_whole" for n in ("add", "sub", "mul", "mod")))), x, x
        )
        | st.tuples(st.sampled_from(("neg", "abs", "abs_whole", "floor", "ceil", "sin")), x)
        | st.tuples(st.just("binary_select"), x, x, _compared(x))
    )


def _compared(x: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    names = ("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le")
    return st.tuples(st.sampled_from(names), x, x)


CONDITIONS = st.recursive(
    _compared(st.recursive(_NUMBERS, _grown, max_leaves=4)) | st.just("flags"),
    lambda x: (
        st.tuples(st.sampled_from(("logical_and", "logical_or")), x, x)
        | st.tuples(st.just("logical_not"), x)
        | st.tuples(st.just("binary_select"), x, x, x)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(CONDITIONS, st.integers(0, 99), st.booleans())
def test_what_is_told_is_so(tree: Tree, seed: int, wild: bool) -> None:
    """Of any condition: a block of which an element is kept is visited, and every element of a
    whole block is kept, whatever is read, NaN and infinity included."""
    if skipped_blocks(program(tree)[0]) is None:
        return
    truth, some, every = told(tree, 200, 300, seed, wild)
    assert not (some & ~truth.maybe).any()
    assert not (truth.surely & ~every).any()


def test_what_cannot_be_told() -> None:
    """Tables of both axes, scores, and functions that are no masks have no blocks; beside another
    mask, they leave that its own."""
    low = ("cmp_lt", "table", 0.5)
    for tree in (low, ("cmp_gt", "s", 0.0), ("cmp_lt", ("sin", "row"), 0.5)):
        assert skipped_blocks(program(tree)[0]) is None
    truth, some, _ = told(("logical_and", low, ("cmp_ge", "row", "col")), 256, 256)
    assert truth.maybe[0, 0].tolist() == [[True, False], [True, True]]
    assert not truth.surely.any()


def test_remainders_of_infinity() -> None:
    """They are no numbers, of which no comparison is true."""
    numbers, by = (
        number_range(np.float32([low]), np.float32([high]), Kind.FLOAT, np.float32)
        for low, high in ((-1, np.inf), (128, 128))
    )
    with np.errstate(all="ignore"):
        made = RANGES["mod"](numbers, by)
    assert isinstance(made, Range) and made.any.all()
