"""Choosing the stream of a call, with stand-ins for the frameworks' streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlattn.errors import InvalidArgumentError
from dlattn.runtime import streams


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 9)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (7, 7),
        (SimpleNamespace(cuda_stream=5), 5),
        (SimpleNamespace(ptr=6), 6),
        (Protocol(), 9),
        (SimpleNamespace(__cuda_stream__=(0, 8)), 8),
    ],
    ids=["legacy", "handle", "torch", "cupy", "protocol", "protocol as a property"],
)
def test_stream_handle(stream: Any, handle: int) -> None:
    """Handles, the two frameworks' streams, and the protocol."""
    assert streams.stream_handle(stream) == handle


@pytest.mark.parametrize(
    "stream", [None, True, -1, 1.5, "stream", object()], ids=lambda s: type(s).__name__
)
def test_stream_handle_refuses(stream: Any) -> None:
    """The sentence says what a stream looks like."""
    with pytest.raises(InvalidArgumentError, match="Expected a CUDA stream"):
        streams.stream_handle(stream)


def test_torch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One torch tensor among the objects, and torch's stream of the device is taken."""
    torch = pytest.importorskip("torch")
    raw = {2: 1234}.__getitem__
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    streams._torch_stream.cache_clear()
    assert streams.current_stream([3, np.zeros(1), torch.zeros(1)], 2) == 1234
    assert streams.current_stream_of(torch.zeros(1), 2)() == 1234
    streams._torch_stream.cache_clear()


def test_torch_without_the_private_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public call does as well."""
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=100 + index)
    )
    streams._torch_stream.cache_clear()
    assert streams.current_stream([torch.zeros(1)], 1) == 101
    streams._torch_stream.cache_clear()


def test_cupy_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch tensors, CuPy's current stream of the device."""
    cuda = pytest.importorskip("cupy.cuda")
    monkeypatch.setattr(cuda, "get_current_stream", lambda index: SimpleNamespace(ptr=200 + index))
    assert streams.current_stream([np.zeros(1), 4096], 3) == 203
    assert streams.current_stream_of(np.zeros(1), 3)() == 203
