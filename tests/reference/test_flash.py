"""Random calls of FlashAttention's functions on the CPU, against the oracle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.callers import Caller
from tests.flash import FlashCase
from tests.flash_check import check
from tests.flash_strategies import flash_cases


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
