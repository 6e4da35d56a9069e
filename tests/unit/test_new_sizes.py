"""What README says of new sizes: kernels for them are compiled with the first."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import dlattn

HALF, FLOAT = dlattn.data_type.HALF, dlattn.data_type.FLOAT
INT32 = dlattn.data_type.INT32

BATCHES = (1, 3, 33)
LENGTHS = ((17, 17), (64, 64), (65, 65), (200, 3000), (1024, 1024), (4096, 4096), (16384, 16384))
DECODED = tuple(product((1, 2, 8, 16), (100, 1000, 5000, 60000)))


def plan(
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    dim: int,
    backward: bool,
    padded: bool = False,
) -> Any:
    """The plan on Hopper for (B, Sq, Skv), which is not compiled."""
    batch, seq_q, seq_kv = sizes
    graph = dlattn.pygraph(
        io_data_type=HALF,
        intermediate_data_type=FLOAT,
        compute_data_type=FLOAT,
        sm_version=90,
    )

    def tensor(count: int, rows: int, columns: int = dim, dtype: Any = HALF) -> Any:
        stride = (rows * count * columns, columns, count * columns, 1)
        return graph.tensor((batch, count, rows, columns), stride, data_type=dtype)

    q, (k, v) = tensor(heads[0], seq_q), (tensor(heads[1], seq_kv) for _ in "kv")
    options: dict[str, Any] = {"attn_scale": 0.1, "use_causal_mask": True}
    if padded:
        options["use_padding_mask"] = True
        for role in ("seq_len_q", "seq_len_kv"):
            options[role] = graph.tensor((batch, 1, 1, 1), (1, 1, 1, 1), data_type=INT32)
    if backward:
        more = tensor(heads[0], seq_q), tensor(heads[0], seq_q), tensor(heads[0], seq_q, 1, FLOAT)
        results = graph.sdpa_backward(q, k, v, *more, **options)
    else:
        results = graph.sdpa(q, k, v, generate_stats=False, **options)
    for result in results:
        if result is not None:
            result.set_output(True)
    graph.create_execution_plans()
    assert graph._planning is not None
    return graph._planning.plans[0]


@pytest.mark.parametrize("heads", [(8, 8), (16, 2)])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "lengths, backward, padded",
    [
        pytest.param(LENGTHS, False, False, id="forward"),
        pytest.param(DECODED, False, False, id="decoding"),
        pytest.param(DECODED, False, True, id="decoding, lengths"),
        pytest.param(LENGTHS, True, False, id="backward"),
    ],
)
def test_all_sizes_are_compiled_at_once(
    lengths: tuple[tuple[int, int], ...],
    backward: bool,
    padded: bool,
    dim: int,
    heads: tuple[int, int],
) -> None:
    """What one size takes is compiled with what any other does, by the same plan."""
    plans = [plan((b, *of), heads, dim, backward, padded) for b, of in product(BATCHES, lengths)]
    for first in {(it.name, *it.sources()): it for it in plans}.values():
        with_it = {*first.sources(), *first.companions()}
        assert all(with_it.issuperset(it.sources()) for it in plans if it.name == first.name)


@pytest.mark.parametrize("padded", [False, True])
def test_few_queries_have_the_kernels_of_two_plans(padded: bool) -> None:
    """Some are decoded and others are not: by how many queries there are, how many heads share
    keys, and how many sequences and keys. All have the same kernels."""
    keys = [keys for queries, keys in DECODED if queries == 1]
    sizes = list(product((*BATCHES, 100), (1, 5, 8, 16), keys))
    heads = (8, 8), (4, 2), (16, 2)
    plans = [plan(of, own, 128, False, padded) for of, own in product(sizes, heads)]
    assert {it.name for it in plans} == {"decode", "fwd_sm90"}
    for first in {(it.name, *it.sources()): it for it in plans}.values():
        with_it = {*first.sources(), *first.companions()}
        assert all(with_it.issuperset(it.sources()) for it in plans)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hoppers_backward_is_few_kernels(dim: int) -> None:
    """At most five of each of its parts, for all sizes."""
    it = plan((3, 1024, 1024), (8, 8), dim, True)
    assert it.name == "bwd_sm90"
    sources = {*it.sources(), *it.companions()}
    for name in {source.name for source in sources}:
        assert sum(source.name == name for source in sources) <= 5
