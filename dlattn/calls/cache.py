"""Calls that were made before: one look-up, by what tensors look like and what the options are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from dlattn.runtime.tensors import signatures

Prepared = TypeVar("Prepared")

#: Every cache, for :func:`forget_calls`.
_caches: WeakSet[CallCache[Any]] = WeakSet()


class CallCache(Generic[Prepared]):
    """The most recently used kinds of one function's calls.

    Args:
        prepare: of the tensors, and then the options, of a call that looks like none before.
        most: how many are kept.
    """

    def __init__(self, prepare: Callable[..., Prepared], most: int = 512) -> None:
        self._prepare = prepare
        self._most = most
        self._calls: OrderedDict[Any, Prepared] = OrderedDict()
        self._lock = Lock()
        _caches.add(self)

    def find(self, tensors: Sequence[Any], options: tuple[Any, ...]) -> tuple[Prepared, list[int]]:
        """What was prepared for tensors like these, and their addresses.

        Args:
            tensors: in the order of ``prepare``'s arguments; ``None`` for what is left out.
            options: numbers and booleans.

        Raises:
            Whatever ``prepare`` does.
        """
        try:
            key, addresses = signatures(tensors)
            found = self._calls.get((options, key))
        except (TypeError, ValueError):  # no tensor, or an option that is none
            self._prepare(*tensors, *options)
            raise
        if found is None:
            found = self._prepare(*tensors, *options)
            self._keep((options, key), found)
        elif len(self._calls) > self._most // 2:
            self._touch((options, key))
        return found, addresses

    def _touch(self, key: Any) -> None:
        with self._lock:
            if key in self._calls:
                self._calls.move_to_end(key)

    def _keep(self, key: Any, prepared: Prepared) -> None:
        with self._lock:
            self._calls[key] = prepared
            while len(self._calls) > self._most:
                self._calls.popitem(last=False)

    def __len__(self) -> int:
        return len(self._calls)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._calls.clear()


def forget_calls() -> None:
    """Empties every cache, so that the next calls read the environment variables again."""
    for cache in list(_caches):
        cache.clear()
