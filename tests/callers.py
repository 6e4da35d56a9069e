"""Frameworks that functions are called from: arrays of NumPy turned into theirs, and back."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

_BF16 = np.dtype(ml_dtypes.bfloat16)


class Caller:
    """NumPy, CuPy, JAX or PyTorch, with a device of torch's.

    Attributes:
        can_give: results may go to memory of the caller's.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.device = name, device
        self._xp = __import__(name)
        self.can_give = name != "jax"

    def tensor(self, array: Any) -> Any:
        """A copy in the framework."""
        if self.name == "torch":
            # torch reads no bfloat16 of NumPy's.
            plain = array.view(np.int16) if array.dtype == _BF16 else array
            made = self._xp.from_numpy(np.array(plain)).to(self.device)
            return made.view(self._xp.bfloat16) if array.dtype == _BF16 else made
        if self.name == "jax":
            return self._xp.numpy.asarray(array)
        return self._xp.array(array)

    def host(self, tensor: Any) -> Any:
        """A copy as a NumPy array."""
        if self.name == "torch":
            tensor = tensor.detach().cpu()
            if tensor.dtype is self._xp.bfloat16:
                return tensor.contiguous().view(self._xp.int16).numpy().view(_BF16).copy()
            return tensor.numpy().copy()
        if self.name == "cupy":
            return tensor.get()
        return np.array(tensor)


def gpu_callers() -> list[Caller]:
    """PyTorch on CUDA if it is there, and CuPy."""
    callers = [Caller("cupy")]
    if "torch" in sys.modules or _has_torch():
        import torch

        if torch.cuda.is_available():
            callers.insert(0, Caller("torch", "cuda"))
    return callers


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True
