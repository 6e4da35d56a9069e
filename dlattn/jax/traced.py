"""Calls while JAX traces: shapes tell the plan, and a callback runs it on XLA's buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

from dlattn.calls.arguments import SAID, Argument
from dlattn.calls.call import built, cu_seqlens_check
from dlattn.dtypes import to_numpy
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.one_call import backward, forward
from dlattn.one_call.arguments import Options, Wanted
from dlattn.plans.base import Plan
from dlattn.runtime.launch import Clear
from dlattn.runtime.protocols import ELEMENT_TYPES, TensorView, compact_strides
from dlattn.runtime.target import CPU, cuda_target
from dlattn.runtime.tensors import view

#: Of each direction: the names of its tensors, and what a call comes down to.
_DIRECTIONS: dict[str, tuple[Sequence[str], Callable[..., Wanted]]] = {
    "forward": (forward.NAMES, forward.wanted),
    "backward": (backward.NAMES, backward.wanted),
}

#: Name, shape and type of each array.
Looks = tuple[tuple[str, tuple[int, ...], Any], ...]

#: XLA's buffers begin at multiples of more than that.
_ALIGNED = 16


def call(
    direction: str, arrays: Mapping[str, Any], options: Options, asked: tuple[bool, ...]
) -> list[Any]:
    """The results of a call, in order, on the platform for which JAX lowers it.

    Args:
        arrays: by the names of the direction's tensors.
        asked: what follows the options in its ``wanted``.
    """
    names, _ = _DIRECTIONS[direction]
    values = [arrays[name] for name in names if name in arrays]
    looks = looks_of(names, arrays)
    on = {
        platform: partial(_run, traced_call(direction, looks, options, asked, platform))
        for platform in ("cpu", "cuda")[: 1 + (jax.default_backend() == "gpu")]
    }
    one, *others = on.values()
    found = jax.lax.platform_dependent(*values, **on) if others else one(*values)
    return varying(found, values)


def looks_of(names: Sequence[str], arrays: Mapping[str, Any]) -> Looks:
    """What chooses the plan of a call, besides its options."""
    given = [(name, arrays[name]) for name in names if name in arrays]
    return tuple((name, x.shape, jnp.dtype(x.dtype)) for name, x in given)


def varying(arrays: Iterable[Any], like: Iterable[Any]) -> list[Any]:
    """Arrays that are different in each shard of ``shard_map`` along every axis of its mesh along
    which one of ``like`` is: what a kernel makes of that is, too, of which JAX knows nothing. The
    gradient of one that was the same everywhere is a sum over the shards."""
    axes = frozenset().union(*map(_axes, like))
    return [
        x if axes <= _axes(x) else jax.lax.pcast(x, tuple(axes - _axes(x)), to="varying")
        for x in arrays
    ]


def _axes(x: Any) -> frozenset[Any]:
    """None outside of ``shard_map``, where that does not check them, and in JAX before 0.10."""
    known = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if known is None else known.varying


class _Traced:
    """What a call comes down to on one platform, before there is memory.

    Attributes:
        results: shapes and types of what it writes, the workspace last, if there is one.
    """

    def __init__(self, found: Wanted, names: Sequence[str], there: list[str], cpu: bool) -> None:
        self.found = found
        self._cpu = cpu
        self._there = [names.index(name) for name in there]
        self._inputs = {role: self._there.index(at) for role, at in found.positions.items()}
        self.results = [
            jax.ShapeDtypeStruct(out.shape, to_numpy(out.dtype)) for out in found.outputs
        ]
        self._plans: dict[int, Plan] = {}
        self._check: Callable[[Mapping[str, int]], None] | None = None
        if not found.idle and (size := self._plan(0).workspace_size):
            self.results.append(jax.ShapeDtypeStruct((size,), jnp.uint8))

    def _plan(self, index: int) -> Plan:
        """Of one device; those of a process are alike."""
        if index not in self._plans:
            target = CPU if self._cpu else cuda_target(index)
            self._plans[index] = built(self.found.request, target)
            if self._cpu:
                self._check = cu_seqlens_check(self._plans[index].geometry)
        return self._plans[index]

    def filled(self, values: Sequence[Any]) -> list[Any]:
        """Results that no kernel writes: one number, or one of each head of (..., H, S), and what
        is more to say of them."""

        def read(argument: Argument) -> Any:
            return values[self._there.index(argument.position)]

        found = []
        for out, like in zip(self.found.outputs, self.results, strict=True):
            fill = out.fill
            if isinstance(fill, Argument):
                fill = read(fill).reshape(-1, 1)
            made = jnp.broadcast_to(jnp.asarray(fill, like.dtype), like.shape)
            if out.finish is not None:
                row = jnp.arange(out.finish.rows, dtype=jnp.int32)
                made = out.finish(made, row, read, _selected).astype(like.dtype)
            found.append(made)
        return found

    def __call__(self, context: Any, results: Sequence[Any], *given: Any) -> None:
        """Runs the plan on XLA's buffers, in XLA's stream."""
        seen = [view(buffer) for buffer in (*given, *results)]
        stream = 0 if self._cpu else context.stream
        pointers = {role: seen[at].ptr for role, at in self._inputs.items()}
        written = [it.ptr for it in seen[len(given) :]]
        for out, address, like in zip(self.found.outputs, written, self.results, strict=False):
            pointers[str(out.role)] = address
            if out.fill is not None:  # with zeros: other numbers are of calls without a request
                _clear(address, like.size * like.dtype.itemsize, None if self._cpu else stream)
        if self._check is not None:
            self._check(pointers)
        workspace = written[-1] if len(written) > len(self.found.outputs) else 0
        self._plan(seen[0].device[1]).execute(pointers, workspace, stream)


def _selected(x: Any, condition: Any, other: float) -> Any:
    """See :data:`dlattn.calls.keyless.Select`."""
    return jnp.where(jnp.expand_dims(condition, tuple(range(condition.ndim, x.ndim))), x, other)


def _clear(address: int, nbytes: int, stream: int | None) -> None:
    if stream is None:
        ctypes.memset(address, 0, nbytes)
    else:
        Clear(nbytes, address)(stream)


@lru_cache(maxsize=1024)
def traced_call(
    direction: str,
    looks: Looks,
    options: Options,
    asked: tuple[bool, ...],
    platform: str,
) -> _Traced:
    names, wanted = _DIRECTIONS[direction]
    there = {}
    for name, shape, dtype in looks:
        said = SAID[options.words].get(name, name)
        seen = _imagined(said, shape, dtype, platform)
        there[name] = Argument(said, names.index(name), "jax", seen)
    found = wanted(there, (None,) * len(names), options, *asked)
    if options.layout == "thd" and not found.idle:
        # Where nothing is written, there may be anything, which a pure function does not return.
        first, *others = found.outputs
        found = found._replace(outputs=[replace(first, fill=0.0), *others])
    return _Traced(found, names, list(there), platform == "cpu")


def _imagined(name: str, shape: tuple[int, ...], dtype: Any, platform: str) -> TensorView:
    """A buffer as XLA will make it.

    Raises:
        InvalidArgumentError: of a type that dlattn has no use for.
    """
    try:
        element = ELEMENT_TYPES[dtype]
    except InvalidVariantPackError as error:
        raise InvalidArgumentError(f"{name}: {error}") from error
    return TensorView(_ALIGNED, shape, compact_strides(shape), element, (platform, 0), False)


def _run(traced: _Traced, *values: Any) -> list[Any]:
    outputs = traced.found.outputs
    if traced.found.idle:
        return traced.filled(values)
    run = buffer_callback(traced, traced.results, command_buffer_compatible=True)
    return list(run(*values))[: len(outputs)]
