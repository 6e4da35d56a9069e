"""Notebooks run from top to bottom on the GPU, as programs: Jupyter need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from notebooks import run as notebooks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    """Every claim of the notebook holds on the GPU, at the sizes it has there."""
    if lacking := notebooks.missing(path):
        pytest.skip(f"needs {', '.join(lacking)}")
    notebooks.run(path, plain=True)
