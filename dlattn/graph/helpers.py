"""Module-level helpers of the graph API: a context manager, a builder decorator, a memoiser."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from dlattn.dtypes import data_type
from dlattn.graph.checks import integer, member, members
from dlattn.graph.kernel_cache import KernelCache
from dlattn.graph.pygraph import pygraph
from dlattn.graph.tensor import tensor
from dlattn.graph.vocabulary import heur_mode

Result = TypeVar("Result")


@contextmanager
def graph(
    handle: int | None = None,
    name: str = "test_graph",
    io_data_type: Any = data_type.HALF,
    intermediate_data_type: Any = data_type.FLOAT,
    compute_data_type: Any = data_type.FLOAT,
) -> Iterator[tuple[pygraph, list[int]]]:
    """Yield a new graph and an empty list for its uids (cuDNN frontend 1.23 ``graph``).

    Nothing is built at the end of the block; see :func:`jit`, or call ``build()``.
    """
    made = pygraph(
        name=name,
        io_data_type=io_data_type,
        intermediate_data_type=intermediate_data_type,
        compute_data_type=compute_data_type,
        handle=handle,
    )
    yield made, []


def jit(heur_modes: heur_mode | Iterable[heur_mode] = heur_mode.A) -> Callable[..., Any]:
    """Decorate a function that returns ``(graph, tensors)``: build the graph if that is not done.

    The decorated function returns ``(graph, [uid of each tensor])`` (cuDNN frontend 1.23 ``jit``).

    Raises:
        TypeError: a heuristic is no ``heur_mode``, or the function is none, or returns no such
            pair.
    """
    one = isinstance(heur_modes, heur_mode)
    modes = members("heur_modes", [heur_modes] if one else heur_modes, heur_mode)

    def decorate(
        declare: Callable[..., tuple[pygraph, Iterable[tensor]]],
    ) -> Callable[..., tuple[pygraph, list[int]]]:
        _check_callable("jit: the function", declare)

        @wraps(declare)
        def built(*args: Any, **kwargs: Any) -> tuple[pygraph, list[int]]:
            returned = declare(*args, **kwargs)
            if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
                raise TypeError(
                    f"{declare!r:.100} must return (graph, tensors), as jit decorated it; got "
                    f"{returned!r:.100}."
                )
            declared, tensors = member("graph", returned[0], pygraph), returned[1]
            tensors = members("tensors", tensors, tensor)
            if declared.get_execution_plan_count() <= 0:
                declared.build(modes)
            return declared, [t.get_uid() for t in tensors]

        return built

    return decorate


def graph_cache(
    key_fn: Callable[..., Hashable], maxsize: int = 256
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Memoise a function by ``key_fn`` of its arguments; the oldest entry leaves first.

    The key must hold all that the graph depends on: shapes, strides, dtypes and device.

    Raises:
        TypeError: ``key_fn`` cannot be called, or ``maxsize`` is no integer.
    """
    _check_callable("key_fn", key_fn)
    maxsize = integer("maxsize", maxsize)

    def decorate(make: Callable[..., Result]) -> Callable[..., Result]:
        _check_callable("graph_cache: the function", make)
        made: dict[Hashable, Result] = {}

        @wraps(make)
        def cached(*args: Any, **kwargs: Any) -> Result:
            key = key_fn(*args, **kwargs)
            if key in made:
                return made[key]
            result = make(*args, **kwargs)
            if made and len(made) >= maxsize:
                made.pop(next(iter(made)), None)
            if maxsize > 0:
                made[key] = result
            return result

        return cached

    return decorate


def _check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be callable; got {value!r:.100}.")


def backend_version() -> int:
    """The cuDNN backend whose features callers may expect, as ``major*10000+minor*100+patch``."""
    return 92300


def backend_version_string() -> str:
    """:func:`backend_version` as ``"major.minor.patch"``."""
    return "9.23.0"


def get_last_error_string() -> str:
    """Empty: every failure is raised as an exception that says all."""
    return ""


def create_kernel_cache() -> KernelCache:
    """A new kernel cache, for ``pygraph(kernel_cache=...)``; see :class:`KernelCache`."""
    return KernelCache()
