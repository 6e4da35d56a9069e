"""Arrays on a device that kernels read beside the tensors of a call."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dlattn.runtime import tables


@pytest.mark.parametrize("captured", [False, True])
def test_what_graphs_captured_stays(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph may be replayed when the plan is gone that had a table; of one that none has
    captured, nothing stays."""
    copies: list[SimpleNamespace] = []

    def to_device(array: np.ndarray, index: int) -> SimpleNamespace:
        copies.append(SimpleNamespace(data=SimpleNamespace(ptr=256 + index)))
        return copies[-1]

    monkeypatch.setattr(tables, "_captured", [])
    monkeypatch.setattr(tables, "to_device", to_device)
    monkeypatch.setattr(tables, "is_capturing", lambda stream: captured and stream == 7)
    its = tables.Tables(1)
    assert its.place(np.zeros(3)) == 257
    there = weakref.ref(copies.pop())
    its.stay_if_captured(0)
    its.stay_if_captured(7)
    del its
    assert (there() is not None) == captured
