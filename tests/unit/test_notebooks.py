"""Notebooks run from top to bottom, here on the CPU engine, and are committed clean."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from notebooks import run as notebooks
from notebooks.run import NOTEBOOKS

each = pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=lambda path: path.stem)


def contents(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def notebook(folder: Path, *cells: str) -> Path:
    """A notebook of these code cells."""
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    kernel = {"kernelspec": {"display_name": "Python 3", "name": "python3"}}
    written = [{**code, "id": f"c{i}", "source": [cell]} for i, cell in enumerate(cells)]
    path = folder / "9_made.ipynb"
    text = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(text), encoding="utf-8")
    return path


def skip_without_jupyter() -> None:
    if lacking := notebooks.missing_jupyter():
        pytest.skip(f"needs {', '.join(lacking)}: pip install 'dlattn[notebooks]'")


@each
def test_runs(path: Path) -> None:
    """Every cell runs in Jupyter's kernel, so that every claim of the notebook holds."""
    skip_without_jupyter()
    if lacking := notebooks.missing(path):
        pytest.skip(f"needs {', '.join(lacking)}")
    notebooks.run(path)


@each
def test_is_committed_clean(path: Path) -> None:
    """Notebooks carry no outputs, no counts, no metadata of a machine, and cells that have ids."""
    notebook = contents(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count"), cell["id"]
        assert not cell["metadata"], cell["id"]
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


@each
def test_names_no_machine(path: Path) -> None:
    """No path of somebody's machine is in a notebook."""
    found = re.findall(
        r"[\"'( ](?:/(?:home|root|tmp|work|opt|Users)/|[A-Z]:\\)\S*", path.read_text()
    )
    assert not found


@each
def test_is_plain_python(path: Path) -> None:
    """Cells are Python without magics, which ``--plain`` and people without Jupyter can run."""
    for source in notebooks.code_cells(path):
        ast.parse(source)


@each
def test_is_read_before_it_is_run(path: Path) -> None:
    """A notebook begins with prose, and the README of the folder lists it."""
    assert contents(path)["cells"][0]["cell_type"] == "markdown"
    assert f"({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_a_failure_names_the_cell(tmp_path: Path, plain: bool) -> None:
    """What fails is said with the cell and its error, and nothing after it runs."""
    if not plain:
        skip_without_jupyter()
    path = notebook(tmp_path, "a = 1", "b = a - 1\na / b", "open('ran', 'w')")
    with pytest.raises(notebooks.Failed, match=r"code cell 2[\s\S]*a / b[\s\S]*ZeroDivisionError"):
        notebooks.run(path, plain=plain)
    assert not (notebooks.HERE / "ran").exists()


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_runs_this_checkout(tmp_path: Path, plain: bool) -> None:
    """A notebook imports the dlattn beside it, whatever is installed."""
    if not plain:
        skip_without_jupyter()
    root = notebooks.HERE.parent
    check = f"assert pathlib.Path(dlattn.__file__).is_relative_to({str(root)!r}), dlattn.__file__"
    notebooks.run(notebook(tmp_path, "import pathlib\n\nimport dlattn", check), plain=plain)


def test_keeps_executed_copies(tmp_path: Path) -> None:
    """``out`` gets the notebook with its outputs; the notebook itself stays as it was."""
    skip_without_jupyter()
    path = notebook(tmp_path, "6 * 7")
    before = path.read_bytes()
    notebooks.run(path, tmp_path / "executed")
    assert '"42"' in (tmp_path / "executed" / path.name).read_text(encoding="utf-8")
    assert path.read_bytes() == before


def test_says_what_is_missing(tmp_path: Path) -> None:
    """Packages that are imported outside ``try`` are needed, others are not."""
    path = notebook(
        tmp_path,
        "import numpy as np\nimport no_such_a.part\nfrom no_such_b import c",
        "try:\n    import no_such_c\nexcept ImportError:\n    no_such_c = None",
    )
    assert notebooks.missing(path) == ["no_such_a", "no_such_b"]


def test_command_tells_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 1 where a notebook fails or none runs, and counts what it did."""
    made = {"good": "1", "bad": "1 / 0", "lacking": "import no_such"}
    for number, cell in enumerate(made.values()):
        (tmp_path / str(number)).mkdir()
        monkeypatch.setitem(NOTEBOOKS, str(90 + number), notebook(tmp_path / str(number), cell))
    assert notebooks.main(["--plain", "--only", "90"]) == 0
    assert notebooks.main(["--plain", "--only", "92"]) == 1
    assert "needs no_such" in capsys.readouterr().out
    assert notebooks.main(["--plain", "--only", "90,91,92"]) == 1
    assert "1 passed, 1 failed, 1 skipped" in capsys.readouterr().out


def test_command_offers_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Jupyter's packages the command names them, and the way to do without."""
    monkeypatch.setattr(notebooks, "missing_jupyter", lambda: ["nbclient"])
    with pytest.raises(SystemExit):
        notebooks.main(["--only", "1"])
    assert re.search("nbclient is missing.*--plain", capsys.readouterr().err, re.S)


@pytest.mark.parametrize("wrong", [["--only", "0"], ["--plain", "--out", "there"]])
def test_command_refuses(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that no notebook has, and copies of what no kernel ran, are refused with a reason."""
    with pytest.raises(SystemExit):
        notebooks.main(wrong)
    assert wrong[0].removeprefix("--") in capsys.readouterr().err
