"""What plans keep on devices."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from dlattn.plans import cuda
from tests.unit.test_fwd_sm90_shares import plan


@pytest.mark.parametrize("captured", [False, True])
def test_tables_stay_for_graphs_that_captured_them(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph may be replayed when the plan is gone; of one that none has captured, nothing
    stays."""
    monkeypatch.setattr(cuda, "_captured", [])
    monkeypatch.setattr(cuda, "is_capturing", lambda stream: captured and stream == 7)
    its, table = plan(), np.zeros(3)
    its._tables.append(table)
    there = weakref.ref(table)
    its._enqueue([], 0)
    its._enqueue([], 7)
    del its, table
    assert (there() is not None) == captured
