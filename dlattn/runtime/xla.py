"""How the memory of JAX's arrays is laid out, and where: what XLA says of it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from dlattn.errors import InvalidVariantPackError
from dlattn.runtime.framework import CPU, CUDA, Dims


@lru_cache(maxsize=4096)
def xla_strides(layout: Any, shape: Dims) -> Dims:
    """Strides in elements from XLA's layout, whose text lists dimensions minor to major."""
    order = re.fullmatch(r"\{([\d,]*)\}", str(layout))
    if order is None:
        raise InvalidVariantPackError(
            f"This JAX array has the XLA layout {layout}, which is not a strided tensor; pass a "
            "copy in the default layout"
        )
    strides = [0] * len(shape)
    step = 1
    for dimension in map(int, filter(None, order[1].split(","))):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


@lru_cache(maxsize=256)
def jax_device(sharding: Any) -> tuple[str, int]:
    """Where an array lies that is on one device."""
    (device,) = sharding.device_set
    if device.platform not in ("gpu", "cuda"):
        return (device.platform, 0)
    if sharding.memory_kind not in (None, "device"):  # pinned host memory
        return CPU
    return CUDA[device.local_hardware_id]
