"""How ``jax.vmap`` batches attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dlattn.jax.traced import call
from dlattn.one_call.arguments import Options

#: What one batch of both can be made of, with what all entries share; everything else is taken
#: entry by entry.
_ROWS = ("q", "k", "v", "dout", "out")
_BATCH_FIRST = ("lse", "dlse", "lengths of q", "lengths of k and v")


def batched(
    direction: str, arrays: Mapping[str, Any], options: Options, asked: tuple[bool, ...]
) -> list[Any]:
    """:func:`dlattn.jax.traced.call` that ``vmap`` can batch."""

    run = jax.custom_batching.custom_vmap(lambda arrays: call(direction, arrays, options, asked))

    def rule(size: int, batched_in: Any, arrays: Mapping[str, Any]) -> tuple[list[Any], list[bool]]:
        (there,) = batched_in if isinstance(batched_in, (tuple, list)) else (batched_in,)
        asked_for = asked[:2] if direction == "backward" else (False, False)
        common = {
            name
            for name, x in arrays.items()
            if _is_common(name, x.shape, dict(zip(("bias", "sinks"), asked_for, strict=True)))
            and not there[name]
        }
        if options.layout == "thd" or not set(arrays) <= {*_ROWS, *_BATCH_FIRST, *common}:
            found = _one_by_one(direction, size, there, arrays, options, asked)
            return found, [True] * len(found)
        axis = options.layout.index("b")
        merged = {
            name: x
            if name in common
            else _merged(x, there[name], axis if name in _ROWS else 0, size)
            for name, x in arrays.items()
        }
        found = batched(direction, merged, options, asked)
        axes = (axis,) * 3 if direction == "backward" else (axis, 0)
        entries = arrays["q"].shape[axis + there["q"]]
        parted = [_parted(x, at, size, entries) for x, at in zip(found, axes, strict=False)]
        return parted, [True] * len(parted)

    run.def_vmap(rule)
    found: list[Any] = run(dict(arrays))
    return found


def _is_common(name: str, shape: tuple[int, ...], asked: Mapping[str, bool]) -> bool:
    """Whether an array is of every entry of a batch alike, and no gradient of it is asked for.

    Args:
        asked: whose gradients are.
    """
    most = {"bias": 3, "sinks": 1, "alibi_slopes": 1}
    no_batch = name in most and (len(shape) <= most[name] or (name == "bias" and shape[0] == 1))
    return no_batch and not asked.get(name, False)


def _merged(x: Any, is_batched: bool, axis: int, size: int) -> Any:
    """With the entries of vmap in front of those of an axis, as one axis."""
    if not is_batched:
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], size * x.shape[axis + 1], *x.shape[axis + 2 :])


def _parted(x: Any, axis: int, size: int, entries: int) -> Any:
    """The other way round, with the entries of vmap first."""
    x = x.reshape(*x.shape[:axis], size, entries, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _one_by_one(
    direction: str,
    size: int,
    there: Mapping[str, bool],
    arrays: Mapping[str, Any],
    options: Options,
    asked: tuple[bool, ...],
) -> list[Any]:
    own = {name: x for name, x in arrays.items() if there[name]}
    shared = {name: x for name, x in arrays.items() if not there[name]}
    found: list[Any] = jax.lax.map(
        lambda each: batched(direction, {**shared, **each}, options, asked), own
    )
    return found
