"""Calls that were made before: one look-up, by what tensors look like and what the options are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np

from dlattn.opaque import opaque
from dlattn.runtime.framework import Look
from dlattn.runtime.gradients import warn_of_gradients
from dlattn.runtime.tensors import has_shape, lookalikes, signatures

Prepared = TypeVar("Prepared")

#: Every cache, for :func:`forget_calls`.
_caches: WeakSet[CallCache[Any]] = WeakSet()


#: Calls of a kind that a quick test may not know before there is another one.
_MOST_PATIENCE = 64


class _Kept(Generic[Prepared]):
    """What is kept of a kind of calls.

    Attributes:
        look: a quick test for tensors of such a call, if there is one. It sees what does not matter
            here, such as grad mode, or one tensor in two places.
    """

    __slots__ = ("_patience", "_unknown", "look", "prepared")

    def __init__(self, prepared: Prepared, look: Look | None) -> None:
        self.prepared = prepared
        self.look = look
        self._unknown, self._patience = 0, 1

    def look_at(self, tensors: Sequence[Any]) -> None:
        """Makes a test that knows these, of which this one does not: after the first such call, and
        then after ever more, as it takes as long as some calls do."""
        self._unknown += 1
        if self._unknown >= self._patience:
            self.look = lookalikes(tensors) or self.look
            self._unknown, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)


@opaque
class CallCache(Generic[Prepared]):
    """The most recently used kinds of one function's calls.

    Args:
        prepare: of the tensors, and then a tuple of the options, of a call that looks like none
            before.
        most: how many are kept.
        drops: positions of tensors that get no gradient from a call, of which the user is to know.
    """

    def __init__(
        self, prepare: Callable[..., Prepared], most: int = 512, drops: Sequence[int] = ()
    ) -> None:
        self._prepare = prepare
        self._drops = drops
        self._most = most
        #: What tells options apart, and how many tensors there are, of which a quick test would see
        #: some: 1, 1.0 and True are equal, but not all of them are right. More are kept than calls
        #: are, so that those of no call that is kept are forgotten first.
        self._key = lru_cache(maxsize=2 * most, typed=True)(_key)
        self._calls: OrderedDict[Any, _Kept[Prepared]] = OrderedDict()
        #: By what stands for options, what was found last, if there is a quick test for it.
        self._latest: dict[Any, tuple[Look, Prepared]] = {}
        self._lock = Lock()
        _caches.add(self)

    def latest(
        self, tensors: Sequence[Any], options: tuple[Any, ...]
    ) -> tuple[Prepared, list[int]] | None:
        """As :meth:`find`, if the last call with such options had tensors like these, and there is
        a quick test for it.

        Raises:
            TypeError: of such options, nothing is kept.
        """
        try:
            said = self._key(len(tensors), *options)
        except ValueError as error:  # a memoryview's
            raise TypeError("an option cannot be hashed") from error
        latest = self._latest.get(said)
        if latest is None:
            return None
        look, prepared = latest
        addresses = look(*tensors)
        return None if addresses is None else (prepared, addresses)

    def find(self, tensors: Sequence[Any], options: tuple[Any, ...]) -> tuple[Prepared, list[int]]:
        """What was prepared for tensors like these, and their addresses.

        Args:
            tensors: in the order of ``prepare``'s arguments; ``None`` for what is left out, unless
                nothing follows.
            options: numbers, booleans and words, and tuples of them, in which equal ones must be
                of one type. Of a tensor in the place of a number, which is told apart by what it is
                and not by what it holds, and of what cannot be hashed, nothing is kept.

        Raises:
            Whatever ``prepare`` does.
        """
        try:
            said = self._key(len(tensors), *options)
            # What `latest` does, whose call would take 0.1 us.
            latest = self._latest.get(said)
            if latest is not None:
                look, prepared = latest
                seen = look(*tensors)
                if seen is not None:
                    return prepared, seen
            key, addresses = signatures(tensors)
            kept = self._calls.get((said, key))
        except (TypeError, ValueError):  # no key of the options, or what is no tensor
            return self._prepare(*tensors, options), signatures(tensors)[1]
        if kept is None:
            kept = _Kept(self._prepare(*tensors, options), lookalikes(tensors))
            warn_of_gradients(tensors[at] for at in self._drops if at < len(tensors))
            self._keep((said, key), kept)
        elif kept.look is not None and kept.look(*tensors) is None:
            kept.look_at(tensors)
        if kept.look is not None:
            self._latest[said] = kept.look, kept.prepared
        if len(self._calls) > self._most // 2:
            self._touch((said, key))
        return kept.prepared, addresses

    def _touch(self, key: Any) -> None:
        with self._lock:
            if key in self._calls:
                self._calls.move_to_end(key)

    def _keep(self, key: Any, kept: _Kept[Prepared]) -> None:
        with self._lock:
            self._calls[key] = kept
            while len(self._calls) > self._most:
                self._calls.popitem(last=False)
                self._latest.clear()

    def __len__(self) -> int:
        return len(self._calls)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._calls.clear()
            self._latest.clear()
            self._key.cache_clear()


def _key(count: int, *options: Any) -> object:
    """What stands for options and a number of tensors, and equals nothing else."""
    if _may_change(options):
        raise TypeError("a tensor is among the options")
    return object()


def _may_change(option: Any) -> bool:
    """Whether an option, or one in a tuple of them, is a tensor, which has a hash of its own."""
    if isinstance(option, tuple):
        return any(map(_may_change, option))
    return has_shape(option) and not isinstance(option, np.generic)


def forget_calls() -> None:
    """Empties every cache, so that the next calls read the environment variables again."""
    for cache in list(_caches):
        cache.clear()
