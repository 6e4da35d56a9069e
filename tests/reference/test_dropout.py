"""Dropout on the reference engine: Philox's mask, and the formulas around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlattn
from dlattn.problem.dropout import philox
from tests import philox as definition
from tests.builders import make_tensors
from tests.cases import RAGGED_KV, RAGGED_Q, Case
from tests.drivers import run_graph
from tests.engine import backward, forward
from tests.libraries import Library

RAGGED = (*RAGGED_Q, *RAGGED_KV)

_INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "rounds", "words"),
    [
        ((0,) * 4, (0,) * 2, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((0,) * 4, (0,) * 2, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_known_answers(counter, key, rounds, words) -> None:
    """Philox gives the known answers of Random123, the authors' own implementation."""
    got = philox(tuple(np.array(word) for word in counter), key, rounds)
    assert " ".join(f"{int(word):08x}" for word in got) == words


@settings(max_examples=50)
@given(
    p=st.sampled_from((0.0, 0.1, 0.5, 0.999, 1 - 1e-9)) | st.floats(0, 1, exclude_max=True),
    seed=_INT64,
    offset=_INT64,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 50)),
)
def test_the_mask_is_as_documented(p: float, seed: int, offset: int, shape) -> None:
    """The mask is that of the documentation's words, element by element."""
    mask = dlattn.philox_dropout_mask(p, seed, offset, shape)
    assert mask.shape == shape
    assert (mask == definition.kept(p, seed, offset, shape)).all()


@settings(max_examples=50)
@given(
    p=st.sampled_from((0.0, 0.1, 0.2, 0.4, 0.5, 0.6, 0.999, 1e-12)) | st.floats(0, 0.999),
    seed=_INT64,
    offset=_INT64,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 90)),
)
def test_flash_attentions_mask_is_as_documented(p: float, seed: int, offset: int, shape) -> None:
    """So is FlashAttention's, carries of its counter included."""
    mask = dlattn.philox_dropout_mask(p, seed, offset, shape, "flash")
    assert mask.shape == shape
    assert (mask == definition.flash_kept(p, seed, offset, shape)).all()


def flash_attention_kernel(p: float, seed: int, offset: int, block: tuple[int, int, int, int]):
    """What a warp of FlashAttention-2 keeps in a 16 x 32 tile, (batch * heads + head, 1, row of
    tiles, column of tiles): lanes, registers and bytes in the order of its source, with Python's
    integers."""
    number, _, row, column = block
    kept = np.empty((16, 32), bool)
    for lane in range(32):
        first = (offset + number * 32 + lane) % 2**64
        x, y, z, w = first % 2**32, first >> 32, row, column
        a, b = seed % 2**32, seed >> 32
        for _ in range(7):
            left, right = 0xD2511F53 * x, 0xCD9E8D57 * z
            x, y, z, w = (right >> 32) ^ y ^ a, right % 2**32, (left >> 32) ^ w ^ b, left % 2**32
            a, b = (a + 0x9E3779B9) % 2**32, (b + 0xBB67AE85) % 2**32
        drawn = b"".join(word.to_bytes(4, "little") for word in (x, y, z, w))
        for half in range(2):
            for i in range(8):  # c0 to c3 of mma.m16n8k16 on the left, and of that on the right
                query = lane // 4 + 8 * (i % 4 // 2)
                key = 16 * half + 8 * (i // 4) + 2 * (lane % 4) + i % 2
                kept[query, key] = drawn[8 * half + i] <= int((1 - p) * 255)
    return kept


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (2**63 + 12345, 4), (42, 2**32 - 40)])
def test_flash_attentions_mask_is_that_of_its_kernel(seed: int, offset: int) -> None:
    """A warp of FlashAttention's kernel, lane by lane, keeps the same."""
    mask = dlattn.philox_dropout_mask(0.25, seed, offset, (2, 3, 64, 96), "flash")
    for number, row, column in ((0, 0, 0), (1, 2, 1), (5, 3, 2)):
        tile = mask[number // 3, number % 3, 16 * row :, 32 * column :][:16, :32]
        assert (tile == flash_attention_kernel(0.25, seed, offset, (number, 0, row, column))).all()


def test_flash_attentions_threshold_is_made_in_float32() -> None:
    """At p = 0.6, float32 keeps one byte of 256 fewer than float64 would; at 0 all are kept."""
    shape = (1, 1, 1024, 1024)
    kept = dlattn.philox_dropout_mask(0.6, 1, 2, shape, "flash").mean()
    assert abs(kept - 102 / 256) < 4 * 0.5 / 1024  # 103 in float64
    assert dlattn.philox_dropout_mask(0.0, 1, 2, shape, "flash").all()


def test_flash_attentions_mask_counts_within_a_sequence() -> None:
    """Packed sequences have the masks that padded ones have: blocks count within each, and b is
    the batch entry."""
    lengths = {"len_q": (33, 7, 40), "len_kv": (50, 3, 37)}
    case = replace(CASE, batch=3, seq_kv=51, dropout_algorithm="flash", rng_dump=False, **lengths)
    whole = make_tensors(case, Library())
    run_graph(case, whole)
    packed = make_tensors(replace(case, ragged=RAGGED), Library())
    run_graph(replace(case, ragged=RAGGED), packed)
    for role in ("o", "dQ", "dK", "dV"):
        assert (whole[role].padded() == packed[role].padded()).all()


@pytest.mark.parametrize("algorithm", ["philox", "flash"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_a_mask_of_nothing(algorithm: str, axis: int) -> None:
    """Any size may be 0."""
    shape = tuple(0 if i == axis else 3 for i in range(4))
    assert dlattn.philox_dropout_mask(0.1, 1, 2, shape, algorithm).shape == shape


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_mean_is_p(p: float) -> None:
    """Of 16 million elements, and of each of 16 heads, the dropped ones are p, within 4 sigma."""
    dropped = ~dlattn.philox_dropout_mask(p, 1, 2, (2, 8, 1024, 1024))
    sigma = (p * (1 - p) / dropped.size) ** 0.5 + 2**-16 / 4
    assert abs(dropped.mean() - p) < 4 * sigma
    assert abs(dropped.mean((2, 3)) - p).max() < 4 * 4 * sigma


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("distance", [1, 2, 4, 8, 16, 32])
def test_neighbours_are_independent(axis: int, distance: int) -> None:
    """Elements side by side along any axis are dropped independently."""
    shape = [4, 4, 64, 64]
    shape[axis] = 128
    kept = dlattn.philox_dropout_mask(0.5, 5, 6, tuple(shape))  # type: ignore[arg-type]
    pairs = (kept ^ np.roll(kept, distance, axis)).mean()
    assert abs(pairs - 0.5) < 4 * 0.5 / kept.size**0.5


def test_seeds_and_offsets_are_independent() -> None:
    """Another seed or offset, be it the next, gives another mask; half of it differs at p = 1/2."""
    shape = (1, 2, 256, 256)
    masks = [
        dlattn.philox_dropout_mask(0.5, seed, offset, shape)
        for seed, offset in ((0, 0), (1, 0), (0, 1), (2**40, 0), (0, 2**33), (-1, 0), (0, 32))
    ]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs((one ^ other).mean() - 0.5) < 5 * 0.5 / one.size**0.5


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 3), st.integers(0, 10))
def test_longer_sequences_keep_the_mask(seq_q: int, seq_kv: int, batch: int, seed: int) -> None:
    """Lengths, and batch entries behind, change no element of the mask."""
    short = dlattn.philox_dropout_mask(0.3, seed, 9, (1, 2, seq_q, seq_kv))
    whole = dlattn.philox_dropout_mask(0.3, seed, 9, (batch, 2, 90, 80))
    assert (whole[:1, :, :seq_q, :seq_kv] == short).all()


def test_refuses_what_is_no_probability() -> None:
    """A probability is at least 0 and at most 1; FlashAttention's, of which 1 keeps some, below."""
    wrong = -0.1, 1e300, 10**400, np.float16(np.inf), np.nan
    for algorithm, ps in (("philox", (1.1, *wrong)), ("flash", (1.0, *wrong))):
        for p in ps:
            with pytest.raises(ValueError, match="at most 1"):
                dlattn.philox_dropout_mask(p, 0, 0, (1, 1, 1, 1), algorithm)
    with pytest.raises(ValueError, match="one of philox, flash"):
        dlattn.philox_dropout_mask(0.1, 0, 0, (1, 1, 1, 1), "threefry")


CASE = Case(
    dtype="float64", stats="float64", batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=40,
    seq_kv=50, head_dim_qk=16, head_dim_v=8, scale=0.3, dropout=0.4, rng_dump=True,
)  # fmt: skip


@pytest.mark.parametrize("given_as", ["value", "host", "device"])
def test_a_dump_repeats_its_random_run(given_as: str) -> None:
    """The dump of a random mask, given as a mask with the same scale, gives the same bits, and it
    is the twin's; forward and backward dump the same."""
    case = replace(CASE, dropout_as=given_as)
    tensors = make_tensors(case, Library())
    run_graph(case, tensors)
    random = {role: t.tensor.copy() for role, t in tensors.items()}
    mask = dlattn.philox_dropout_mask(0.4, *case.philox(), case.scores_dim())
    assert (random["rng_dump"] == mask).all()
    graph = dlattn.pygraph(io_data_type=dlattn.data_type.DOUBLE)
    q, k, v, dump = (graph.tensor_like(random[role]) for role in ("q", "k", "v", "rng_dump"))
    o, _ = graph.sdpa(q, k, v, attn_scale=0.3, is_inference=True, dropout=(dump, 1 / (1 - 0.4)))
    o.set_output(True)
    graph.build()
    repeated = np.empty(random["o"].shape)
    o_stride = o.get_stride()
    repeated = np.lib.stride_tricks.as_strided(repeated, strides=[8 * s for s in o_stride])
    graph.execute({q: random["q"], k: random["k"], v: random["v"], dump: random["rng_dump"],
                   o: repeated})  # fmt: skip
    assert (repeated == random["o"]).all()


def test_statistics_are_of_the_undropped_softmax() -> None:
    """Dropout changes o, and neither the log-sum-exp nor a maximum nor a sum."""
    arrays = {role: t.tensor for role, t in make_tensors(CASE, Library()).items()}
    dropped, plain = forward(CASE, arrays), forward(replace(CASE, dropout=None), arrays)
    for name in ("stats", "score_max", "score_sum_exp"):
        assert (getattr(dropped, name) == getattr(plain, name)).all()
    assert abs(dropped.o - plain.o).max() > 0.01


def test_gradients_are_those_of_finite_differences() -> None:
    """Gradients under dropout, with a sink, agree with central differences of the forward."""
    case = replace(CASE, seq_q=6, seq_kv=20, sink=0.5, batch=1, left=9)
    arrays = {role: t.tensor.copy() for role, t in make_tensors(case, Library()).items()}
    gradients = dict(zip("qkv", backward(case, arrays), strict=True))
    rng = np.random.default_rng(3)
    for role, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        ahead, behind = (
            (forward(case, arrays | {role: arrays[role] + step * direction}).o * arrays["dO"]).sum()
            for step in (1e-5, -1e-5)
        )
        slope = (gradient * direction).sum()
        assert abs((ahead - behind) / 2e-5 - slope) < 1e-6 * (1 + abs(slope))


def test_what_drops_everything_has_the_gradients_of_its_statistics() -> None:
    """With a probability of 1 the output is 0, but the log-sum-exp depends on q, k, bias and
    sinks as ever: its gradients are those without dropout of a dO of 0, softmax times dlse."""
    rng = np.random.default_rng(0)
    q, k, v, d_o = rng.normal(size=(4, 2, 6, 3, 8))
    bias, sinks = rng.normal(size=(3, 6, 6)), rng.normal(size=3).astype(np.float32)
    d_lse = rng.normal(size=(2, 3, 6))
    options = {"bias": bias, "sinks": sinks, "dropout": (1.0, 3, 5)}
    out, lse = dlattn.attention(q, k, v, return_lse=True, **options)
    found = dlattn.attention_backward(
        d_o, q, k, v, out, lse, dlse=d_lse, bias_gradient=True, sinks_gradient=True, **options
    )
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8) + bias
    d_scores = np.exp(scores - lse[..., None]) * d_lse[..., None]
    assert not out.any() and not found.dv.any()
    np.testing.assert_allclose(found.dbias, d_scores.sum(0))
    want = np.einsum("bhqk,bkhd->bqhd", d_scores, k), np.einsum("bhqk,bqhd->bkhd", d_scores, q)
    np.testing.assert_allclose(found.dq, want[0] / np.sqrt(8), atol=1e-12)
    np.testing.assert_allclose(found.dk, want[1] / np.sqrt(8), atol=1e-12)
    d_sinks = (np.exp(sinks[:, None] - lse) * d_lse).sum((0, 2))
    np.testing.assert_allclose(found.dsinks, d_sinks, rtol=1e-5)
