"""Backward plans: whose additions have an order, and when and where Hopper's sums of dQ exist."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.dtypes import data_type
from dlattn.graph.notes import numerical_notes
from dlattn.plans import bwd_dbias
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.bwd_waves import (
    LEAST_WIDTH,
    MANY_TILES,
    MOST_RAGGED_PAIRS,
    even_wave,
    pairs_of_causal_waves,
)
from dlattn.problem import (
    Alibi,
    Bias,
    Direction,
    Geometry,
    Padding,
    Philox,
    Problem,
    Scale,
    ScoreGradient,
    SoftCap,
    TensorSpec,
)
from dlattn.runtime.target import KNOWN

HOPPER = KNOWN["sm_90a"]


def problem(head_dim: int = 128, *, deterministic: bool = False) -> Problem:
    """A backward with full masks."""
    return Problem(
        Direction.BACKWARD, data_type.BFLOAT16, head_dim, head_dim,
        (Scale(positive=True),), (Padding(),), data_type.FLOAT, deterministic=deterministic,
    )  # fmt: skip


def geometry(
    batch: int = 2, groups: int = 2, heads: int = 4, seq_q: int = 300, seq_kv: int = 300,
    head_dim: int = 128, *, causal: bool = False,
) -> Geometry:  # fmt: skip
    """Contiguous tensors."""

    def spec(role: str, heads: int, seq: int) -> TensorSpec:
        dim, stride = (batch, heads, seq, head_dim), (heads * seq * head_dim, seq * head_dim)
        return TensorSpec(role, dim, (*stride, head_dim, 1), data_type.BFLOAT16)

    tensors = {role: spec(role, heads, seq_q) for role in ("q", "o", "dO")}
    tensors |= {role: spec(role, groups, seq_kv) for role in ("k", "v", "dK", "dV")}
    return Geometry(tensors, 1.0, band_right=0 if causal else None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_promises_an_order_of_additions(deterministic: bool) -> None:
    """The portable plan refuses a fixed order by name; Hopper's has one when asked, and says so."""
    wanted = problem(deterministic=deterministic)
    reason = BwdSm80.supports(wanted, geometry(), KNOWN["sm_80"])
    assert (reason is not None and "use_deterministic_algorithm" in reason) == deterministic
    assert BwdSm90.supports(wanted, geometry(), HOPPER) is None
    notes = numerical_notes(BwdSm90(wanted, geometry(), HOPPER))
    assert (cudnn.numerical_note.NONDETERMINISTIC in notes) != deterministic


def test_dropout_that_hopper_leaves_to_the_portable_kernel() -> None:
    """Beside a soft cap and slopes, dropout in the widest heads is the portable kernel's."""
    edits = (Scale(positive=True), SoftCap(), Alibi(symmetric=True))
    wanted = replace(problem(256), edits=edits, dropout=Philox())
    assert "dropout" in str(BwdSm90.supports(wanted, geometry(head_dim=256), HOPPER))
    assert BwdSm80.supports(wanted, geometry(head_dim=256), HOPPER) is None
    for other in (replace(wanted, edits=edits[:2]), replace(wanted, dropout=None)):
        assert BwdSm90.supports(other, geometry(head_dim=256), HOPPER) is None


@pytest.mark.parametrize("arch", KNOWN)
def test_tiles_of_a_bias_gradient_fit(arch: str) -> None:
    """Whatever the head dimensions, there is a tiling, and two blocks fit where two are meant."""
    target = KNOWN[arch]
    for head_dims in product(range(8, 257, 8), repeat=2):
        wanted = replace(problem(), head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
        for aligned in (True, False):
            bias = Bias(data_type.HALF, contiguous=True, aligned=aligned)
            edited = replace(wanted, edits=(*wanted.edits, bias), d_bias=data_type.FLOAT)
            tiling = bwd_dbias.choose_tiling(edited, target)
            block = tiling.shared_memory(edited) + 1024
            assert tiling.min_blocks * block <= target.shared_memory + 1024


def test_a_bias_gradient_adds_one_kernel() -> None:
    """All other kernels of a backward are the same with it as without."""
    bias = Bias(data_type.HALF, contiguous=True, aligned=True)
    tensors = geometry().tensors
    scores = TensorSpec("dBias", (2, 4, 300, 300), (360000, 90000, 300, 1), data_type.FLOAT)
    for family in (BwdSm80, BwdSm90):
        plain = replace(problem(), edits=(*problem().edits, bias))
        sources = [
            [kernel.source for kernel in family(wanted, Geometry(given, 1.0), HOPPER).kernels()]
            for wanted, given in (
                (plain, tensors),
                (replace(plain, d_bias=data_type.FLOAT), {**tensors, "dBias": scores}),
            )
        ]
        others = [s for s in sources[1] if not s.name.startswith("dlattn_bwd_dbias")]
        assert others == sources[0]
        assert len(sources[1]) == len(sources[0]) + 1


@given(sizes=st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=3))
def test_gradients_that_follow_each_other_share_scratch(sizes: list[tuple[bool, ...]]) -> None:
    """It has room for whichever of them needs most, and counts for its tiles."""
    gradients = tuple(ScoreGradient(n, data_type.FLOAT, 0) for n in range(len(sizes)))
    wanted, tensors = replace(problem(), score_gradients=gradients), dict(geometry().tensors)
    for gradient, whole in zip(gradients, sizes, strict=True):
        full = (2, 4, 300, 300)
        dim = tuple(n if is_whole else 1 for n, is_whole in zip(full, whole, strict=True))
        tensors[gradient.role] = TensorSpec(gradient.role, dim, (0, 0, 0, 1), data_type.FLOAT)
    given = Geometry(tensors, 1.0)
    scratch = bwd_dbias.gradient_scratch(wanted, given, HOPPER)
    tiling = bwd_dbias.choose_tiling(wanted, HOPPER)
    for gradient in gradients:
        tiles, *parts = bwd_dbias._grid(wanted, given, gradient.role, tiling, HOPPER)
        if prod(parts) > 1:
            assert scratch.arrivals >= 4 * tiles
            assert scratch.parts >= 4 * tiles * prod(parts) * tiling.tile_q * tiling.tile_k


@given(
    batch=st.integers(1, 40),
    groups=st.integers(1, 40),
    heads_per_group=st.integers(1, 8),
    seq_q=st.integers(1, 20_000),
    seq_kv=st.integers(1, 20_000),
    head_dim=st.sampled_from([64, 128, 192, 256]),
    causal=st.booleans(),
)
def test_places_are_free_and_sums_complete(
    batch: int, groups: int, heads_per_group: int, seq_q: int, seq_kv: int, head_dim: int,
    causal: bool,
) -> None:  # fmt: skip
    """A Hopper item waits for items before it only, and hardly for any that run beside it.

    It waits for the sums that it stores as dQ, and for the place of its own sums.
    """
    heads = groups * heads_per_group
    tensors = geometry(batch, groups, heads, seq_q, seq_kv, head_dim, causal=causal)
    plan = BwdSm90(problem(head_dim), tensors, HOPPER)
    assume(not plan.tiling.relays)  # where nobody adds to sums
    params, key_tiles = plan._params, -(-seq_kv // plan.tiling.tile_k)
    wave, pairs = params.items.pairs.number, plan._pairs
    for pair in {0, pairs // 3, max(0, pairs - 1 - params.dq_places), pairs - 1}:
        first = pair // wave * wave * key_tiles  # items of the pair's wave
        end = min(first + wave * key_tiles, pairs * key_tiles)
        # The first item that stores a part of this pair's dQ comes after all that add to it.
        assert first + params.dq_lag >= end - 1 + plan._items_at_once
        follower = pair + params.dq_places
        if follower < pairs:
            # Its items come after the last one that stores a part of this pair's dQ.
            first_follower = follower // wave * wave * key_tiles
            assert first_follower >= end + params.dq_lag + plan._items_at_once - 1


@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize("seq", [1, 1000, 9000])
def test_blocks_of_a_cluster_come_together(head_dim: int, seq: int) -> None:
    """A grid has whole clusters, no more than fit at a time; only the main kernel has them."""
    shape = geometry(seq_q=seq, seq_kv=seq, head_dim=head_dim)
    plan = BwdSm90(problem(head_dim), shape, HOPPER)
    cluster = plan.tiling.cluster
    assert cluster == (2 if head_dim > 128 else 1)
    pairs = shape.batch * 4 // plan._params.heads_per_block.number
    items = pairs * -(-seq // plan.tiling.tile_k) * plan._params.items.parts.number
    kernels = plan.kernels()
    (main,) = [kernel for kernel in kernels if kernel.source.name == "dlattn_bwd_sm90"]
    assert main.grid == (min(items, HOPPER.multiprocessors // cluster) * cluster, 1, 1)
    for kernel in kernels:
        wanted = cluster > 1 and kernel is main
        assert (f"__cluster_dims__({cluster}, 1, 1)" in kernel.source.text) == wanted


def test_where_one_cluster_has_no_room() -> None:
    """It is launched, which fails there; an empty grid would leave gradients as they were."""
    plan = BwdSm90(problem(256), geometry(head_dim=256), replace(HOPPER, multiprocessors=1))
    assert plan.tiling.cluster == 2
    assert plan.kernels()[1].grid == (2, 1, 1)


@given(pairs=st.integers(1, 2000), tiles=st.integers(1, 300), blocks=st.integers(1, 200))
def test_causal_waves_have_one_width(pairs: int, tiles: int, blocks: int) -> None:
    """No wave is narrower than others if a width near to an item for every block divides them; of
    many tiles, whose items differ, all have nearly an item for every block."""
    width = pairs_of_causal_waves(pairs, tiles, blocks, blocks / tiles)
    assert 1 <= width <= pairs
    least = LEAST_WIDTH if tiles >= MANY_TILES else 0.5
    near = [n for n in range(1, pairs + 1) if least * blocks <= n * tiles <= 2 * blocks]
    if any(pairs % n == 0 for n in near):
        assert pairs % width == 0
    if pairs * tiles > 4 * blocks:
        assert width >= min(pairs, least * blocks / tiles)
        assert (width - 1) * tiles < 2 * blocks


@given(pairs=st.integers(1, 10_000), wanted=st.integers(1, MOST_RAGGED_PAIRS))
def test_waves_of_pairs(pairs: int, wanted: int) -> None:
    """They are at most twice as large as wanted, at least half, and even wherever that can be; else
    no width leaves a fuller last one."""
    wave = even_wave(pairs, wanted, MOST_RAGGED_PAIRS)
    least, most = min(pairs, -(-wanted // 2)), min(pairs, MOST_RAGGED_PAIRS, 2 * wanted)
    assert least <= wave <= most

    def last(width: int) -> Fraction:
        return Fraction((pairs - 1) % width + 1, width)

    assert all(last(other) <= last(wave) for other in range(least, most + 1))


@given(batch=st.integers(1, 8), seq=st.integers(1, 70_000))
def test_the_workspace_is_linear(batch: int, seq: int) -> None:
    """Sums of dQ exist for some heads at a time: not more than all have, nor much more than L2.
    Those of dK and dV, for key tiles of items in parts: fewer than blocks."""
    plan = BwdSm90(problem(), geometry(batch, 16, 16, seq, seq), HOPPER)
    rows = batch * 16 * -(-seq // 64) * 64
    sums_of_all, row_stats = 4 * 128 * rows, 16 * rows
    key_sums = 4 * 128 * (128 + 128) * plan._summed_tiles
    assert plan._summed_tiles < HOPPER.multiprocessors
    size = plan.workspace_size - key_sums
    assert size <= sums_of_all + row_stats + rows + 4096
    assert size <= max(2**27, 6 * 4 * 128 * seq) + 2 * row_stats + 2**20


@pytest.mark.parametrize("family", [BwdSm80, BwdSm90])
@given(batch=st.integers(1, 8), seq=st.integers(1, 5000), head_dim=st.sampled_from([64, 128]))
def test_sums_and_statistics_have_room(family, batch: int, seq: int, head_dim: int) -> None:
    """For the last tile of all, as ``bwd_tile.cuh`` finds it."""
    plan = family(problem(head_dim), geometry(batch, 2, 4, seq, seq, head_dim), HOPPER)
    sizes, params, tile_q = plan._arrays, plan._params, plan.tiling.tile_q
    tiles = -(-seq // tile_q)
    all_tiles = batch * 4 * tiles
    of_sums = (
        params.dq_places * params.heads_per_block.number * tiles if plan.stores_dq else all_tiles
    )
    adds = not (isinstance(plan, BwdSm90) and plan.tiling.relays)  # one key tile has all keys
    assert sizes["dq_accum"] >= 4 * of_sums * tile_q * head_dim * adds
    assert sizes["row_stats"] >= 4 * all_tiles * tile_q * plan.tiling.stats_words
    assert sizes.get("dq_arrivals", 4 * of_sums) >= 4 * of_sums
    assert plan.scratch_bytes >= sum(sizes.values())


@pytest.mark.parametrize("family", [BwdSm80, BwdSm90])
def test_a_sink_takes_one_kernel_and_a_number_for_each_query_tile(family) -> None:
    """The gradient's scratch is a part of the workspace, and of nobody else's part."""
    shape = geometry(seq_q=1000)
    plain, sunk = (family(replace(problem(), sink=sink), shape, HOPPER) for sink in (False, True))
    names = [kernel.source.name for kernel in sunk.kernels()]
    assert names == [*(kernel.source.name for kernel in plain.kernels()), "dlattn_bwd_sink"]
    assert sunk.kernels()[-1].grid == (shape.heads_q, 1, 1)

    sunk.place_workspace(4096)
    parts = 4 * shape.batch * shape.heads_q * -(-shape.seq_q // sunk.tiling.tile_q)
    params = sunk.params_in(sunk._argument)
    assert (
        params.sink_parts == params.row_stats + sunk.tiling.stats_words * sunk.tiling.tile_q * parts
    )
    assert params.dq_arrivals in (0, params.sink_parts + parts)
    assert params.sink_parts + parts <= 4096 + sunk.workspace_size
    assert abs(sunk.workspace_size - plain.workspace_size - parts) < 256
