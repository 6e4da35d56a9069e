"""Paged memory of a case: which pages each sequence has, and its rows out of them.

Roles are k, v, dK and dV; a gradient lies in the same pages as what it is of.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from random import Random
from typing import Any

from tests.cases import Case

#: Pages of a container that no sequence has.
_SPARE = 3

#: Table entries past the lengths: far outside of every container, or of a page that is another's.
_GARBAGE = (2**31 - 1, -1, 0, -(2**31), 10**6)


def page_numbers(case: Case, role: str) -> list[list[int]]:
    """The pages that hold tokens of each sequence, in order; no two are the same."""
    page = case.page(role)
    assert page is not None
    counts = [-(-n // page) for n in case.lengths_kv()]
    total = sum(counts)
    drawn = iter(Random(f"{case.seed} {role[-1].lower()}").sample(range(total + _SPARE), total))
    return [[next(drawn) for _ in range(count)] for count in counts]


def in_memory(case: Case, role: str) -> tuple[int, int, int, int]:
    """The shape of a tensor as the user has it: of a container, where it is paged."""
    dim, page = case.dims()[role], case.page(role)
    if page is None:
        return dim
    return (sum(map(len, page_numbers(case, role))) + _SPARE, dim[1], page, dim[3])


def table(case: Case, role: str) -> list[list[int]]:
    """The table of k or v: rows of one length with garbage at their ends; just the pages, where
    tables are packed."""
    page, numbers = case.page(role), page_numbers(case, role)
    assert page is not None
    if case.packed_tables:
        return numbers
    width = -(-case.seq_kv // page) + case.seed % 2
    return [
        [*own, *(_GARBAGE[i % len(_GARBAGE)] for i in range(width - len(own)))] for own in numbers
    ]


def into_pages(case: Case, role: str, rows: Any, container: Any) -> None:
    """Copies rows (B, H, Skv, D) into their places in a container, as far as there are pages."""
    page = case.page(role)
    for own, numbers in zip(rows, page_numbers(case, role), strict=True):
        for i, number in enumerate(numbers):
            chunk = own[:, i * page : (i + 1) * page]
            container[number, :, : chunk.shape[1]] = chunk


def by_sequence(case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a case with k, v, dK and dV as (B, H, Skv, D), 0 where there are no pages."""
    return {role: _rows(case, role, x) if case.page(role) else x for role, x in arrays.items()}


def check_page_ends(case: Case, arrays: Mapping[str, Any]) -> None:
    """Fails unless gradients hold 0 in every row of a sequence's pages that is past its length."""
    for role in ("dK", "dV"):
        page = case.page(role)
        if page is None or role not in arrays:
            continue
        for numbers, length in zip(page_numbers(case, role), case.lengths_kv(), strict=True):
            if numbers:
                end = arrays[role][numbers[-1]][:, length - (len(numbers) - 1) * page :]
                assert bool((end == 0).all()), f"{role}: rows past a length are not 0; {case!r}"


def _rows(case: Case, role: str, container: Any) -> Any:
    dim, page = case.dims()[role], case.page(role)
    assert page is not None
    xp = sys.modules[type(container).__module__.partition(".")[0]]
    rows = xp.zeros_like(container[0, 0, 0, :1]).repeat(math.prod(dim)).reshape(dim)
    for own, numbers in zip(rows, page_numbers(case, role), strict=True):
        for i, number in enumerate(numbers):
            chunk = own[:, i * page : (i + 1) * page]
            chunk[...] = container[number, :, : chunk.shape[1]]
    return rows
