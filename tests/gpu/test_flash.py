"""Random calls of FlashAttention's functions on a GPU, against the oracle and PyTorch's own.

``pytest tests/gpu/test_flash.py --examples 500`` draws more of them.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.callers import gpu_callers
from tests.flash import FlashCase
from tests.flash_check import check
from tests.strategies import flash_cases

pytestmark = pytest.mark.gpu


@settings(settings.get_profile("gpu"))
@given(flash_cases("gpu"))
def test_one_length(case: FlashCase) -> None:
    """mha_fwd and mha_bwd are right, and write nothing but their results."""
    check(case, gpu_callers()[case.seed % len(gpu_callers())])


@settings(settings.get_profile("gpu"))
@given(flash_cases("gpu", packed=True))
def test_packed(case: FlashCase) -> None:
    """mha_varlen_fwd and mha_varlen_bwd are right, and write nothing but their results."""
    check(case, gpu_callers()[case.seed % len(gpu_callers())])
