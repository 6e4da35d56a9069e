"""The documentation is built without a warning, and has all that users may call."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlattn import config
from dlattn.problem import POINTWISE
from tests.surface import ROOT, surface

#: Builds where importing any of these is an ImportError, dlattn itself included.
BUILD = """
import sys
sys.modules.update(dict.fromkeys(("cupy", "dlattn", "jax", "numpy", "torch")))
from mkdocs.__main__ import cli
cli(["build", "--strict", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by reading the source: a warning, such as a broken link, is an error."""
    for tool in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(tool, reason='the documentation needs pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, str(ROOT / "mkdocs.yml"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_reference_is_complete(site: Path) -> None:
    """Each public class, function and method has a heading, by its own name or where it is from."""
    pages = "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))
    headings = set(re.findall(r'<h\d id="([^"]+)"', pages))
    missing = [entry.name for entry in surface() if not {entry.name, entry.home} & headings]
    assert not missing


def test_docstrings_are_rendered(site: Path) -> None:
    """No role of a docstring is left as text."""
    for page in (site / "reference").rglob("*.html"):
        assert not re.search(r":(class|data|func|meth|mod):", page.read_text(encoding="utf-8"))


def test_environment_page_is_the_configuration() -> None:
    """The reference's table of environment variables is the one that the code prints."""
    page = ROOT / "docs" / "reference" / "environment.md"
    assert config.table() in page.read_text(encoding="utf-8")


def test_pointwise_operations_are_those_of_the_table() -> None:
    """The reference has every pointwise operation with its operands and its formula."""
    page = (ROOT / "docs" / "reference" / "operations.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    told = dict(re.split(r" {2,}", line, maxsplit=1) for line in block.splitlines())
    assert told == {
        f"{name}({', '.join(it.operands)})": it.formula for name, it in POINTWISE.items()
    }
