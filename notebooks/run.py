"""Runs notebooks, each in a process of its own: ``python -m notebooks.run [--only 1,3]``.

:func:`run` is that for one of them, and what the tests call.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NOTEBOOKS = {path.name.split("_")[0]: path for path in sorted(HERE.glob("*.ipynb"))}
#: Seconds after which a cell counts as hanging.
CELL_TIMEOUT = 600

Say = Callable[[str], None]


class Failed(Exception):
    """A notebook's cell raised: which, and its traceback."""


def code_cells(path: Path) -> list[str]:
    """The source of a notebook's code cells, in order."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def missing(path: Path) -> list[str]:
    """The packages that a notebook imports outside ``try``, and that are not there."""
    statements = [each for cell in code_cells(path) for each in ast.parse(cell).body]
    names = {alias.name for it in statements if isinstance(it, ast.Import) for alias in it.names}
    names |= {it.module or "" for it in statements if isinstance(it, ast.ImportFrom)}
    packages = {name.split(".")[0] for name in names}
    return sorted(name for name in packages if not _is_there(name))


def missing_jupyter() -> list[str]:
    """Of what executes notebooks in Jupyter's kernels, what is not there."""
    return [name for name in ("ipykernel", "nbclient", "nbformat") if not _is_there(name)]


def run(
    path: Path, out: Path | None = None, plain: bool = False, say: Say = lambda _: None
) -> None:
    """Executes a notebook in a fresh process, with this Python and this checkout's dlattn.

    Args:
        path: the notebook.
        out: a folder for the executed copy, which a notebook that fails leaves, too.
        plain: run the code cells as a program instead of in Jupyter's kernel.
        say: told of each cell that begins.

    Raises:
        Failed: a cell raised, or took longer than ``CELL_TIMEOUT``.
    """
    if plain:
        _run_plain(path, say)
    else:
        _run_in_kernel(path, out, say)


def _run_in_kernel(path: Path, out: Path | None, say: Say) -> None:
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    class ThisPython(AsyncKernelManager):
        """Kernels of this interpreter, whatever the user has installed as ``python3``."""

        @property
        def kernel_spec(self) -> Any:
            launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            quiet = "--log-level=ERROR"
            return KernelSpec(argv=[*launch, quiet], env=_environment(), language="python")

    notebook = nbformat.read(path, as_version=4)
    total, started = len(code_cells(path)), 0

    def on_cell_execute(cell: Any, cell_index: int) -> None:
        nonlocal started
        if cell.cell_type == "code":
            started += 1
            say(f"cell {started} of {total}")

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(HERE)}},
        on_cell_execute=on_cell_execute,
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise Failed(f"{path.name}, code cell {started} of {total}:\n{text}") from None
    finally:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, out / path.name)


def _run_plain(path: Path, say: Say) -> None:
    command = [sys.executable, "-m", "notebooks.plain", str(path)]
    environment = {**os.environ, **_environment(), "MPLBACKEND": "Agg"}
    total = len(code_cells(path))
    say(f"{total} cells as a program")
    try:
        done = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True,
            timeout=CELL_TIMEOUT * total,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"{path.name}: not done in {CELL_TIMEOUT * total} s.") from None
    if done.returncode:
        raise Failed(f"{path.name}:\n{done.stdout[-2000:]}{done.stderr}")


def _environment() -> dict[str, str]:
    """Where the process of a notebook finds this checkout's dlattn, and its tests."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _is_there(package: str) -> bool:
    """Whether it is installed, or a package of this checkout."""
    return (HERE.parent / package).is_dir() or importlib.util.find_spec(package) is not None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m notebooks.run", description=__doc__)
    parser.add_argument("--only", help="which, by number: --only 1,3")
    parser.add_argument("--out", type=Path, help="a folder for the executed copies")
    parser.add_argument(
        "--plain", action="store_true", help="run the cells as a program, without Jupyter"
    )
    options = parser.parse_args(arguments)
    if options.plain and options.out:
        parser.error("--out keeps what Jupyter's kernel gives: leave out --plain.")
    options.only = options.only.split(",") if options.only else list(NOTEBOOKS)
    for number in options.only:
        if number not in NOTEBOOKS:
            parser.error(f"--only: expected numbers of {', '.join(NOTEBOOKS)}, got {number!r}.")
    if not options.plain and missing_jupyter():
        parser.error(
            f"{', '.join(missing_jupyter())} is missing: pip install 'dlattn[notebooks]', "
            "or run the cells as programs with --plain."
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; 1 if a notebook fails, or none ran."""
    options = _parse(arguments)
    passed = failed = 0
    line = "\r\x1b[K" if sys.stdout.isatty() else ""
    for path in (NOTEBOOKS[number] for number in options.only):
        if lacking := missing(path):
            print(f"{path.stem}: skipped, needs {', '.join(lacking)}")
            continue
        start = time.perf_counter()

        def say(step: str, name: str = path.stem) -> None:
            if sys.stdout.isatty():
                print(f"{line}{name}: {step}", end=" ", flush=True)

        try:
            run(path, options.out, options.plain, say)
            passed += 1
            print(f"{line}{path.stem}: passed in {time.perf_counter() - start:.0f} s")
        except Failed as error:
            failed += 1
            print(f"{line}{path.stem}: FAILED\n{error}")
    print(f"{passed} passed, {failed} failed, {len(options.only) - passed - failed} skipped")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
