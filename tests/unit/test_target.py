"""A device that cannot be reached says why, and what to install."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest

import dlattn
from dlattn.errors import DlattnError, InvalidArgumentError
from dlattn.runtime.target import cuda_device_count, cuda_target


def test_missing_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CuPy, a device tensor's error names the extra, and no module of the inside."""
    cuda_target.cache_clear()
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DlattnError, match=r'reached through CuPy.*pip install "\.\[cu12\]"'):
        cuda_target(0)


def test_tensors_of_others_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an unknown framework on a device, of which CuPy tells the ordinal, is refused with
    the same sentence; and an interface without memory with one of its own."""
    cuda_target.cache_clear()
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)

    class Numba:
        __cuda_array_interface__ = {
            "data": (4096, False), "typestr": "<f2", "shape": (1, 2, 3, 8), "version": 3,
        }  # fmt: skip

    class Empty:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    with pytest.raises(DlattnError, match="CUDA device 0 is reached through CuPy"):
        dlattn.attention(Numba(), Numba(), Numba())
    with pytest.raises(InvalidArgumentError, match="q: Its array interface has no address"):
        dlattn.attention(Empty(), Empty(), Empty())


def test_device_that_cupy_cannot_use_says_why() -> None:
    """CuPy's own reason, such as a driver that is too old for it, is part of the sentence."""
    pytest.importorskip("cupy")
    with pytest.raises(DlattnError, match=r"CuPy cannot use CUDA device 99: cudaError"):
        cuda_target(99)
    if cuda_device_count() == 0:
        with pytest.raises(DlattnError, match="CuPy cannot use CUDA device 0: cudaError"):
            cuda_target(0)
