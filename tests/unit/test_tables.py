"""Arrays on a device that kernels read beside the tensors of a call."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dlattn.runtime import tables

CAPTURED = 7


class Copy(SimpleNamespace):
    """On a device that is not there."""


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices, in turn."""
    waited: list[int] = []
    addresses = itertools.count(256, 256)

    def to_device(array: np.ndarray, index: int) -> Copy:
        return Copy(data=SimpleNamespace(ptr=next(addresses)), nbytes=array.nbytes)

    monkeypatch.setattr(tables, "_captured", [])
    monkeypatch.setattr(tables, "_dropped", [])
    monkeypatch.setattr(tables, "to_device", to_device)
    monkeypatch.setattr(tables, "is_capturing", lambda stream: stream == CAPTURED)
    monkeypatch.setattr(tables, "synchronize", waited.append)
    return waited


def dropped_table(nbytes: int, stream: int) -> weakref.ref[Copy]:
    """A table whose owner has gone, after kernels that read it were enqueued."""
    its = tables.Tables(1)
    its.place(np.zeros(nbytes, np.uint8))
    its.stay_if_captured(stream)
    return weakref.ref(its._arrays[0] if its._arrays else tables._captured[-1])


def test_addresses_are_those_of_copies(waited_for: list[int]) -> None:
    """Each table has its own, and while its owner is there no device is waited for."""
    its = tables.Tables(0)
    assert [its.place(np.zeros(3)), its.place(np.zeros(3))] == [256, 512] and not waited_for


def test_nothing_goes_while_kernels_may_read_it(waited_for: list[int]) -> None:
    """A table outlives its owner until its device has been waited for, which happens when a good
    deal of memory can be had by it, and another table is placed."""
    its = tables.Tables(0)
    small = dropped_table(100, stream=0)
    its.place(np.zeros(1))
    assert small() is not None and not waited_for
    large = dropped_table(tables.MOST_DROPPED_BYTES, stream=0)
    assert large() is not None and not waited_for
    its.place(np.zeros(1))
    assert small() is None and large() is None and waited_for == [1]


def test_what_graphs_captured_stays(waited_for: list[int]) -> None:
    """A CUDA graph may be replayed long after."""
    captured = dropped_table(2 * tables.MOST_DROPPED_BYTES, stream=CAPTURED)
    tables.Tables(0).place(np.zeros(1))
    assert captured() is not None and not waited_for
