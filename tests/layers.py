"""The layers of docs/jax.md: of libraries on JAX, with dlattn's attention in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "jax.md"


def check_layer(library: str, tolerance: float) -> None:
    """Fails unless the example of a library gives the loss and the gradients that it gives with
    JAX's own attention."""
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (code,) = (code for code in examples if library in code)
    own = code.replace("from dlattn.jax import", "from jax.nn import")
    own = own.replace(", dropout_rate=rate, dropout_key=dropout_rng", "")
    found, wanted = (_results(some, library) for some in (code, own))
    largest = max(abs(x).max() for x in wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * largest, rtol=tolerance)


def _results(code: str, library: str) -> list[Any]:
    names: dict[str, Any] = {"__name__": "example"}
    page = f"docs/jax.md, the example of {library}"
    exec(compile(code, page, "exec", dont_inherit=True), names)
    found = jax.tree.leaves((names["value"], names["gradients"]))
    return [np.asarray(x, np.float32) for x in found]
