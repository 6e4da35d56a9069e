"""Kernels with so few blocks that each has many items, though problems are small.

Otherwise a small call gives each block one item, if any. What blocks do from item to item, in which
order, and what the tilings for many items do, would be met in large calls alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dlattn.graph import placement
from dlattn.runtime.target import Target, cuda_target
from tests.cases import Case
from tests.drivers import Tensors, run_graph


@contextmanager
def few_multiprocessors(count: int) -> Iterator[None]:
    """Graphs that are built meanwhile are for a GPU of so few multiprocessors."""

    def few(index: int) -> Target:
        return replace(cuda_target(index), multiprocessors=count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "cuda_target", few)
        yield


def run_on_few(multiprocessors: int, case: Case, tensors: Tensors) -> None:
    """As :func:`tests.drivers.run_graph`, by plans for a GPU of so few multiprocessors."""
    with few_multiprocessors(multiprocessors):
        run_graph(case, tensors)
