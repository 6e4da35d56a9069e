"""Random calls of FlashAttention's functions on a GPU, against the oracle and PyTorch's own.

``pytest tests/gpu/test_flash.py --examples 500 --parts 8 -n 16`` draws more of them, side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from dlattn.calls.cache import forget_calls
from dlattn.flash import mha_bwd, mha_fwd, mha_varlen_bwd, mha_varlen_fwd
from tests import tally
from tests.callers import Caller, gpu_callers
from tests.flash import FlashCall, FlashCase
from tests.flash_check import check, given_arrays
from tests.flash_strategies import flash_families
from tests.nearness import ONE_KEY, check_nearness

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]


def check_all(family: tuple[FlashCase, ...]) -> None:
    """Each case from one of the frameworks."""
    for case in tally.new(family):
        check(case, gpu_callers()[case.seed % len(gpu_callers())])


@pytest.mark.usefixtures("part")
@settings(settings.get_profile("gpu part"))
@given(flash_families().filter(tally.is_random))
def test_one_length(family: tuple[FlashCase, ...]) -> None:
    """mha_fwd and mha_bwd are right, and write nothing but their results."""
    check_all(family)


@pytest.mark.usefixtures("part")
@settings(settings.get_profile("gpu part"))
@given(flash_families(packed=True).filter(tally.is_random))
def test_packed(family: tuple[FlashCase, ...]) -> None:
    """mha_varlen_fwd and mha_varlen_bwd are right, and write nothing but their results."""
    check_all(family)


def _comparable(case: FlashCase) -> FlashCase:
    """What PyTorch's operations take: one head size up to 256, and, as it is built, no slopes."""
    size = min(256, -(-case.head_size // 8) * 8)
    return replace(case, head_size=size, head_size_v=size)


_COMPARED = flash_families(
    packed=True,
    page=None,
    used=False,
    sinks=False,
    softcap=0.0,
    dropout=0.0,
    alibi=None,
    given=False,
    deterministic=False,
    layout="plain",
    slack=0,
    scale=None,
).map(lambda family: tuple(map(_comparable, family)))


@pytest.mark.usefixtures("part")
@settings(settings.get_profile("gpu part"))
@given(_COMPARED.filter(tally.is_random))
def test_pytorchs_own(family: tuple[FlashCase, ...]) -> None:
    """Results are as near to the exact ones as those of PyTorch's FlashAttention-2
    (:func:`check_nearness`); where it has infinities, so have they, with the same sign."""
    for case in tally.new(family):
        if sum(case.lens_q) and sum(case.lens_k):
            tally.count("calls")
            _compare(case)


def test_pytorchs_own_of_one_key() -> None:
    """So they are where rows attend to one key, and PyTorch's gradients are exact but for fp32."""
    _compare(ONE_KEY)


def _compare(case: FlashCase) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    caller = Caller("torch", "cuda")
    call = FlashCall(case, caller)
    options = call.options
    q, k, v, dout = (
        caller.tensor(call.place(call.arrays[role], lens, 0))
        for role, lens in zip(
            ("q", "k", "v", "dO"), (case.lens_q, case.lens_k, case.lens_k, case.lens_q), strict=True
        )
    )
    window = {"window_size_left": case.left, "window_size_right": case.right}
    lengths = [options[f"cu_seqlens_{x}"] for x in "qk"] + [
        options[f"max_seqlen_{x}"] for x in "qk"
    ]
    their_out, their_lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, case.causal, False, scale=case.head_size**-0.5, **window
    )  # fmt: skip
    out, *_, lse = mha_varlen_fwd(q, k, v, None, block_table_=None, seqused_k=None, **options)[:5]
    assert bool((torch.isinf(lse) == torch.isinf(their_lse)).all()), repr(case)
    assert bool((lse[torch.isinf(lse)] == their_lse[torch.isinf(lse)]).all()), repr(case)
    theirs = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, their_out, their_lse, *lengths, 0.0, case.causal, state, unused,
        scale=case.head_size**-0.5, **window,
    )  # fmt: skip
    # FlashAttention-2's own forward's results are as good as ours.
    ours = mha_varlen_bwd(dout, q, k, v, their_out, their_lse, None, None, None, **options)
    found = {"o": (out, their_out)}
    found |= zip(("dQ", "dK", "dV"), zip(ours[:3], theirs, strict=True), strict=True)
    given = given_arrays(call.arrays)
    results = {role: tuple(_padded(call, role, x) for x in pair) for role, pair in found.items()}
    check_nearness(case.as_case(), given, results)


def _padded(call: FlashCall, role: str, placed: Any) -> Any:
    """A result as the oracle has it, (B, H, S, D)."""
    name = {"o": "dO", "dQ": "q", "dK": "k", "dV": "v"}[role]
    lens = call.case.lens_k if role in ("dK", "dV") else call.case.lens_q
    return call.gather(call.caller.host(placed), lens, 0, call.arrays[name], 0.0)


def test_rows_far_below_their_sink() -> None:
    """Rows that have 2^-114 of their sink's weight, where kernels' factors may be flushed, are off
    by no more than that allows."""
    case = FlashCase(
        dtype="bfloat16", heads=6, heads_k=3, head_size=200, head_size_v=200, lens_q=(321, 569),
        lens_k=(192, 191), used=True, softcap=3.0, alibi="BH", scale=0.0, sinks=True, dropout=0.1,
        logits=0.01, seed=8806,
    )  # fmt: skip
    check(case, gpu_callers()[0])


def test_a_call_in_a_cuda_graph() -> None:
    """A captured call runs again on what its tensors hold by then, lengths included."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    q = torch.randn(300, 4, 64, device="cuda", dtype=torch.float16)
    cu_seqlens = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)

    def call() -> Any:
        return mha_varlen_fwd(
            q, q, q, None, cu_seqlens, cu_seqlens, None, None, None, 300, 300, is_causal=True
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, *_, lse = call()[:5]
    for lengths in ([0, 0, 300], [0, 299, 300], [0, 77, 140]):
        cu_seqlens.copy_(torch.tensor(lengths))
        q.normal_()
        graph.replay()
        want, *_, want_lse = call()[:5]
        count = lengths[-1]
        assert torch.equal(out[:count], want[:count])
        assert torch.equal(lse[:, :count], want_lse[:, :count])


@pytest.mark.parametrize("engine", ["sm80", "sm90"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_pytorchs(p: float, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one state, the same probabilities are dropped, to the bit, packed and not: with the
    identity as v, an output is 0 where they are. Gradients agree, too."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("PyTorch's FlashAttention needs Ampere")
    if engine == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it has Hopper's kernels")
    monkeypatch.setenv("DLATTN_ENGINE", engine)
    forget_calls()
    batch, seqlen_q, seqlen_k, heads, size = 2, 201, 128, 3, 128
    q = torch.randn(batch, seqlen_q, heads, size, device="cuda", dtype=torch.float16) / 4
    k = torch.randn(batch, seqlen_k, heads, size, device="cuda", dtype=torch.float16) / 4
    v = torch.eye(size, device="cuda", dtype=torch.float16)[:, None]
    v = v.expand(batch, seqlen_k, heads, size).contiguous()
    their, their_lse, state, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, seqlen_q, seqlen_k, p, False, False, scale=0.1
    )
    gen = tuple(state.cpu().view(torch.int64).tolist())
    out, *_, lse, again, _, _ = mha_fwd(q, k, v, None, None, p, 0.1, gen_=gen)
    assert torch.equal(out == 0, their == 0)
    assert torch.equal(again.view(torch.int64), state.view(torch.int64))
    torch.testing.assert_close(out, their, atol=2e-4, rtol=4e-3)
    torch.testing.assert_close(lse, their_lse, atol=1e-5, rtol=1e-5)
    lengths = [
        torch.arange(batch + 1, device="cuda", dtype=torch.int32) * n for n in (seqlen_q, seqlen_k)
    ]
    flat = [x.reshape(-1, heads, size) for x in (q, k, v)]
    packed, *_ = mha_varlen_fwd(
        *flat, None, *lengths, None, None, None, seqlen_q, seqlen_k, p, 0.1, gen_=gen
    )
    assert torch.equal(packed.view_as(out) == 0, their == 0)
    dout = torch.randn_like(out)
    theirs = torch.ops.aten._flash_attention_backward(
        dout.flatten(0, 1), *flat, their.flatten(0, 1), their_lse.transpose(0, 1).flatten(1),
        *lengths, seqlen_q, seqlen_k, p, False, state, torch.empty_like(state), scale=0.1,
    )  # fmt: skip
    ours = mha_bwd(dout, q, k, v, out, lse, p_dropout=p, softmax_scale=0.1, philox_seed=state)
    for mine, other in zip(ours[:3], theirs, strict=True):
        # Of an error common to all elements, such as in a row's sum, a share of the largest.
        atol = 5e-3 * float(other.abs().max())
        torch.testing.assert_close(mine.flatten(0, 1), other, atol=atol, rtol=1e-2)
    forget_calls()


def test_generators_advance_as_pytorchs() -> None:
    """By 32 for each head of each sequence; without one, the device's own is drawn from."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    q = torch.randn(2, 20, 3, 64, device="cuda", dtype=torch.float16)
    torch.cuda.manual_seed(5)
    torch.ops.aten._flash_attention_forward(q, q, q, None, None, 20, 20, 0.1, False, False)
    after = torch.cuda.default_generators[q.device.index].get_offset()
    torch.cuda.manual_seed(5)
    *_, own, _, _ = mha_fwd(q, q, q, p_dropout=0.1)
    assert torch.cuda.default_generators[q.device.index].get_offset() == after == 32 * 2 * 3
    assert own.tolist() == [5, 0]
    generator = torch.Generator("cuda").manual_seed(7)
    states = [mha_fwd(q, q, q, p_dropout=0.1, gen_=generator)[5].tolist() for _ in range(2)]
    assert states == [[7, 0], [7, 32 * 2 * 3]]
