"""Ragged plans: where tensor maps end, what is told of batch entries, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.mapped import map_of
from dlattn.problem import (
    Direction,
    Geometry,
    Padding,
    Problem,
    Scale,
    TensorSpec,
    offset_role,
)
from dlattn.runtime.target import KNOWN, Target

HOPPER = KNOWN["sm_90a"]
ROLES = {
    Direction.FORWARD: ("q", "k", "v", "o", "stats"),
    Direction.BACKWARD: ("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
}


def problem(direction: Direction) -> Problem:
    return Problem(
        direction, data_type.BFLOAT16, 128, 128, (Scale(positive=True),), (Padding(),),
        data_type.FLOAT, ragged=True,
    )  # fmt: skip


def geometry(
    direction: Direction, batch: int = 3, groups: int = 2, heads: int = 4, seq: int = 300,
    padded: tuple[str, ...] = (), most_tokens: int | None = None,
) -> Geometry:  # fmt: skip
    """Packed tensors, but for those that are padded."""
    tensors = {}
    for role in ROLES[direction]:
        own = groups if role in ("k", "v", "dK", "dV") else heads
        columns = 1 if role == "stats" else 128
        dtype = data_type.FLOAT if role == "stats" else data_type.BFLOAT16
        dim, stride = (batch, own, seq, columns), (columns, own * columns, 1)
        whole = 0 if role not in padded else seq * own * columns
        tensors[role] = TensorSpec(role, dim, (whole, *stride), dtype, ragged=role not in padded)
        if role not in padded:
            name = offset_role(role)
            tensors[name] = TensorSpec(name, (batch + 1, 1, 1, 1), (1, 0, 0, 1), data_type.INT64)
    return Geometry(tensors, 1.0, most_tokens_q=most_tokens, most_tokens_kv=most_tokens)


def plan_of(family: type[CudaPlan], **sizes) -> CudaPlan:
    direction = Direction.BACKWARD if family in (BwdSm80, BwdSm90) else Direction.FORWARD
    return family(problem(direction), geometry(direction, **sizes), HOPPER)


@pytest.mark.parametrize("family", [FwdSm80, FwdSm90, BwdSm80, BwdSm90])
def test_one_kernel_tells_the_others(family) -> None:
    """It runs first, one block for each entry; without ragged tensors there is none."""
    plan = plan_of(family)
    (first,) = plan.first_kernels()
    assert (first.source.name, first.grid) == ("dlattn_ragged", (3, 1, 1))
    dense = replace(problem(plan.problem.direction), ragged=False)
    assert not family(dense, plan.geometry, HOPPER).first_kernels()


@pytest.mark.parametrize("family", [BwdSm80, BwdSm90])
def test_row_statistics_begin_behind_the_entries(family) -> None:
    """Its blocks stand ready when that first kernel ends; without it, or before Hopper, where no
    kernel can wait for the one before, they begin as any."""

    def begins_early(of_problem: Problem, target: Target = HOPPER) -> bool:
        plan = family(of_problem, geometry(Direction.BACKWARD), target)
        (delta,) = (it for it in plan.kernels() if "bwd_delta" in it.source.name)
        return delta.programmatic

    ragged = problem(Direction.BACKWARD)
    assert begins_early(ragged)
    assert not begins_early(replace(ragged, ragged=False))
    assert not begins_early(ragged, KNOWN["sm_80"])


@pytest.mark.parametrize("family", [FwdSm80, FwdSm90, BwdSm80, BwdSm90])
def test_addresses_of_offsets_and_lengths(family) -> None:
    """The user's lengths go to the first kernel; the others read its copies, in the workspace."""
    plan = plan_of(family)
    lengths = TensorSpec("seq_len_q", (3, 1, 1, 1), (1, 0, 0, 1), data_type.INT64)
    tensors = {**plan.geometry.tensors, "seq_len_q": lengths}
    plan = family(plan.problem, replace(plan.geometry, tensors=tensors), HOPPER)
    for number, (_, slot, _) in enumerate(plan._slots):
        slot.value = 4096 + number
    params, numbers = plan._params, {role: 4096 + n for n, (role, *_) in enumerate(plan._slots)}
    assert params.o.offsets == numbers["o_offset"] and params.o.has_int64_offsets
    assert params.ragged.given_q.data == numbers["seq_len_q"] and params.ragged.given_q.is_int64
    assert plan.ragged is not None
    plan.place_workspace(1 << 20)
    first = (1 << 20) + plan.scratch_bytes
    end = first + plan.ragged.nbytes
    assert first <= params.seq_len_q.data < params.seq_len_kv.data <= end - 4 * 3
    assert not params.seq_len_q.is_int64


@given(
    longest=st.integers(1, 3000),
    length=st.integers(0, 3000),
    row=st.integers(1, 500).map(lambda n: 8 * n),
    offset=st.integers(0, 10**9).map(lambda n: 8 * n),
    tile=st.integers(0, 3000),
)
def test_maps_of_ragged_tensors_end_with_each_sequence(longest, length, row, offset, tile) -> None:
    """Coordinates as ``ragged.cuh`` makes them: rows of the sequence, and no others, are inside,
    each at its address."""
    length = min(length, longest)
    spec = TensorSpec("k", (4, 2, longest, 64), (0, 64, row, 1), data_type.HALF, ragged=True)
    begin, dim, stride = map_of(spec)
    for r in {0, tile, max(0, length - 1), length, longest - 1, longest + 255}:
        inner, outer = longest - length + r, (offset + length * row) // 8
        assert 0 <= outer < dim[0]
        assert (inner < dim[2]) == (r < length)
        assert begin + 2 * (outer * stride[0] + inner * stride[2]) == 2 * (offset + r * row)


def test_what_hopper_leaves_to_the_portable_backward() -> None:
    """Padded gradients beside ragged tensors; ragged ones, and padded o, stats and q, it takes."""
    for padded in ("dQ", "dK", "dV"):
        mixed = geometry(Direction.BACKWARD, padded=(padded,))
        reason = BwdSm90.supports(problem(Direction.BACKWARD), mixed, HOPPER)
        assert reason is not None and "ragged dQ, dK and dV" in reason
        assert BwdSm80.supports(problem(Direction.BACKWARD), mixed, HOPPER) is None
    mixed = geometry(Direction.BACKWARD, padded=("o", "stats", "q"))
    assert BwdSm90.supports(problem(Direction.BACKWARD), mixed, HOPPER) is None


@pytest.mark.parametrize("family", [BwdSm80, BwdSm90])
def test_a_bound_of_all_tokens_makes_the_workspace_smaller(family) -> None:
    """Row statistics, and without places sums of dQ, are then linear in the tokens there are."""
    sizes = {"batch": 100, "seq": 4096}
    whole, bounded = (plan_of(family, **sizes, most_tokens=n) for n in (None, 10_000))
    rows = 10_000 + 100 * bounded.tiling.tile_q
    assert bounded.ragged.row_tiles * bounded.tiling.tile_q <= rows
    assert whole.workspace_size - bounded.workspace_size >= 4 * 2 * 4 * (100 * 4096 - rows)
    if family is BwdSm80:
        assert bounded.workspace_size <= 4 * rows * (4 * 128 + 8) + 2**20


@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    more=st.sampled_from((0, 0, 1, 1000)),
)
@pytest.mark.parametrize("family", [BwdSm80, BwdSm90])
def test_tiles_of_all_tokens_have_room(family, lengths, more) -> None:
    """Whatever sequences the tokens that were promised are divided into, each of which may end in a
    tile of its own."""
    most = max(1, sum(lengths) + more)
    plan = plan_of(family, batch=len(lengths), seq=400, most_tokens=most)
    assert sum(-(-n // plan.tiling.tile_q) for n in lengths) <= plan.ragged.row_tiles


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    groups=st.integers(1, 20),
    heads_per_group=st.integers(1, 4),
    in_places=st.booleans(),
)
def test_nobody_waits_for_ever(lengths, groups, heads_per_group, in_places) -> None:
    """A Hopper item waits only for items with smaller numbers, whatever the lengths.

    It waits for the sums that it stores as dQ, and for the place of its bundle's sums; for neither
    where all have sums of their own.
    """
    longest = max(1, *lengths) if len(lengths) > 1 else max(1, lengths[0])
    heads = groups * heads_per_group
    with pytest.MonkeyPatch.context() as patch:
        if in_places:
            patch.setattr(BwdSm90, "_own_sums", False)
        plan = plan_of(BwdSm90, batch=len(lengths), groups=groups, heads=heads, seq=longest)
    assume(not plan.tiling.relays)  # without sums of dQ
    params, tile_k = plan._params, plan.tiling.tile_k
    groups = heads // params.heads_per_block.number
    room = -(-longest // plan.tiling.tile_q)
    bundled = [min(groups, room // max(1, -(-n // plan.tiling.tile_q))) for n in lengths]
    entries = sorted(zip(lengths, bundled, strict=True), reverse=True)
    items = numbered(entries, groups, params.items.pairs.number, tile_k)
    assert len(items) <= plan.ragged.items.most
    numbers: dict[int, list[int]] = {}
    for number, bundle in enumerate(items):
        numbers.setdefault(bundle, []).append(number)
    assert sorted(numbers) == list(range(len(numbers)))  # every bundle has items
    assert len(numbers) <= plan.ragged.items.bundles
    if params.dq_places == 0:
        assert not in_places and params.dq_lag >= len(numbers)
        return
    for bundle, own in numbers.items():
        stored = bundle - params.dq_lag  # with this bundle's items
        assert stored < 0 or max(numbers[stored]) < min(own)
        previous = bundle - params.dq_places  # in the place
        assert previous < 0 or max(numbers[previous]) < min(own)
        storing = previous + params.dq_lag
        assert previous < 0 or storing >= len(numbers) or max(numbers[storing]) < min(own)


def numbered(entries: list[tuple[int, int]], groups: int, per_wave: int, tile_k: int) -> list[int]:
    """The bundle of each item, in the order of ``ragged.cuh``, of entries' lengths and of how many
    groups a bundle has."""
    items: list[int] = []
    first_bundle = 0
    for length, bundled in entries:
        tiles = max(1, -(-length // tile_k))
        for first in range(0, groups, per_wave):
            wave = range(first, min(first + per_wave, groups))
            items += [first_bundle + head // bundled for _ in range(tiles) for head in wave]
        first_bundle += -(-groups // bundled)
    return items
