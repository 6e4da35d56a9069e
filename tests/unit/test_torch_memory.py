"""Memory for results in torch, by what code of ``torch.compile`` allocates by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlattn.dtypes import data_type
from dlattn.runtime import torch_tensors
from dlattn.runtime.tensors import allocator, view

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("made", [None, lambda shape, stride, dtype: np.empty(shape)])
def test_memory_without_the_compilers_help(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """Where torch.compile's way to memory is missing, or is another than it was."""
    torch_tensors._quick_empty.cache_clear()
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", made)
    try:
        buffer = allocator(torch.zeros(1), (2, 3), (1, 2), data_type.HALF)()
    finally:
        torch_tensors._quick_empty.cache_clear()
    assert view(buffer)[1:4] == ((2, 3), (1, 2), data_type.HALF)


def test_memory_is_on_the_device_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several devices, another than the current one is asked for by name."""
    own, asked = torch.Tensor.new_empty_strided, []
    like = SimpleNamespace(device=torch.device("cpu"), is_cpu=False, get_device=lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(
        torch.Tensor, "new_empty_strided", lambda *given: asked.append(1) or own(*given)
    )
    make = torch_tensors.Torch().allocator(like, (2, 3), (1, 2), data_type.HALF)
    for current in (0, 1):
        asked.clear()
        assert view(make())[1:4] == ((2, 3), (1, 2), data_type.HALF)
        assert len(asked) == 1 - current
