"""FlashAttention's functions refuse wrong arguments with a sentence, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from dlattn import attention
from dlattn.errors import DlattnError, InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.flash import (
    flash_attn_with_kvcache,
    mha_bwd,
    mha_fwd,
    mha_varlen_bwd,
    mha_varlen_fwd,
)

B, SQ, SK, H, HK, D = 2, 5, 7, 4, 2, 16
I32 = np.int32


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


def read_only(*shape: int) -> Any:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def dense(**changes: Any) -> dict[str, Any]:
    return {"q": zeros(B, SQ, H, D), "k": zeros(B, SK, HK, D), "v": zeros(B, SK, HK, D)} | changes


def packed(**changes: Any) -> dict[str, Any]:
    plain = {
        "q": zeros(B * SQ, H, D),
        "k": zeros(B * SK, HK, D),
        "v": zeros(B * SK, HK, D),
        "out_": None,
        "cu_seqlens_q": np.array([0, SQ, B * SQ], I32),
        "cu_seqlens_k": np.array([0, SK, B * SK], I32),
        "seqused_k": None,
        "block_table_": None,
        "alibi_slopes_": None,
        "max_seqlen_q": SQ,
        "max_seqlen_k": SK,
    }
    return plain | changes


def paged(**changes: Any) -> dict[str, Any]:
    pages = {
        "k": zeros(6, 4, HK, D),
        "v": zeros(6, 4, HK, D),
        "block_table_": zeros(B, 2, dtype=I32),
    }
    return packed(**(pages | changes))


def backward(**changes: Any) -> dict[str, Any]:
    more = {
        "dout": zeros(B, SQ, H, D),
        "out": zeros(B, SQ, H, D),
        "softmax_lse": zeros(B, H, SQ, dtype=np.float32),
    }
    return dense(**(more | changes))


def packed_backward(**changes: Any) -> dict[str, Any]:
    arguments = packed()
    for name in ("out_", "seqused_k", "block_table_"):
        arguments.pop(name)
    more = {
        "dout": zeros(B * SQ, H, D),
        "out": zeros(B * SQ, H, D),
        "softmax_lse": zeros(H, B * SQ, dtype=np.float32),
        **{"dq_": None, "dk_": None, "dv_": None},
    }
    return arguments | more | changes


WRONG_ARGUMENTS = [
    (mha_fwd, dense(q=3), "q: Expected a tensor"),
    (mha_fwd, dense(k=None), "k: expected a tensor, got None"),
    (mha_fwd, dense(q=zeros(B, SQ, H)), r"q: expected shape \(any, any, any, any\)"),
    (mha_fwd, dense(k=zeros(B + 1, SK, HK, D)), r"k: expected shape \(2, any, any, 16\)"),
    (mha_fwd, dense(v=zeros(B, SK, HK + 1, D)), r"v: expected shape \(2, 7, 2, any\)"),
    (mha_fwd, dense(k=zeros(B, SK, 3, D), v=zeros(B, SK, 3, D)), "k: .*divides the 4 of q, got 3"),
    (mha_fwd, dense(k=zeros(B, SK, 0, D), v=zeros(B, SK, 0, D)), "k: .*divides the 4 of q, got 0"),
    (mha_fwd, dense(q=zeros(B, SQ, H, 0), k=zeros(B, SK, HK, 0)), "q: expected a head_size"),
    (mha_fwd, dense(k=zeros(B, SK, HK, D, dtype=np.float32)), "k: expected elements of HALF"),
    (mha_fwd, dense(q=zeros(B, SQ, H, D, dtype=I32)), "q: expected elements of HALF or"),
    (mha_fwd, dense(q=zeros(B, SQ, H, 2 * D)[..., ::2]), "q: expected a stride of 1"),
    (mha_fwd, dense(q=zeros(B, SQ, H, D)[:, ::-1]), "q: expected no negative stride"),
    (mha_fwd, dense(out_=zeros(B, SQ, H, D + 8)), r"out_: expected shape \(2, 5, 4, 16\)"),
    (mha_fwd, dense(out_=read_only(B, SQ, H, D)), "out_: .*read-only"),
    (
        mha_fwd,
        dense(out_=as_strided(zeros(B, SQ, D), (B, SQ, H, D), (2 * SQ * D, 2 * D, 0, 2))),
        "out_: .*share an address",
    ),
    (mha_fwd, dense(alibi_slopes_=zeros(H)), "alibi_slopes_: expected elements of FLOAT"),
    (
        mha_fwd,
        dense(alibi_slopes_=zeros(H + 1, dtype=np.float32)),
        r"alibi_slopes_: expected shape \(4\)",
    ),
    (mha_fwd, dense(seqused_k=zeros(B, dtype=np.int64)), "seqused_k: expected elements of INT32"),
    (mha_fwd, dense(sinks=zeros(H + 1, dtype=np.float32)), "sinks: expected shape"),
    (mha_fwd, dense(softmax_scale=float("nan")), "softmax_scale: expected a finite number"),
    (mha_fwd, dense(softmax_scale=[1]), "softmax_scale: expected a finite number"),
    (mha_fwd, dense(softcap=-1.0), "softcap: expected 0"),
    (mha_fwd, dense(softcap=1e-300), "softcap: expected 0"),
    (mha_fwd, dense(p_dropout=10**400), "p_dropout: expected a finite number"),
    (mha_fwd, dense(window_size_left=1.5), "window_size_left: expected an integer"),
    (mha_fwd, dense(p_dropout=1.0), "p_dropout: expected at least 0 and below 1"),
    (mha_fwd, dense(p_dropout=1 - 2**-26), "p_dropout: expected .* below 1, as a float32, got 0.9"),
    (mha_bwd, backward(p_dropout=1 - 2**-26, philox_seed=zeros(2, dtype=np.int64)), "^p_dropout: "),
    (mha_fwd, dense(return_softmax=True), "return_softmax: "),
    (mha_varlen_fwd, packed(q=zeros(B, SQ, H, D)), "q: expected shape"),
    (
        mha_varlen_fwd,
        packed(cu_seqlens_q=np.array([0, 5, 10])),
        "cu_seqlens_q: expected elements of INT32",
    ),
    (
        mha_varlen_fwd,
        packed(cu_seqlens_k=np.array([0, 14], I32)),
        r"cu_seqlens_k: expected shape \(3\)",
    ),
    (mha_varlen_fwd, packed(cu_seqlens_q=zeros(0, dtype=I32)), "batch_size . 1 numbers, got none"),
    (mha_varlen_fwd, packed(cu_seqlens_q=np.zeros(6, I32)[::2]), "cu_seqlens_q: .*contiguous"),
    (
        mha_varlen_fwd,
        packed(cu_seqlens_q=np.array([0, 5, 11], I32)),
        r"cu_seqlens_q: expected numbers that never fall, from 0 to at most 10",
    ),
    (mha_varlen_fwd, packed(cu_seqlens_k=np.array([0, 9, 7], I32)), "cu_seqlens_k: .*never fall"),
    (mha_varlen_fwd, packed(cu_seqlens_k=np.array([-1, 9, 9], I32)), "cu_seqlens_k: .*from 0"),
    (mha_varlen_fwd, packed(max_seqlen_q=-1), "max_seqlen_q: expected 0 to"),
    (mha_varlen_fwd, packed(max_seqlen_k=2**31), "max_seqlen_k: expected 0 to"),
    (mha_varlen_fwd, packed(seqused_k=zeros(3, dtype=I32)), r"seqused_k: expected shape \(2\)"),
    (mha_varlen_fwd, paged(k=zeros(12, HK, D)), "k: expected shape"),
    (mha_varlen_fwd, paged(block_table_=zeros(B, 1, dtype=I32)), "max_seqlen_k = 7 keys"),
    (
        mha_varlen_fwd,
        paged(block_table_=zeros(B, 2, dtype=np.int64)),
        "block_table_: expected elements of INT32",
    ),
    (
        mha_varlen_fwd,
        paged(block_table_=zeros(B + 1, 2, dtype=I32)),
        "block_table_: expected shape",
    ),
    (mha_bwd, backward(dout=zeros(B, SQ, H, D + 8)), "v: expected shape .*dout's head size is 24"),
    (mha_bwd, backward(out=zeros(B, SQ + 1, H, D)), "out: expected shape"),
    (mha_bwd, backward(softmax_lse=zeros(B, H, SQ)), "softmax_lse: expected elements of FLOAT"),
    (
        mha_bwd,
        backward(softmax_lse=zeros(B, SQ, H, dtype=np.float32)),
        "softmax_lse: expected shape",
    ),
    (mha_bwd, backward(dk_=zeros(B, SK, H, D)), r"dk_: expected shape \(2, 7, 2, 16\)"),
    (
        mha_bwd,
        backward(dv_=zeros(B, SK, HK, D, dtype=np.float32)),
        "dv_: expected elements of HALF",
    ),
    (mha_varlen_bwd, packed_backward(dq_=read_only(B * SQ, H, D)), "dq_: .*read-only"),
    (mha_fwd, dense(p_dropout=0.1, gen_="x"), "gen_: .*got 'x'"),
    (mha_fwd, dense(p_dropout=0.1, gen_=(1, 2, 3)), r"gen_: .*got \(1, 2, 3\)"),
    (mha_fwd, dense(p_dropout=0.1, gen_=(1, 0.5)), r"gen_: .*got \(1, 0.5\)"),
    (mha_fwd, dense(p_dropout=0.1, gen_=np.array(4)), r"gen_: expected the state .* shape \(\)"),
    (mha_varlen_fwd, packed(p_dropout=0.1, gen_=zeros(2)), "gen_: expected the state .* HALF"),
    (mha_bwd, backward(p_dropout=0.1), "philox_seed: expected the state"),
    (mha_bwd, backward(p_dropout=0.1, philox_seed=zeros(2)), "philox_seed, philox_offset"),
    (
        mha_bwd,
        backward(p_dropout=0.1, philox_seed=zeros(1, dtype=np.int64)),
        "philox_seed, philox_offset: .*one integer in each",
    ),
    (mha_varlen_bwd, packed_backward(cu_seqlens_q=None), "cu_seqlens_q: expected a tensor"),
    (
        mha_varlen_bwd,
        packed_backward(cu_seqlens_q=np.array([0, 5, 11], I32)),
        "cu_seqlens_q: .*never fall",
    ),
]

NOT_SUPPORTED = [
    (mha_fwd, dense(attention_chunk=4), "attention_chunk=4"),
    (mha_varlen_fwd, paged(k=zeros(6, 6, HK, D), v=zeros(6, 6, HK, D)), "pages of 6 rows"),
]


@pytest.mark.parametrize("function, arguments, message", WRONG_ARGUMENTS)
def test_wrong_arguments(function: Any, arguments: dict[str, Any], message: str) -> None:
    """Each names the argument, what was expected and what was got."""
    with pytest.raises(InvalidArgumentError, match=message):
        function(**arguments)


@pytest.mark.parametrize("function, arguments, message", NOT_SUPPORTED)
def test_not_supported(function: Any, arguments: dict[str, Any], message: str) -> None:
    """What FlashAttention has and dlattn has not says so."""
    with pytest.raises(cudnnGraphNotSupportedError, match=message):
        function(**arguments)


@pytest.mark.parametrize("build", [dense, packed, paged, backward, packed_backward])
def test_what_is_right_passes(build: Any) -> None:
    """The arguments that the cases above change are accepted."""
    functions = {dense: mha_fwd, packed: mha_varlen_fwd, paged: mha_varlen_fwd, backward: mha_bwd}
    functions[build if build is packed_backward else None] = mha_varlen_bwd  # type: ignore[index]
    assert len(functions[build](**build())) in (4, 8)


def test_a_number_in_an_array_has_no_rows() -> None:
    """It is refused for its shape, and not for strides that no copy would change."""
    one, x = np.array(1, np.float16), zeros(B, SQ, H, D)
    for name in ("q", "k_cache", "v_cache", "k", "v", "out"):
        given = {"q": x, "k_cache": x.copy(), "v_cache": x.copy(), "cache_seqlens": 0}
        new = {"k": x[:, :1], "v": x[:, :1]}
        with pytest.raises(InvalidArgumentError, match=rf"^{name}: expected shape .* got \(\)"):
            flash_attn_with_kvcache(**{**given, **new, name: one})
    with pytest.raises(InvalidArgumentError, match=r"^out: expected shape .* got \(\)"):
        attention(x, x, x, out=one)


def test_what_is_empty_goes_by_its_name() -> None:
    """A cache without columns, and a table without pages, are refused as what they are."""
    q, cache = zeros(B, 1, H, D), zeros(B, SK, HK, D)
    with pytest.raises(
        InvalidArgumentError, match=r"^v_cache: .*head_size.* got shape \(2, 7, 2, 0"
    ):
        flash_attn_with_kvcache(q, cache, cache[..., :0])
    with pytest.raises(InvalidArgumentError, match=r"^block_table: .* got shape \(2, 0\)"):
        flash_attn_with_kvcache(q, cache, cache, block_table=zeros(B, 0, dtype=I32))


def test_lengths_never_leave_the_tensors() -> None:
    """seqused_k beyond the last token counts as what there is."""
    arguments = packed(seqused_k=np.array([SK, 10**6], I32), max_seqlen_k=10**6)
    out, *_ = mha_varlen_fwd(**arguments)
    assert (out == 0).all()


def test_a_page_that_there_is_not() -> None:
    """Of a table in host memory, pages are checked."""
    with pytest.raises(DlattnError, match="block_table_: the pages of sequence 0"):
        mha_varlen_fwd(**paged(block_table_=np.full((B, 2), 6, I32)))


def test_torch_wants_its_own_device() -> None:
    """A meta tensor has no memory; tensors of two devices are refused."""
    torch = pytest.importorskip("torch")
    q = torch.zeros(B, SQ, H, D, device="meta", dtype=torch.float16)
    with pytest.raises(InvalidArgumentError, match="q: This Tensor on device meta has no memory"):
        mha_fwd(q, q, q)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_are_no_numbers() -> None:
    """Torch's nested tensors, which raise where others have a shape, are refused by name in the
    place of an option, too."""
    torch: Any = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    x = zeros(B, SQ, H, D)
    for name, call in (
        ("softmax_scale", lambda **given: mha_fwd(x, x, x, **given)),
        ("gen_", lambda **given: mha_fwd(x, x, x, p_dropout=0.5, **given)),
        ("causal", lambda **given: flash_attn_with_kvcache(x, x, x, **given)),
        ("softcap", lambda **given: attention(x, x, x, **given)),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{name}: "):
            call(**{name: nested})


def test_results_lie_in_memory_as_their_inputs_do() -> None:
    """As by FlashAttention's ``empty_like``: where heads are outermost, they stay so."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 4, 6, 8)).astype(np.float16)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # (B, S, H, D), stored as (B, H, S, D)
    out, _, _, _, lse, *_ = mha_fwd(q, k, v)
    assert out.strides == q.strides
    gradients = mha_bwd(out, q, k, v, out, lse, None, None, None)[:3]
    assert all(x.strides == q.strides for x in gradients)
    assert flash_attn_with_kvcache(q, k, v).strides == q.strides
