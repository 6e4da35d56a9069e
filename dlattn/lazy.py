"""Packages whose names are imported when they are first asked for (PEP 562).

What a program does not use costs it nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any


def exports(
    package: str,
    modules: Mapping[str, str],
    one_at_a_time: bool = False,
    unlisted: Iterable[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: its name.
        modules: module -> the names that the package has from there, with spaces between them; a
            subpackage that is such a name itself has none.
        one_at_a_time: threads import one after the other. Python may take it for a deadlock that
            several import the same modules, and gives one of them a half of NumPy (CPython issues
            82276 and 91351). Not for a package whose names its own modules ask for while they are
            imported: a thread that imports one of these by itself would wait for the one whose turn
            it is, and that for it.
        unlisted: subpackages that are there for whoever names them, and not for whoever asks for
            all names, as ``import *`` and ``help`` do: those of libraries that may not be
            installed.
    """
    homes = {
        name: module
        for module, names in modules.items()
        for name in names.split() or [module.rpartition(".")[2]]
    }
    listed = sorted(homes)
    homes |= {name: f"{package}.{name}" for name in unlisted}
    turn = threading.RLock() if one_at_a_time else nullcontext()

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with turn:
            found = import_module(homes[name])
            if modules.get(homes[name]):
                found = getattr(found, name)
            setattr(sys.modules[package], name, found)
            return found

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *listed})

    return __getattr__, __dir__, listed
