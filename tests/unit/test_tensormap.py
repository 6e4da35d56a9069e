"""Where the address of a tensor map goes, by drivers that keep it in one place or another."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dlattn.dtypes import data_type
from dlattn.errors import DlattnError
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import Direction, Geometry, Problem, Scale, TensorSpec
from dlattn.runtime import tensormap
from dlattn.runtime.target import KNOWN

#: Byte of a map at which a driver keeps the address, and whether it notes it elsewhere, too.
PLACES = [(0, False), (8, False), (0, True)]


class Driver:
    def __init__(self, place: int, notes: bool) -> None:
        self.place, self.notes, self.replaced = place, notes, 0

    def cuTensorMapReplaceAddress(self, at: Any, address: Any) -> int:  # noqa: N802
        if address.value % 16:
            return 1
        self.replaced += 1
        ctypes.c_uint64.from_address(at.value + self.place).value = address.value
        if self.notes:
            ctypes.c_uint64.from_address(at.value + 64).value = address.value >> 8
        return 0


@pytest.fixture(params=PLACES)
def driver(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(*request.param)
    monkeypatch.setattr(tensormap, "driver", lambda: made)
    monkeypatch.setattr(tensormap, "encode", lambda *_: None)
    tensormap.begins_with_address.cache_clear()
    yield made
    tensormap.begins_with_address.cache_clear()


def test_an_address_is_where_the_driver_would_put_it(driver: Driver) -> None:
    """By assignment where the first word is all that it changes, by its own call elsewhere."""
    ours, its = (ctypes.create_string_buffer(128) for _ in range(2))
    slot = tensormap.address_slot(ctypes.addressof(ours))
    for address in (0x7F52_C3E0_0000, 0x10, 0x7FFF_FFFF_FFF0):
        asked = driver.replaced
        slot.value = address
        by_driver = driver.replaced - asked
        tensormap.ReplacedAddress(ctypes.addressof(its)).value = address
        assert ours.raw == its.raw
        assert by_driver == (driver.place != 0 or driver.notes)


def test_an_address_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is in the message."""
    monkeypatch.setattr(
        tensormap, "driver", lambda: SimpleNamespace(cuTensorMapReplaceAddress=lambda *_: 1)
    )
    with pytest.raises(DlattnError, match="cuTensorMapReplaceAddress failed with CUresult 1"):
        tensormap.ReplacedAddress(64).value = 8


@pytest.mark.parametrize(
    "head_dim, head_stride, promotion",
    [
        (64, 64, tensormap.L2_PROMOTION_256B),
        (192, 192, tensormap.L2_PROMOTION_256B),
        (96, 96, tensormap.L2_PROMOTION_128B),
        (136, 136, tensormap.L2_PROMOTION_128B),
        (128, 136, tensormap.L2_PROMOTION_128B),  # a part of wider heads
    ],
)
def test_rows_that_are_no_whole_lines_bring_less(
    head_dim: int, head_stride: int, promotion: int
) -> None:
    """What a copy brings beyond its own bytes is other heads', unless rows are whole lines."""
    dim, stride = (2, 8, 100, head_dim), (800 * head_stride, head_stride, 8 * head_stride, 1)
    specs = {role: TensorSpec(role, dim, stride, data_type.HALF) for role in "qkvo"}
    problem = Problem(Direction.FORWARD, data_type.HALF, head_dim, head_dim, (Scale(True),))
    plan = FwdSm90(problem, Geometry(specs, 0.1), KNOWN["sm_90a"])
    assert plan.l2_promotion(specs["k"]) == promotion
