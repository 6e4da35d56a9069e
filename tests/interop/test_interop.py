"""NumPy's memory behind exchange protocols alone; on a GPU: tests/gpu/test_interop.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.strangers import WRAPPERS, check_calls


@pytest.mark.parametrize("protocol", WRAPPERS)
def test_strangers(protocol: str) -> None:
    """What has one protocol alone is as good as NumPy's arrays, and gets those as results."""
    check_calls(np, WRAPPERS[protocol], np.float32, 0)
