"""The interface of contenders."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.cases import Case
from bench.reference import Tensors

if TYPE_CHECKING:
    import torch

    Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Prepared:
    """A pass, ready to run on the current stream.

    Attributes:
        call: enqueues it once; takes nothing.
        outputs: what a call returned, or wrote, as (B, S, H, D) tensors in the pass's order.
        note: what runs, where that is not plain from the name, e.g. the plan.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], Outputs]
    note: str = ""


class Peer(ABC):
    """One implementation of attention.

    Attributes:
        name: the ``impl`` column of the results.
        modules: what must be importable.
        takes_pages: the passes that it runs on paged keys and values.
        extras: those of a case that it runs.
    """

    name: str
    extras: tuple[str, ...] = ()
    takes_pages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("torch",)

    def supports(self, case: Case, direction: str) -> str | None:
        """``None``, or a sentence that says why this contender is left out."""
        for module in self.modules:
            if not has_module(module):
                return f"{self.name} needs the Python module {module}, which is not installed."
        if case.page is not None and direction not in self.takes_pages:
            return f"{self.name} takes no pages here in the {direction} pass."
        if case.extra and case.extra not in self.extras:
            return f"{self.name} is not asked for {case.extra} here."
        return self.refuses(case, direction)

    def refuses(self, case: Case, direction: str) -> str | None:
        """As :meth:`supports`, once the modules are known to be there."""
        return None

    @abstractmethod
    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        """Compiles, plans and allocates; may raise anything."""


def has_module(name: str) -> bool:
    """Whether a module could be imported, without importing it or its siblings."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
