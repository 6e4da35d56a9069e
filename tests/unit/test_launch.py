"""Launch configurations, byte by byte, against a stand-in for the driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dlattn.errors import DlattnError
from dlattn.runtime import launch
from dlattn.runtime.launch import Launch, LaunchAttribute, LaunchConfig, device_guard, guards_of

PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


class Driver:
    """A ``libcuda`` that notes what it is asked to launch, read at the documented offsets."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.answers: list[int] = []
        self.cuLaunchKernelEx = PROTOTYPE(self.launch)

    def launch(self, config: int, function: int, params: Any, extra: int | None) -> int:
        fields = struct.unpack("=3I3II4xQQI", ctypes.string_at(config, 52))
        attributes = [
            struct.unpack("=i4xi60x", ctypes.string_at(fields[8] + 72 * index, 72))
            for index in range(fields[9])
        ]
        self.launches.append(
            SimpleNamespace(
                grid=fields[0:3],
                block=fields[3:6],
                shared=fields[6],
                stream=fields[7],
                attributes=attributes,
                function=function,
                params=params[0],
                extra=extra,
            )
        )
        return self.answers.pop(0) if self.answers else 0

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802 - the driver's name
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE"}.get(status)
        return 0


class Runtime:
    """CuPy's runtime bindings, as far as devices go."""

    def __init__(self) -> None:
        self.device = 0
        self.calls: list[int] = []

    def getDevice(self) -> int:  # noqa: N802
        return self.device

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.calls.append(index)
        self.device = index


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stub = Driver()
    monkeypatch.setattr(launch, "driver", lambda: stub)
    return stub


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    stub = Runtime()
    monkeypatch.setattr(launch, "_runtime", lambda: stub)
    yield stub


def test_layout() -> None:
    """The driver's structs have these sizes and offsets on every 64-bit platform."""
    assert ctypes.sizeof(LaunchConfig) == 56
    assert LaunchConfig.shared.offset == 24
    assert LaunchConfig.stream.offset == 32
    assert LaunchConfig.attributes.offset == 40
    assert LaunchConfig.attribute_count.offset == 48
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchAttribute.value.offset == 8


def test_launch(driver: Driver) -> None:
    """Everything reaches the driver, and the stream is the call's."""
    params = ctypes.create_string_buffer(64)
    kernel = Launch(0x7F00_1234_5678, (3, 4, 5), 384, 200_000, ctypes.addressof(params))
    kernel(0)
    kernel(0x7F00_0000_0010)
    first, second = driver.launches
    assert first.grid == (3, 4, 5)
    assert first.block == (384, 1, 1)
    assert first.shared == 200_000
    assert first.attributes == []
    assert first.function == 0x7F00_1234_5678
    assert first.params == ctypes.addressof(params)
    assert first.extra is None
    assert [first.stream, second.stream] == [0, 0x7F00_0000_0010]


def test_programmatic(driver: Driver) -> None:
    """Programmatic dependent launch is attribute 6, set to 1."""
    Launch(1, (1, 1, 1), 32, 0, 0, programmatic=True)(0)
    assert driver.launches[0].attributes == [(6, 1)]


def test_cluster(driver: Driver) -> None:
    """Clusters are attribute 4, blocks in x, y and z; both attributes may stand together."""
    clustered = Launch(1, (8, 1, 1), 32, 0, 0, cluster=4, programmatic=True)
    clustered(0)
    assert driver.launches[0].attributes == [(4, 4), (6, 1)]
    assert clustered.cluster is not None and [*clustered.cluster.value[:3]] == [4, 1, 1]


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_grid(driver: Driver, grid: tuple[int, int, int]) -> None:
    """The driver refuses an empty grid; there is nothing to do."""
    Launch(1, grid, 32, 0, 0)(0)
    assert driver.launches == []


def test_failure(driver: Driver) -> None:
    """The error has the driver's name for it and what was asked."""
    driver.answers = [1]
    with pytest.raises(
        DlattnError, match=r"Launching fwd failed with CUDA_ERROR_INVALID_VALUE .*\(2, 1, 1\), 64 "
    ):
        Launch(1, (2, 1, 1), 64, 0, 0, name="fwd")(0)
    driver.answers = [12345]
    with pytest.raises(DlattnError, match="CUresult 12345"):
        Launch(1, (2, 1, 1), 64, 0, 0)(0)


def test_first_call_of_a_thread(driver: Driver, runtime: Runtime) -> None:
    """A thread without a context gets that of its device, and the launch is repeated."""
    runtime.device = 1
    driver.answers = [201]
    Launch(1, (1, 1, 1), 32, 0, 0)(0)
    assert len(driver.launches) == 2
    assert runtime.calls == [1]


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, the sentence says what needs it."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    launch.driver.cache_clear()
    with pytest.raises(DlattnError, match="NVIDIA driver.*could not be loaded"):
        Launch(1, (1, 1, 1), 32, 0, 0)(0)


def test_device_guard(runtime: Runtime) -> None:
    """The device is switched and restored, also after an error, and left alone when it is right."""
    with device_guard(0):
        pass
    assert runtime.calls == []
    with pytest.raises(ZeroDivisionError), device_guard(1):
        assert runtime.device == 1
        raise ZeroDivisionError
    assert runtime.calls == [1, 0]


def test_guards_of_a_device() -> None:
    """Where there is no other, none is made."""
    assert guards_of(0, 1) is nullcontext
    made = guards_of(1, 2)
    assert made is not nullcontext and made() is not made()
