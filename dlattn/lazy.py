"""Packages whose names are imported when they are first asked for (PEP 562).

What a program does not use costs it nothing. Python's import locks make that safe in threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: its name.
        modules: module -> the names that the package has from there, with spaces between them; a
            subpackage that is such a name itself has none.
    """
    homes = {
        name: module
        for module, names in modules.items()
        for name in names.split() or [module.rpartition(".")[2]]
    }

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = import_module(homes[name])
        if modules[homes[name]]:
            found = getattr(found, name)
        setattr(sys.modules[package], name, found)
        return found

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__, sorted(homes)
