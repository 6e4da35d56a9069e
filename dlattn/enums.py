"""A base for cuDNN-style enumerations.

Callers evaluate ``diagonal_alignment.TOP_LEFT.BOTTOM_RIGHT`` on a *member*, print members as
``diagonal_alignment.TOP_LEFT`` and read ``__name__`` on the class: Python's ``Enum`` refuses the
first on 3.11 and changes the second between versions, so both are pinned here.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class VocabularyEnum(Enum):
    """An ``Enum`` whose members reach their siblings and print as ``class.MEMBER``."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in type(self).__members__:
            return type(self).__members__[name]
        raise AttributeError(f"{type(self).__name__} has no member {name!r}")

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __repr__(self) -> str:
        return str(self)
