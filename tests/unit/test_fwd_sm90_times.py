"""What the Hopper forward's tilings are compared by where the device alone knows lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.fwd_sm90_tiles import Sharing, TileHeads, heads_of_tiles, power_of_two
from dlattn.plans.fwd_sm90_tiling import tilings
from dlattn.plans.fwd_sm90_times import sequences
from dlattn.problem import Band, Direction, Geometry, Padding, Problem, Scale, TensorSpec
from tests.unit.hopper_forward import HOPPER, plan


def packed(
    lens_q: list[int], lens_k: list[int], heads: int, heads_k: int, head_dim: int = 128
) -> FwdSm90:
    """Of packed sequences, causal, of which only the longest and all tokens are known."""

    def spec(role: str, heads: int, rows: int) -> TensorSpec:
        size, row = (len(lens_q), heads, rows, head_dim), heads * head_dim
        return TensorSpec(role, size, (0, head_dim, row, 1), data_type.HALF, ragged=True)

    tensors = {role: spec(role, heads_k, max(lens_k)) for role in "kv"}
    tensors |= {role: spec(role, heads, max(lens_q)) for role in "qo"}
    tensors |= {
        f"cu_seqlens_{side}": TensorSpec(side, (len(lens_q) + 1,), (1,), data_type.INT32)
        for side in ("q", "kv")
    }
    masks, scale = (Padding(), Band(False, True)), (Scale(positive=True),)
    problem = Problem(
        Direction.FORWARD, data_type.HALF, head_dim, head_dim, scale, masks, ragged=True
    )
    geometry = Geometry(
        tensors,
        0.1,
        None,
        0,
        bottom_right=True,
        most_tokens_q=sum(lens_q),
        most_tokens_kv=sum(lens_k),
    )
    return FwdSm90(problem, geometry, HOPPER)


@given(
    batch=st.integers(1, 200),
    longest=st.integers(1, 5000),
    tokens=st.none() | st.integers(1, 100_000),
)
def test_sequences_have_the_tokens(batch: int, longest: int, tokens: int | None) -> None:
    """One sequence is the longest; all have no more tokens than there are, unless each has one."""
    q = TensorSpec("q", (batch, 2, longest, 64), (0, 64, 128, 1), data_type.HALF)
    geometry = Geometry({"q": q, "k": q}, most_tokens_q=tokens)
    its = sequences(geometry)
    assert its[0].batch == 1 and its[0].seq_q == its[0].seq_kv == longest
    assert sum(it.batch for it in its) == batch
    assert all(1 <= it.seq_q <= longest and it.seq_kv == longest for it in its)
    if tokens is None:
        assert all(it.seq_q == longest for it in its)
    elif len(its) > 1 and its[1].seq_q > 1:
        assert sum(it.batch * it.seq_q for it in its) <= max(tokens, longest)


@pytest.mark.parametrize(
    "lens_q, lens_k, heads, heads_k, consumers, shared",
    [
        # Prompts beside sequences of which each decodes a token: as many heads as there may be.
        ([1024] + [1] * 63, [1024] + [2048] * 63, 64, 8, 2, TileHeads(8, 4)),
        ([1024] + [1] * 63, [1024] + [2048] * 63, 32, 8, 2, TileHeads(4, 4)),
        ([512] + [1] * 127, [512] + [2000] * 127, 64, 8, 2, TileHeads(8, 4)),
        # Prompts alone.
        ([2000, *(1000,) * 7], [2000, *(1000,) * 7], 32, 8, 3, TileHeads(4, 4)),
        # The next queries of a long prompt, whose keys blocks share.
        ([512], [16384], 16, 16, 2, TileHeads()),
    ],
)
def test_all_tokens_tell_how_heads_share_tiles(
    lens_q: list[int],
    lens_k: list[int],
    heads: int,
    heads_k: int,
    consumers: int,
    shared: TileHeads,
) -> None:
    """What was measured as the fastest is what is chosen."""
    it = packed(lens_q, lens_k, heads, heads_k)
    assert (it.tiling.consumers, it._heads) == (consumers, shared)


@given(heads=st.integers(1, 16), heads_k=st.integers(1, 4), known=st.booleans())
def test_a_consumer_has_room_for_its_heads(heads: int, heads_k: int, known: bool) -> None:
    """Of its 64 rows each has a power of two, of no fewer than a warp's; a tile's heads fit."""
    it = packed([300, 1, 1], [300, 900, 20], heads * heads_k, heads_k)
    for tiling in tilings(it.problem):
        for its in heads_of_tiles(it.problem, it.geometry, tiling):
            assert its.rows == power_of_two(its.rows) >= 16
            assert (
                1 <= its.tile <= its.consumer * (tiling.consumers if its.tile > its.consumer else 1)
            )
            assert heads % its.tile == 0


def test_room_for_parts_of_every_block() -> None:
    """The workspace holds a part and marks of each block that may leave one, and a counter."""
    divides, asks = packed([512], [16384], 16, 16), packed([4096] * 9, [4096] * 9, 16, 16)
    assert divides.tiling.shares_more and not asks.tiling.shares_more
    assert divides.kernels()[-1].grid == (1, HOPPER.multiprocessors, 1)
    rows, blocks = divides.tiling.tile_q, HOPPER.multiprocessors
    parts = blocks * rows * 4 * (128 + 4 * 2)  # each of four lanes of a row has its reference, sum
    assert divides.scratch_bytes >= 256 + 8 * blocks * rows // 16 + parts
    assert asks.scratch_bytes == 256


@pytest.mark.parametrize("number, power", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_power_of_two(number: int, power: int) -> None:
    """The least one that is not below."""
    assert power_of_two(number) == power


def test_shares_that_the_device_finds() -> None:
    """Few queries of heads that share keys fill a tile where lengths are on the device, too; tiles
    of the same keys have blocks side by side where L2 has no room for all, and a kernel of its own
    adds up the parts of very few, in a workspace that has room for what it is told."""
    for sizes, heads, sharing in (
        ((1, 64, 8, 16, 8192), TileHeads(8, 4), Sharing(0)),
        ((16, 64, 8, 16, 8192), TileHeads(8, 4), Sharing(0)),
        ((16, 64, 8, 32, 8192), TileHeads(4, 2), Sharing(0)),
        ((1, 64, 8, 32, 32768), TileHeads(4, 2), Sharing(0, 2)),
        ((16, 64, 8, 64, 8192), TileHeads(2, 1), Sharing(0)),
        ((1, 16, 2, 16, 8192), TileHeads(8, 4), Sharing(0, apart=True)),
        ((1, 8, 1, 64, 131072), TileHeads(2, 1), Sharing(0, 4, apart=True)),
        ((8, 32, 32, 4096, 4096), TileHeads(), Sharing(0)),
    ):
        it = plan(*sizes, right=0, lengths=True)
        assert (it._heads, it._sharing) == (heads, sharing)
        kernels = it.kernels()
        assert len(kernels) == 1 + sharing.apart
        if it.tiling.shares_more:
            assert kernels[0].grid == (sharing.beside, 132 // sharing.beside, 1)
        if sharing.apart:
            rows = it._tiles * it.tiling.tile_q
            assert kernels[1].grid == (rows // 16 * 4, 1, 1)
            lanes, parts = 2 * it.tiling.tile_q, 2 * kernels[0].grid[0] * kernels[0].grid[1]
            assert it.scratch_bytes >= 32 * it._tiles + parts * 16 * (128 // 8 + 1) * lanes
