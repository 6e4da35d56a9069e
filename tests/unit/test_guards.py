"""torch's guards in the place of looking at each tensor: they must never see less."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlattn.calls import cache
from dlattn.calls.cache import CallCache, forget_calls
from dlattn.flash import mha_fwd, mha_varlen_fwd
from dlattn.runtime import guards
from dlattn.runtime.tensors import lookalikes, signatures

torch = pytest.importorskip("torch")


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Of a few shapes, orders in memory, types and offsets, so that many look alike."""
    shape = draw(st.sampled_from([(2, 3, 4), (2, 4, 3), (1, 3, 4), (6, 4), (2, 0, 4)]))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    offset = draw(st.sampled_from([0, 0, 0, 1, 8]))
    memory = torch.zeros(offset + 64, dtype=dtype)[offset:]
    x = memory[: torch.Size(shape).numel()].view(shape)
    kind = draw(st.sampled_from(["plain", "plain", "moved", "repeated", "gaps", "learned"]))
    if kind == "moved":
        x = x.transpose(0, -1)
    elif kind == "repeated":
        x = x[:1].expand(shape[0], *x.shape[1:])
    elif kind == "gaps":
        x = memory[: 2 * x.numel()].view(*shape[:-1], 2 * shape[-1])[..., ::2]
    return x.requires_grad_(kind == "learned")


pairs = st.tuples(tensors(), tensors())


@st.composite
def places(draw: st.DrawFn) -> Any:
    """Five places of two tensors, some of which have none, or the same one."""
    some = draw(pairs)
    kinds = st.sampled_from([some[0], some[0], some[1], None])
    return tuple(draw(kinds) for _ in range(5))


@given(st.one_of(st.tuples(pairs, pairs), st.tuples(places(), places())))
def test_lookalikes_have_one_signature(both: Any) -> None:
    """What a guard takes for alike, looking at each tensor does, too, and says the same of where
    they are; what was guarded is alike."""
    some, others = both
    look = lookalikes(some)
    if look is None:
        return
    assert look(*some) == signatures(some)[1]
    found = look(*others)
    if found is not None:
        assert signatures(others) == (signatures(some)[0], found)


def test_what_a_guard_cannot_tell_has_none() -> None:
    """Tensors of another framework or at odd addresses are looked at."""
    x, y = torch.zeros(2, 64)
    assert lookalikes((x, y)) is not None
    for others in (
        (None, None),
        (x, y.numpy()),
        (x.numpy(), y.numpy()),
        (x, y[1:]),
        (x, y[:0]),
    ):
        assert lookalikes(others) is None


def test_missing_and_repeated_tensors() -> None:
    """What is left out has address 0, and is left out of what looks alike; one tensor in two places
    is one there, too."""
    x, y, z = torch.zeros(3, 64)
    look = lookalikes((None, x, y, x, None))
    assert look is not None
    assert look(None, z, x, z, None) == [0, z.data_ptr(), x.data_ptr(), z.data_ptr(), 0]
    assert look(None, x, x, x, None) is None  # the guard sees one tensor in two places
    for others in ((z, x, y, x, None), (None, x, y, z, None), (None, None, y, None, None)):
        assert look(*others) is None


@pytest.mark.parametrize("answer", [True, False])
def test_a_guard_that_sees_less_is_not_used(monkeypatch: Any, answer: bool) -> None:
    """Of a torch whose guards take everything for alike, or nothing, each tensor is looked at."""

    class Guards:
        def __init__(self, *tensors: Any, **said: Any) -> None:
            self.check = lambda *given: answer

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Guards)
    guards._trusted_guards.cache_clear()
    try:
        assert lookalikes((torch.zeros(64),)) is None
    finally:
        guards._trusted_guards.cache_clear()


@pytest.mark.parametrize(
    "mode", [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta")]
)
def test_a_first_call_in_any_mode_trusts_them(mode: Any) -> None:
    """Whether guards see enough is asked with tensors of the CPU, outside of autocasting."""
    guards._trusted_guards.cache_clear()
    with mode():
        assert guards._trusted_guards() is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_a_nested_tensor_looks_like_no_other() -> None:
    """torch's own test would end the process."""
    x = torch.zeros(2, 3, 64)
    look = lookalikes((x,))
    assert look is not None and look(x) == [x.data_ptr()]
    assert look(torch.nested.nested_tensor(list(x))) is None


def test_calls_that_take_turns_make_few_tests(monkeypatch: Any) -> None:
    """Where one tensor is in two places in every other call, half of them are known at a glance,
    and what only they do is known at one again soon after."""
    made, looked = [], []
    monkeypatch.setattr(cache, "lookalikes", lambda it: made.append(1) or lookalikes(it))
    monkeypatch.setattr(cache, "signatures", lambda it: looked.append(1) or signatures(it))
    calls: CallCache[Any] = CallCache(lambda *call: None)
    x, y = torch.zeros(2, 64)
    for _ in range(500):
        for pair in ((x, x), (x, y)):
            assert calls.find(pair, ())[1] == signatures(pair)[1]
    assert len(made) < 20 and len(looked) < 550
    for pair in ((x, x), (x, y)):
        for _ in range(65):
            calls.find(pair, ())
        looked.clear()
        calls.find(pair, ())
        assert not looked


@given(
    st.lists(
        st.tuples(places(), st.sampled_from((2, 5)), st.booleans(), st.booleans()), max_size=12
    )
)
def test_a_cache_finds_the_same_with_and_without(calls: Any) -> None:
    """Whatever was called before, in whatever mode, what is found is what was prepared for as many
    tensors, and options, like these, with the addresses of these."""
    kept: CallCache[Any] = CallCache(lambda *call: (signatures(call[:-1])[0], *call[-1]), most=4)
    for five, count, option, learns in calls:
        given_tensors = five[:count]
        with torch.set_grad_enabled(learns):
            prepared, addresses = kept.find(given_tensors, (option,))
            key, expected = signatures(given_tensors)
        assert prepared == (key, option) and addresses == expected


def test_what_is_left_out_in_every_other_call() -> None:
    """Sinks count, and a page table does, between calls that are alike but for having none."""
    q, k, v = torch.randn(3, 1, 4, 2, 8).bfloat16()
    sinks = torch.tensor([3.0, -1.0])
    pages = {"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32), "max_seqlen_q": 4}
    pages |= {"cu_seqlens_k": pages["cu_seqlens_q"], "max_seqlen_k": 4}
    none = dict.fromkeys(("out_", "seqused_k", "block_table_", "alibi_slopes_"))

    def dense(given: Any) -> Any:
        return mha_fwd(q, k, v, sinks=given)[0]

    def packed(given: Any) -> Any:
        return mha_varlen_fwd(q[0], k[0], v[0], **none, **pages, sinks=given)[0]

    for call in (dense, packed):
        expected = []
        for given_sinks in (None, sinks):
            forget_calls()
            expected.append(call(given_sinks))
        assert not torch.equal(*expected)
        forget_calls()
        for _ in range(2):
            for given_sinks, its in zip((None, sinks), expected, strict=True):
                assert torch.equal(call(given_sinks), its)
