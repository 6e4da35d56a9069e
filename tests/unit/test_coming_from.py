"""docs/coming_from.md: its programs run, and give what the libraries do that they are named for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlattn

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")

#: Section -> its program. Those of libraries that need a GPU are ``py`` and not ``python``.
PROGRAMS = {
    section: code
    for section, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
}


def run(section: str) -> dict[str, Any]:
    """What the names mean after a program has run."""
    code = PROGRAMS[section]
    for framework in {"jax", "torch"} & set(re.findall(r"\w+", code)):
        pytest.importorskip(framework)
    names: dict[str, Any] = {}
    exec(compile(code, f"docs/coming_from.md, {section}", "exec"), names)
    return names


def test_each_library_has_a_program() -> None:
    """There is one for each library that the page is about, and one of conventions."""
    libraries = {"PyTorch", "FlexAttention", "JAX", "FlashAttention", "cuDNN"}
    assert set(PROGRAMS) == {"Conventions side by side", *libraries}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("section", sorted(set(PROGRAMS) - {"FlashAttention", "cuDNN"}))
def test_programs_equal_the_library(section: str) -> None:
    """The program runs both, and what it asserts holds."""
    assert "assert_" in PROGRAMS[section]
    run(section)


def test_flash_attention_program() -> None:
    """FlashAttention's window has its left bound included, and ends at the diagonal."""
    names = run("FlashAttention")
    import torch

    q, k, v = (names[x].transpose(1, 2).double() for x in "qkv")
    scores = 30 * torch.tanh(q @ k.mT / 32**0.5 / 30)
    row, key = (torch.arange(256, device=q.device).view(shape) for shape in ((-1, 1), (1, -1)))
    scores = scores.masked_fill((key > row) | (key < row - 128), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(names["out"].double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_slopes(rows: int) -> None:
    """Under a causal mask from the bottom right corner, FlashAttention's slopes give the output of
    ``score + slope * (kv_idx - q_idx)``, and its log-sum-exp up to what the lengths differ by;
    without a mask they differ."""
    q, k, v = (np.random.default_rng(n).normal(size=(1, 2, n, 8)) for n in (rows, 7, 7))
    slopes = np.array([0.5, 0.25], np.float32)
    row, key = np.arange(rows)[:, None], np.arange(7)
    scores = q @ k.swapaxes(2, 3) / 8**0.5 + slopes[:, None, None] * (key - row)
    full, _ = softmax(scores, v)
    options: dict[str, Any] = {"layout": "bhsd", "alibi_slopes": slopes, "return_lse": True}
    expected, expected_lse = softmax(np.where(key > row + 7 - rows, -np.inf, scores), v)
    out, lse = dlattn.attention(q, k, v, causal=True, **options)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    attends = np.isfinite(lse)
    assert attends.any() and (attends == np.isfinite(expected_lse)).all()
    shifted = expected_lse - slopes[:, None] * (7 - rows)
    np.testing.assert_allclose(lse[attends], shifted[attends], atol=1e-6)
    assert abs(dlattn.attention(q, k, v, **options)[0] - full).max() > 0.1


def softmax(scores: Any, v: Any) -> tuple[Any, Any]:
    """Its product with values, 0 of rows of -inf alone, and the logarithms of its sums."""
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(most), 0, most))
    sums = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(sums == 0, 1, sums), (most + np.log(sums))[..., 0]


def test_cudnn_program() -> None:
    """cuDNN's steps give causal attention and its natural log-sum-exp."""
    names = run("cuDNN")
    import torch

    q, k, v = (names[x].double() for x in "qkv")
    keep = torch.ones(128, 128, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT / 32**0.5).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(names["o"].double(), scores.softmax(-1) @ v, atol=4e-3, rtol=4e-3)
    lse = scores.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(names["stats"].double(), lse, atol=1e-3, rtol=1e-3)
