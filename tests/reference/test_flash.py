"""Random calls of FlashAttention's functions on the CPU, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from dlattn import dtypes
from dlattn.dtypes import data_type
from dlattn.flash import mha_bwd, mha_fwd, mha_varlen_bwd, mha_varlen_fwd
from tests.callers import Caller
from tests.flash import FlashCase
from tests.flash_check import check
from tests.flash_strategies import flash_cases
from tests.strangers import WRAPPERS


@settings(max_examples=500)
@given(flash_cases())
def test_one_length(case: FlashCase) -> None:
    """mha_fwd and mha_bwd of NumPy arrays are right, and write nothing but their results."""
    check(case, Caller("numpy"))


@settings(max_examples=500)
@given(flash_cases(packed=True))
def test_packed(case: FlashCase) -> None:
    """mha_varlen_fwd and mha_varlen_bwd of NumPy arrays are right, and write nothing else."""
    check(case, Caller("numpy"))


@settings(max_examples=100)
@given(flash_cases() | flash_cases(packed=True))
def test_on_torch(case: FlashCase) -> None:
    """The same of torch's tensors, which results are then, too."""
    pytest.importorskip("torch")
    check(case, Caller("torch"))


@settings(max_examples=50)
@given(flash_cases(dtype="bfloat16") | flash_cases(packed=True, dtype="float16"))
def test_on_jax(case: FlashCase) -> None:
    """The same of JAX arrays."""
    pytest.importorskip("jax")
    check(case, Caller("jax"))


@pytest.mark.parametrize("dtype", [data_type.BFLOAT16, data_type.HALF, data_type.DOUBLE])
@pytest.mark.parametrize("head_size", [5, 8])
def test_memory_of_another_library(dtype: data_type, head_size: int) -> None:
    """In host memory, results may lie in another library's memory than q, in the torch of NumPy's
    arrays and the other way round, whether or not head sizes are padded on the way."""
    torch: Any = pytest.importorskip("torch")
    element = getattr(torch, dtypes.to_torch_name(dtype))
    shape, generator = (2, 3, 1, head_size), torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(element) for _ in range(4)]
    bits = f"i{tensors[0].element_size()}"
    arrays = [
        x.view(getattr(torch, np.dtype(bits).name)).numpy().view(dtypes.to_numpy(dtype))
        for x in tensors
    ]
    wanted: Any = None
    for (q, k, v, dout), (out_, *gradients) in (
        (tensors, [None] * 4),
        (tensors, [np.empty_like(x) for x in arrays]),
        (arrays, [torch.empty_like(x) for x in tensors]),
    ):
        out, *_, lse, _, _, _ = mha_fwd(q, k, v, out_, is_causal=True)
        found = (out, *mha_bwd(dout, q, k, v, out, lse, *gradients, is_causal=True)[:3])
        numbers = [
            x.double() if torch.is_tensor(x) else torch.from_numpy(x.astype("f8")) for x in found
        ]
        if wanted is None:
            wanted = numbers
            continue
        assert all(x is y for x, y in zip(found, (out_, *gradients), strict=True))
        assert all(map(torch.equal, numbers, wanted))


def test_sinks_that_are_none_and_no_keys() -> None:
    """Nothing is attended then, which softmax_lse says as everywhere else."""
    sinks = np.array([-np.inf, 0.5], np.float32)
    q, none, begin = np.ones((1, 3, 2, 8)), np.ones((1, 0, 2, 8)), np.array([0, 3], np.int32)
    expected = np.broadcast_to(np.array([[np.inf], [0.5]]), (2, 3))
    for used in (None, np.array([2], np.int32)):
        lse = mha_fwd(q, none, none, seqused_q=used, sinks=sinks)[4][0]
        rows = 3 if used is None else 2
        assert (lse[:, :rows] == expected[:, :rows]).all() and (lse[:, rows:] == np.inf).all()
    begins = begin, 0 * begin
    packed = mha_varlen_fwd(
        q[0], none[0], none[0], None, *begins, None, None, None, 3, 0, sinks=sinks
    )
    assert (packed[4] == expected).all()


@pytest.mark.parametrize("head_sizes", [(8, 8), (5, 5), (8, 5), (5, 8)])
@pytest.mark.parametrize("library", ["numpy", "torch", "an array interface", "DLPack"])
def test_rows_of_no_sequence_keep_what_they_hold(library: str, head_sizes: tuple[int, int]) -> None:
    """In the caller's memory, of results of any head size, so that calls may share it."""
    rng, own = np.random.default_rng(0), np.zeros(12, bool)
    own[2:4] = own[5:9] = True

    def of_library(array: Any) -> Any:
        return pytest.importorskip("torch").from_numpy(array) if library == "torch" else array

    begins, used = (of_library(np.array(x, np.int32)) for x in ([2, 5, 9], [2, 4]))
    sizes = head_sizes[0], *head_sizes
    q, k, v = (of_library(rng.standard_normal((12, 4, size))) for size in sizes)
    arrays = [np.full((12, 4, size), 7.0) for size in (head_sizes[1], *sizes)]
    memory = [WRAPPERS.get(library, of_library)(x) for x in arrays]
    out, *_, lse, _, _, _ = mha_varlen_fwd(
        q, k, v, memory[0], begins, begins, used, None, None, 4, 4, seqused_q=used
    )
    values = of_library(arrays[0])
    gradients = mha_varlen_bwd(
        *(values, q, k, v, values, lse, *memory[1:], begins, begins, None, 4, 4),
        seqused_q=used,
        seqused_k=used,
    )
    results = out, *gradients[:3]
    for result, place, numbers in zip(results, memory, arrays, strict=True):
        assert result is place
        assert (numbers[~own] == 7).all()
        assert (numbers[own] != 7).all()
