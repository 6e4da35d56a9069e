"""FlashAttention's functions run on a case, and held to the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlattn.flash import mha_bwd, mha_fwd, mha_varlen_bwd, mha_varlen_fwd
from tests import oracle, tally
from tests.callers import Caller
from tests.flash import SENTINEL, FlashCall, FlashCase, Memory


def check(case: FlashCase, caller: Caller) -> None:
    """Fails unless forward and backward are right, and write nothing but their results.

    Whatever fails, the line to repeat it with is printed.
    """
    try:
        _check(FlashCall(case, caller))
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{case!r}"')
        raise


def _check(call: FlashCall) -> None:
    case, caller, arrays = call.case, call.caller, call.arrays
    options, rows = call.options, call.key_rows
    placed = {
        "q": call.memory(call.place(arrays["q"], case.lens_q, 0)).tensor,
        "k": call.memory(call.place(arrays["k"], case.lens_k, rows)).tensor,
        "v": call.memory(call.place(arrays["v"], case.lens_k, rows)).tensor,
        "dout": call.memory(call.place(arrays["dO"], case.lens_q, 0)).tensor,
    }
    if case.page:
        k, v, table = call.pages()
        placed |= {"k": call.memory(k).tensor, "v": call.memory(v).tensor}
        options["block_table_"] = call.vector(table)
    elif case.packed:
        options["block_table_"] = None
    if case.packed:
        options.setdefault("seqused_k", None)
    out_ = call.result(placed["dout"].shape)
    sinks = arrays.get("sink_token")
    sinks = None if sinks is None else call.vector(sinks.reshape(-1))
    forward = mha_varlen_fwd if case.packed else mha_fwd
    q, k, v = (placed[role] for role in "qkv")
    state = case.as_case().philox()
    tally.count(f"{forward.__name__} calls")
    results = forward(
        *(q, k, v, None if out_ is None else out_.tensor), sinks=sinks, gen_=state, **options
    )
    out, q_padded, k_padded, v_padded, lse = results[:5]
    assert len(results) == 8 and all(type(x) is type(q) for x in results)
    for given, returned in ((q, q_padded), (k, k_padded), (v, v_padded)):
        assert returned.shape[-1] == -(-given.shape[-1] // 8) * 8
    if not case.is_padded:
        assert q_padded is q and k_padded is k and v_padded is v
    as_case = case.as_case()
    got = _forward_results(call, out, lse, out_)
    oracle.assert_close(as_case, given_arrays(arrays), got)
    if case.page:
        return
    for name in ("block_table_", "sinks"):
        options.pop(name, None)
    if options.get("seqused_k") is None:
        options.pop("seqused_k", None)
    backward = mha_varlen_bwd if case.packed else mha_bwd
    if case.head_size == case.head_size_v:
        q, k, v = q_padded, k_padded, v_padded
    memories = [call.result(placed[role].shape) for role in "qkv"]
    dq_, dk_, dv_ = (None if it is None else it.tensor for it in memories)
    tally.count(f"{backward.__name__} calls")
    *gradients, softmax_d = backward(
        placed["dout"], q, k, v, out, lse, dq_, dk_, dv_,
        deterministic=case.deterministic, **_spelled(call, results[5], state), **options,
    )  # fmt: skip
    for it, gradient in zip(memories, gradients, strict=True):
        if it is not None:
            assert gradient is it.tensor
            if not (case.packed and (case.slack or call.extra)) or case.zero_tensors:
                it.check_rest()
    lens = (case.lens_q, case.lens_k, case.lens_k)
    got = {
        role: call.gather(caller.host(x), length, 0 if role == "dQ" else rows, arrays[name], 0.0)
        for role, name, x, length in zip(("dQ", "dK", "dV"), "qkv", gradients, lens, strict=True)
    }
    oracle.assert_close(as_case, given_arrays(arrays), got)
    _check_softmax_d(call, out, softmax_d)


def _spelled(call: FlashCall, returned: Any, state: tuple[int, int]) -> dict[str, Any]:
    """The philox state, as the forward returned it, or in two tensors."""
    words = np.array([x % 2**64 for x in state], np.uint64)
    if call.case.dropout:
        host = np.ascontiguousarray(call.caller.host(returned))
        assert (host.view(np.uint64) == words).all()
    if call.case.seed % 2 or call.caller.name == "jax":
        return {"philox_seed": returned, "philox_offset": None}
    seed, offset = (call.vector(word.view(np.int64).reshape(())) for word in words)
    return {"philox_seed": seed, "philox_offset": offset}


def given_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What the oracle reads: rows past the lengths are none of its business."""
    return {role: np.nan_to_num(x) for role, x in arrays.items()}


def _forward_results(call: FlashCall, out: Any, lse: Any, out_: Memory | None) -> dict[str, Any]:
    case, caller = call.case, call.caller
    if out_ is not None:
        assert out is out_.tensor
        out_.check_rest()
    host_out, host_lse = caller.host(out), caller.host(lse)
    assert host_lse.dtype == np.float32
    rows = host_lse.T[..., None] if case.packed else host_lse.swapaxes(1, 2)[..., None]
    if case.packed:
        inside = np.zeros(len(host_out), bool)
        for first, length in zip(call.starts(case.lens_q, 0), case.lens_q, strict=False):
            inside[first : first + length] = True
        if case.zero_tensors:
            assert (host_out[~inside] == 0).all()
            assert 0 in case.longest or (rows[~inside] == -np.inf).all()
        elif out_ is not None and 0 not in case.longest:
            assert (host_out[~inside] == SENTINEL).all()
    stats = call.gather(rows, case.lens_q, 0, call.arrays["q"], np.inf)
    assert not np.isneginf(stats).any(), "empty rows have an lse of +inf"
    stats[np.isposinf(stats)] = -np.inf
    o = call.gather(host_out, case.lens_q, 0, call.arrays["q"], 0.0)
    return {"o": o, "stats": stats}


def _check_softmax_d(call: FlashCall, out: Any, softmax_d: Any) -> None:
    """``(1 - p) * rowsum(dout * out)``, of what out is, to the precision of fp32."""
    case, got = call.case, call.caller.host(softmax_d)
    o = call.gather(call.caller.host(out), case.lens_q, 0, call.arrays["q"], 0.0)
    products = o.astype(np.float64) * np.nan_to_num(call.arrays["dO"]).astype(np.float64)
    products = products * (1 - case.dropout)
    want, reach = products.sum(-1), abs(products).sum(-1)
    if not case.packed:
        assert got.shape == (case.batch, case.heads, -(-max(case.lens_q) // 128) * 128)
        assert (got[..., max(case.lens_q) :] == 0).all()
    else:
        tokens = 2 * case.slack + sum(case.lens_q)
        assert got.shape == (case.heads, tokens + 128 * case.batch)
    for entry, length in enumerate(case.lens_q):
        first = call.starts(case.lens_q, 0)[entry] + 128 * entry
        own = got[:, first : first + length] if case.packed else got[entry, :, :length]
        if 0 in case.longest:
            assert (own == 0).all()
            continue
        wrong = abs(own - want[entry, :, :length]) - 1e-5 * reach[entry, :, :length]
        assert (wrong <= 1e-30).all(), f"softmax_d is wrong; {case!r}"
