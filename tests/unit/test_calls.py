"""The machinery of functions: what is kept, what tells calls apart, what plans are asked for."""

from __future__ import annotations

import ctypes
import inspect
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlattn
from dlattn.calls.cache import CallCache, forget_calls
from dlattn.calls.call import Output
from dlattn.calls.request import Request
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.flash import forward, mha_bwd, mha_fwd, mha_varlen_fwd
from dlattn.flash.dropout import drawn_state
from dlattn.flash.layouts import Layout
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.decode import Decode
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.params import address_slot
from dlattn.plans.select import select
from dlattn.problem import Direction, TensorSpec
from dlattn.runtime.target import KNOWN
from tests.flash import FlashCase

HOPPER = KNOWN["sm_90a"]


def array(*shape: int, offset: int = 0, dtype: Any = np.float16) -> Any:
    """Zeros, ``offset`` elements behind a multiple of 64 bytes."""
    size = int(np.prod(shape))
    buffer = np.zeros(size + 64, dtype)
    first = -(buffer.ctypes.data // buffer.itemsize) % 32 + offset
    return buffer[first : first + size].reshape(shape)


def kept() -> int:
    return len(forward._dense_calls)


def test_a_call_like_one_before_builds_nothing() -> None:
    """Other memory, same looks; what differs in looks or options is another call."""
    forget_calls()
    q, k = array(1, 3, 2, 8), array(1, 4, 2, 8)
    mha_fwd(q, k, k)
    assert kept() == 1
    mha_fwd(array(1, 3, 2, 8), array(1, 4, 2, 8), k.copy())
    assert kept() == 1 if k.copy().ctypes.data % 16 == 0 else 2
    before = kept()
    other = [
        lambda: mha_fwd(q, k, k, is_causal=True),
        lambda: mha_fwd(q, k, k, softmax_scale=0.25),
        lambda: mha_fwd(array(1, 3, 2, 8, offset=1), k, k),
        lambda: mha_fwd(array(1, 3, 4, 8)[:, :, ::2], k, k),
        lambda: mha_fwd(array(1, 5, 2, 8), k, k),
        lambda: mha_fwd(q, k, k, array(1, 3, 2, 8)),
        lambda: mha_fwd(*(array(*x.shape, dtype=np.float32) for x in (q, k, k))),
        lambda: mha_fwd(q, k, k, seqused_k=np.array([2], np.int32)),
    ]
    for number, call in enumerate(other, 1):
        call()
        call()
        assert kept() == before + number
    forget_calls()
    assert kept() == 0


def test_the_least_recently_used_goes_first() -> None:
    """A cache never grows beyond its bound, and what is used stays."""
    prepared: list[int] = []

    def prepare(tensor: Any, options: tuple[int]) -> int:
        (option,) = options
        prepared.append(option)
        return option

    cache = CallCache(prepare, most=4)
    tensor = array(2)
    for option in (0, 1, 2, 3, 0, 4, 5, 0, 1):
        assert cache.find((tensor,), (option,))[0] == option
        assert len(cache) <= 4
    assert prepared == [0, 1, 2, 3, 4, 5, 1]


def test_outputs_are_the_callers() -> None:
    """Given memory is returned itself; the rest is made in the framework of q."""
    q, out = array(1, 3, 2, 8), array(1, 3, 2, 8)
    results = mha_fwd(q, q, q, out)
    assert results[0] is out and results[1] is q
    assert all(isinstance(x, np.ndarray) for x in results)
    assert [x.size for x in results[5:]] == [2, 1, 0]
    torch = pytest.importorskip("torch")
    t = torch.zeros(1, 3, 2, 8, dtype=torch.bfloat16)
    results = mha_fwd(t, t, t)
    assert all(isinstance(x, torch.Tensor) for x in results)
    assert (results[0].dtype, results[4].dtype) == (torch.bfloat16, torch.float32)
    assert results[5].dtype is torch.uint64


@given(st.integers(0, 6), st.integers(1, 6), st.booleans(), st.integers(-1, 9), st.integers(-1, 9))
def test_windows(seqlen_q: int, seqlen_k: int, causal: bool, left: int, right: int) -> None:
    """Bounds that are left out keep the same keys as FlashAttention's, for all lengths."""
    case = FlashCase(
        lens_q=(seqlen_q,), lens_k=(seqlen_k,), causal=causal, left=left, right=right, alibi="H"
    )
    want = case.window()
    got = Layout(1, 1, 1, seqlen_q, seqlen_k).window(causal, left, right)
    for len_q, len_k in product(range(seqlen_q + 1), range(seqlen_k + 1)):
        row, key = np.arange(len_q)[:, None], np.arange(len_k)[None, :]
        ahead = key - row - (len_k - len_q)
        masks = [
            (ahead >= (-np.inf if near is None else -near))
            & (ahead <= (np.inf if far is None else far))
            for near, far in (want, got)
        ]
        assert (masks[0] == masks[1]).all()


def packed_request(direction: Direction, lengths: int, tokens: int, batch: int) -> Request:
    """What the functions ask of packed tensors, of which none exists."""
    layout = Layout(batch, 4, 2, lengths, lengths, tokens, tokens, packed=True)
    half, single = data_type.HALF, data_type.FLOAT
    outputs = [
        *(Output(role, layout.queries(64), half) for role in ("q", "o")),
        *(Output(role, layout.keys(64), half) for role in ("k", "v")),
        Output("stats", layout.lse, single),
    ]
    if direction is Direction.BACKWARD:
        outputs += [Output(role, layout.queries(64), half) for role in ("dO", "dQ")]
        outputs += [Output(role, layout.keys(64), half) for role in ("dK", "dV")]
        outputs += [Output("delta", layout.softmax_d, single)]
    specs = {it.role: layout.spec(it.role, it) for it in outputs if it.role}
    for role in ("cu_seqlens_q", "cu_seqlens_kv"):
        specs[role] = TensorSpec(role, (batch + 1,), (1,), data_type.INT32)
    return Request(
        direction, specs, 0.125, flash_stats=True, most_tokens_q=tokens, most_tokens_kv=tokens
    )


def test_packed_calls_run_on_hoppers_kernels() -> None:
    """Cumulative lengths are as good as offsets, even where no sequence has two tokens."""
    for longest, first in ((1, Decode), (100, FwdSm90)):
        for direction, plan in ((Direction.FORWARD, first), (Direction.BACKWARD, BwdSm90)):
            request = packed_request(direction, longest, 300, 5)
            assert select(request.problem, request.geometry, HOPPER)[0] is plan


@pytest.mark.parametrize("longest", [1, 100])
@pytest.mark.parametrize(("gap", "access"), [(0, 16), (8, 16), (4, 2)])
def test_tokens_that_no_wide_access_reaches(longest: int, gap: int, access: int) -> None:
    """Of tokens so many elements apart, every sequence begins at one, even where none has two."""
    request = packed_request(Direction.FORWARD, longest, 300, 5)
    k = request.tensors["k"]
    batch, head, row, column = k.stride
    apart = replace(k, stride=(batch, head, row + gap, column))
    request = replace(request, tensors={**request.tensors, "k": apart})
    assert request.problem.access_bytes == access


@given(
    longest=st.integers(1, 300),
    batch=st.integers(1, 9),
    plan=st.sampled_from((FwdSm80, FwdSm90, BwdSm90)),
)
def test_offsets_that_nobody_gave_have_memory(
    longest: int, batch: int, plan: type[CudaPlan]
) -> None:
    """Eight bytes for each tensor and entry, in the workspace, apart from all else there."""
    direction = Direction.BACKWARD if plan is BwdSm90 else Direction.FORWARD
    request = packed_request(direction, longest, 300, batch)
    made = plan(request.problem, request.geometry, HOPPER)
    workspace = 2**20
    scratch = made.ragged
    assert scratch is not None
    made.place_workspace(workspace)
    workspace += made.scratch_bytes
    places = [(scratch.geometry.batch * 16, made._params.ragged.entries)]
    if scratch.items is not None and scratch.items.bundles:
        places += [(4 * scratch.items.bundles, made._params.ragged.bundles)]
    places += [(4 * batch, getattr(made._params, f"seq_len_{x}").data) for x in ("q", "kv")]
    for role, spec in request.tensors.items():
        if spec.ragged:
            ref = getattr(made._params, role)
            assert ref.has_int64_offsets and ref.offsets % 8 == 0
            places.append((8 * batch, ref.offsets))
    spans = sorted((first, first + size) for size, first in places)
    assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:], strict=False))
    assert workspace <= spans[0][0] and spans[-1][1] <= workspace + scratch.nbytes


def test_cumulative_lengths_have_places_of_their_own() -> None:
    """Each address goes to a field of its own, and none beside the argument."""
    request = packed_request(Direction.BACKWARD, 10, 30, 3)
    made = BwdSm90(request.problem, request.geometry, HOPPER)
    first = ctypes.addressof(made._params)
    places = [
        ctypes.addressof(address_slot(made._params, request.geometry, role)) - first
        for role in request.tensors
    ]
    assert len(set(places)) == len(places)
    assert all(0 <= place <= ctypes.sizeof(made._params) - 8 for place in places)


def test_tensors_in_the_place_of_numbers() -> None:
    """A tensor of no dimensions is the number that it holds in this call, not in an earlier one."""
    torch = pytest.importorskip("torch")
    q, k, v = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 1, 8, 2, 8)))
    cu = torch.tensor([0, 8], dtype=torch.int32)
    windows = [
        lambda n: dlattn.attention(q, k, v, window=(n, 0)),
        lambda n: mha_fwd(q, k, v, window_size_left=n)[0],
    ]
    maxima = [
        lambda n: dlattn.attention(q[0], k[0], v[0], layout="thd", cu_seqlens=cu, max_seqlens=n),
        lambda n: mha_varlen_fwd(q[0], k[0], v[0], None, cu, cu, None, None, None, 8, n)[0],
    ]
    count = torch.tensor(0)
    for call in windows:
        for number in (1, 2, 5):
            want = call(number)
            assert (call(count.fill_(number)) == want).all()
            assert (call(np.int64(number)) == want).all()
    for call in maxima:
        assert (call(count.fill_(8)) == call(8)).all()
        with pytest.raises(InvalidArgumentError, match="expected sequences of at most 7 rows"):
            call(count.fill_(7))
    left, right = torch.tensor(4), np.array(0)
    want = dlattn.attention(q, k, v, window=(4, 0))
    assert (dlattn.attention(q, k, v, window=(left, right)) == want).all()
    assert (dlattn.attention(q, k, v, window=(left.fill_(1), right)) != want).any()
    with pytest.raises(InvalidArgumentError, match="window: expected an integer, got 4.0"):
        dlattn.attention(q, k, v, window=(4.0, 0))  # which is equal to one that was right


def test_an_integer_in_an_array_without_dimensions() -> None:
    """It is the number that it holds in this call, although it has no hash; nothing is kept."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 8, 2, 8))
    cu, number = np.array([0, 8], np.int32), np.array(0)
    packed = (q[0], k[0], v[0], None, cu, cu, None, None, None)
    for value in (9, 8, 2, 5):
        number[...] = value
        for call in (
            lambda n: mha_fwd(q, k, v, window_size_left=n, num_splits=n)[0],
            lambda n: mha_fwd(q, k, v, window_size_right=n, window_size_left=1)[0],
        ):
            wanted, before = call(value), kept()
            assert (call(number) == wanted).all() and kept() == before
    whole = mha_varlen_fwd(*packed, 8, 8)[0]
    assert (mha_varlen_fwd(*packed, np.array(8), np.array(8))[0] == whole).all()


def test_an_option_that_raises_as_it_is_hashed() -> None:
    """Of a memoryview that is a ValueError, where a quick look finds out, too."""
    cache = CallCache(lambda tensor, options: options)
    wrong = (memoryview(bytearray(4)),)
    assert cache.find((array(2),), wrong)[0] == wrong and len(cache) == 0
    with pytest.raises(TypeError, match="cannot be hashed"):
        cache.latest((array(2),), wrong)
    q = array(1, 3, 2, 8)
    for name in ("layout", "alignment"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected one of"):
            dlattn.attention(q, q, q, **{name: wrong[0]})


#: By the name of an argument: what is right, and what equals it and is wrong.
EQUAL = {
    "causal": (True, 1.0), "is_causal": (1, np.float32(1)), "return_lse": (False, 0.0),
    "return_softmax_lse": (True, 1.0), "deterministic": (True, 1.0), "return_residual": (1, 1.0),
    "window": ((4, 0), (4.0, 0)), "window_size": ([4, 0], (4, 0.0)), "local_window_size": (4, 4.0),
    "window_size_left": (4, 4.0), "attention_chunk": (0, 0.0), "num_splits": (0, 0.0),
    "scale": (0.5, 0.5 + 0j), "softmax_scale": (0.5, 0.5 + 0j), "softcap": (2.0, 2 + 0j),
}  # fmt: skip

#: A hint.
UNREAD = {"flash.mha_fwd": {"num_splits"}}


FUNCTIONS = [
    *("attention", "attention_backward", "flash.mha_fwd", "flash.mha_bwd"),
    *("flash.flash_attn_with_kvcache", "torch.attention", "torch.scaled_dot_product_attention"),
    *("jax.attention", "jax.dot_product_attention"),
]


@pytest.mark.parametrize("wrong_first", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_equals_a_right_option_is_no_better_for_it(name: str, wrong_first: bool) -> None:
    """An option is taken or refused whatever was called before."""
    function, given = _call(name, 6)
    for option in _read(name, function):
        right, wrong = EQUAL[option]
        forget_calls()
        for value in (wrong, right, wrong) if wrong_first else (right, wrong, right):
            if value is right:
                function(*given, **{option: value})
                continue
            with pytest.raises(InvalidArgumentError, match="expected (an integer|True|a finite)"):
                function(*given, **{option: value})


def _call(name: str, rows: int) -> tuple[Any, list[Any]]:
    """A function and its tensors, of so many rows in a sequence."""
    package, _, own = name.rpartition(".")
    library = pytest.importorskip(package) if package in ("torch", "jax") else np
    function = getattr(import_module(f"dlattn.{package}".rstrip(".")), own)
    make = library.from_numpy if package == "torch" else np.asarray
    x = np.random.default_rng(0).normal(size=(1, rows, 2, 8)).astype(np.float32)
    if "bwd" in name or "backward" in name:
        return function, [x] * 5 + [np.zeros((1, 2, rows), np.float32)]
    return function, [make(x)] * 3


def _read(name: str, function: Any) -> list[str]:
    """The options that a function reads."""
    taken = inspect.signature(function).parameters
    return [option for option in EQUAL if option in taken and option not in UNREAD.get(name, ())]


# A cache takes one query or more.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "kvcache" not in name])
def test_options_are_read_where_there_is_nothing_to_do(name: str) -> None:
    """Of sequences without rows, a wrong option is refused as it is of others, in words, also if it
    cannot be hashed."""
    function, given = _call(name, 0)
    for option in _read(name, function):
        for wrong in (EQUAL[option][1], "text", ["text", "text"]):
            said = "window" if "window" in option else option
            with pytest.raises(InvalidArgumentError, match=said):
                function(*given, **{option: wrong})


def test_a_window_may_be_a_list() -> None:
    """As FlashAttention's may, and PyTorch's and JAX's functions of dlattn."""
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 8))
    found = dlattn.attention(x, x, x, window=[2, 0])  # type: ignore[arg-type]
    assert (found == dlattn.attention(x, x, x, window=(2, 0))).all()


def test_philox_states() -> None:
    """Seeds and offsets as given, or drawn; a generator draws what it would draw again."""
    q = array(1, 3, 2, 8)
    assert drawn_state(7, q, 2).tolist() == [7, 0]
    assert drawn_state(np.int64(7), q, 2).tolist() == [7, 0]
    assert drawn_state((-1, 2**40), q, 2).tolist() == [2**64 - 1, 2**40]
    assert drawn_state(None, q, 2).tolist() != drawn_state(None, q, 2).tolist()
    torch = pytest.importorskip("torch")
    t = torch.zeros(1, 3, 2, 8)
    generator = torch.Generator().manual_seed(3)
    first = drawn_state(generator, t, 2).tolist()
    assert first != drawn_state(generator, t, 2).tolist()
    assert first == drawn_state(generator.manual_seed(3), t, 2).tolist()
    with pytest.raises(InvalidArgumentError, match="gen_: expected a torch.Generator"):
        drawn_state("x", t, 2)


def test_outputs_differ_by_seed_alone() -> None:
    """The same state drops the same, another one does not, and the backward follows."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.normal(size=(4, 1, 40, 2, 8))
    first, again, other = (mha_fwd(q, k, v, p_dropout=0.5, gen_=seed) for seed in (1, (1, 0), 2))
    assert (first[0] == again[0]).all() and (first[0] != other[0]).any()
    assert (mha_fwd(q, k, v, p_dropout=0.5, gen_=first[5])[0] == first[0]).all()
    assert (first[4] == other[4]).all()
    dv, dv_again, dv_other = (
        mha_bwd(dout, q, k, v, r[0], r[4], p_dropout=0.5, philox_seed=r[5])[2]
        for r in (first, again, other)
    )
    assert (dv == dv_again).all() and (dv != dv_other).any()


def test_debug_softmax() -> None:
    """Signs are the mask's wherever a position is, magnitudes the probabilities, packed or not."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 40, 2, 8))
    out, *_, lse, _, _, p = mha_fwd(
        q, k, v, p_dropout=0.5, is_causal=True, gen_=3, return_softmax=True
    )
    assert p.shape == (2, 2, 128, 128)
    own = p[..., :40, :40]
    kept = np.where(np.signbit(own), 0, own)
    np.testing.assert_allclose(2 * kept @ v.swapaxes(1, 2), out.swapaxes(1, 2), atol=1e-12)
    np.testing.assert_allclose(abs(own).sum(-1), 1, atol=1e-6)  # lse is float32
    lengths = np.array([0, 40, 80], np.int32)
    flat = [x.reshape(80, 2, 8) for x in (q, k, v)]
    *_, packed = mha_varlen_fwd(
        *flat, None, lengths, lengths, None, None, None, 40, 40, p_dropout=0.5, is_causal=True,
        gen_=3, return_softmax=True,
    )  # fmt: skip
    np.testing.assert_array_equal(packed, p)
