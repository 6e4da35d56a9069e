"""Handles: what they carry, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import dlattn as cudnn
from dlattn.graph.handle import explicit_stream, pinned_target
from dlattn.runtime.target import CPU


@pytest.fixture
def handle():
    handle = cudnn.create_handle()
    yield handle
    cudnn.destroy_handle(handle)


def test_handles_are_distinct_numbers(handle):
    """A handle is an opaque int, different from every other one alive."""
    other = cudnn.create_handle()
    assert isinstance(handle, int) and handle != other
    cudnn.destroy_handle(other)


def test_a_stream_is_explicit_once_set(handle):
    """Stream 0 set by the user is a choice; an untouched handle makes none."""
    assert cudnn.get_stream(handle) == 0 and explicit_stream(handle) is None
    cudnn.set_stream(handle=handle, stream=0)
    assert explicit_stream(handle) == 0
    cudnn.set_stream(handle=handle, stream=None)
    assert explicit_stream(handle) is None


@pytest.mark.parametrize(
    "stream",
    [
        1234,
        SimpleNamespace(cuda_stream=1234),
        SimpleNamespace(ptr=1234),
        SimpleNamespace(__cuda_stream__=lambda: (0, 1234)),
    ],
)
def test_streams_of_frameworks(handle, stream):
    """A number, and torch's, CuPy's and the protocol's stream objects name the same stream."""
    cudnn.set_stream(handle=handle, stream=stream)
    assert cudnn.get_stream(handle) == 1234


def test_what_is_no_stream(handle):
    """Anything else is refused as a RuntimeError."""
    with pytest.raises(RuntimeError, match="stream"):
        cudnn.set_stream(handle=handle, stream="default")


@pytest.mark.parametrize(
    "use",
    [
        cudnn.destroy_handle,
        cudnn.get_stream,
        lambda handle: cudnn.set_stream(handle=handle, stream=0),
        lambda handle: cudnn.pygraph(handle=handle),
    ],
)
def test_destroyed_handles_are_refused(use):
    """A destroyed handle is an error at its next use, not later."""
    handle = cudnn.create_handle()
    cudnn.destroy_handle(handle)
    with pytest.raises(RuntimeError, match="unknown or destroyed"):
        use(handle)


def test_devices():
    """``device="cpu"`` pins the CPU, no device pins nothing, and nonsense is refused."""
    assert pinned_target(cudnn.create_handle(device="cpu")) == CPU
    assert pinned_target(cudnn.create_handle()) is None
    for nonsense in ("tpu", "cuda:x", "cpu:1"):
        with pytest.raises(RuntimeError, match="device must be"):
            cudnn.create_handle(device=nonsense)
