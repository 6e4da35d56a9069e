"""Array libraries that tensors of a case come from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np


class Library:
    """The few operations that builders need, for NumPy, CuPy, or PyTorch on one device.

    Attributes:
        xp: the library's module.
        device: torch's device name; unused by the others.
    """

    def __init__(self, xp: Any = np, device: str = "cpu") -> None:
        self.xp = xp
        self.device = device
        self.is_torch = xp.__name__ == "torch"

    def dtype(self, name: str) -> Any:
        if self.is_torch:
            return getattr(self.xp, name)
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def full(self, size: int, value: int, dtype: str) -> Any:
        device = {"device": self.device} if self.is_torch else {}
        return self.xp.full((size,), value, dtype=self.dtype(dtype), **device)

    def strided(self, flat: Any, dim: Sequence[int], stride: Sequence[int], offset: int) -> Any:
        if self.is_torch:
            return flat.as_strided(dim, stride, offset)
        strides = [s * flat.itemsize for s in stride]
        return self.xp.lib.stride_tricks.as_strided(flat[offset:], dim, strides)

    def normal(self, dim: Sequence[int], seed: int) -> Any:
        """Standard normal values, float32; each library draws its own."""
        if self.is_torch:
            generator = self.xp.Generator(self.device).manual_seed(seed)
            return self.xp.randn(*dim, generator=generator, device=self.device)
        return self.xp.random.default_rng(seed).standard_normal(dim, dtype=np.float32)

    def sparse(self, dim: Sequence[int], seed: int) -> Any:
        """Small integers, most of them 0, float32."""
        return (1.5 * self.normal(dim, seed)).round() * (self.normal(dim, seed + 2**20) > 0.5)

    def values(self, numbers: Sequence[float], dtype: str) -> Any:
        if self.is_torch:
            return self.xp.tensor(numbers, dtype=self.dtype(dtype), device=self.device)
        return self.xp.asarray(numbers, dtype=self.dtype(dtype))

    def filled(self, dim: Sequence[int], value: float, like: Any) -> Any:
        if self.is_torch:
            return self.xp.full(tuple(dim), value, dtype=like.dtype, device=like.device)
        return self.xp.full(tuple(dim), value, like.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(self.dtype(dtype)) if self.is_torch else x.astype(self.dtype(dtype))

    def copy(self, x: Any) -> Any:
        return x.clone() if self.is_torch else x.copy()

    def host(self) -> Library:
        """The same library in host memory."""
        return Library(self.xp) if self.is_torch else Library(np)


@cache
def gpu_library() -> Library:
    """PyTorch on CUDA if it is there, else CuPy."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        return Library(torch, "cuda")
    import cupy

    return Library(cupy)
