"""Runs a notebook's code cells in order, as one program: ``python -m notebooks.plain FILE``.

Tracebacks name the cell and show its lines, as those of Jupyter do.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType

from notebooks.run import code_cells


def main(path: Path) -> None:
    # The notebook is the main module, so that dataclasses, pickles and the like find its names.
    notebook = sys.modules["__main__"] = ModuleType("__main__")
    for number, source in enumerate(code_cells(path), start=1):
        where = f"<{path.name}, code cell {number}>"
        linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
        try:
            exec(compile(source, where, "exec", dont_inherit=True), notebook.__dict__)
        except Exception as error:
            # From the cell on. Python before 3.13 would not look for its lines in linecache.
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(type(error), error, trace)
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
