"""The README tells the truth: its examples run, its tables are those of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlattn import config
from dlattn.runtime.target import cuda_device_count

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def title(code: str) -> str:
    """The framework of an example, and the function of dlattn's that it is about, if it is."""
    (framework,) = re.findall(r"^import (torch|jax|cupy|numpy)", code, re.M)
    functions = re.findall(r"dlattn\.(?:flash\.)?([a-z]\w+)\(", code)
    return " ".join([framework, *functions[:1]])


EXAMPLES = {title(code): code for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)}
FUNCTIONS = {"torch attention", "torch flash_attn_with_kvcache"}


def oracle(q: Any, k: Any, v: Any, keep: Any) -> Any:
    """softmax(q k^T / 8) v in float64 where ``keep`` is true; k and v repeated to q's heads."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(keep, q @ k.swapaxes(2, 3) / 8, -np.inf)
    p = np.exp(scores - scores.max(axis=3, keepdims=True))
    return p / p.sum(axis=3, keepdims=True) @ v


def run(example: str) -> dict[str, Any]:
    """What the names mean after an example has run."""
    names: dict[str, Any] = {}
    exec(compile(EXAMPLES[example], f"README.md, the {example} example", "exec"), names)
    return names


def test_there_is_an_example_for_each_framework() -> None:
    """The four frameworks have one example of graphs each."""
    assert set(EXAMPLES) - FUNCTIONS == {"torch", "jax", "cupy", "numpy"}


def test_torch_example() -> None:
    """PyTorch's example gives PyTorch's output and gradients."""
    torch = pytest.importorskip("torch")
    names = run("torch")
    q, k, v = (names[x].float().requires_grad_() for x in ("q", "k", "v"))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    o.backward(names["dO"].float())
    expected = {"o": o, "dQ": q.grad, "dK": k.grad, "dV": v.grad}
    for name, tensor in expected.items():
        torch.testing.assert_close(names[name].float(), tensor, atol=5e-3, rtol=3e-3)


def test_jax_example() -> None:
    """JAX's example gives windowed attention as a JAX array."""
    jax = pytest.importorskip("jax")
    names = run("jax")
    assert isinstance(names["o"], jax.Array)
    row, key = np.ogrid[:512, :512]
    expected = oracle(names["q"], names["k"], names["v"], (key <= row) & (key + 128 > row))
    np.testing.assert_allclose(np.asarray(names["o"]).astype(float), expected, atol=2e-2, rtol=1e-2)


def test_cupy_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's example gives attention; without a GPU, NumPy stands in for CuPy."""
    if cuda_device_count() == 0:
        monkeypatch.setitem(sys.modules, "cupy", np)
    names = run("cupy")
    q, k, v, o = (x.get() if hasattr(x, "get") else x for x in map(names.get, "qkvo"))
    np.testing.assert_allclose(o.astype(float), oracle(q, k, v, True), atol=5e-3, rtol=3e-3)


def test_numpy_example() -> None:
    """NumPy's example ignores keys beyond each length."""
    names = run("numpy")
    keep = np.arange(512) < names["lengths"]
    expected = oracle(names["q"], names["k"], names["v"], keep)
    np.testing.assert_allclose(names["o"], expected, atol=1e-12)


def test_attention_example() -> None:
    """The one call gives PyTorch's output, and so do merged parts of it."""
    torch = pytest.importorskip("torch")
    names = run("torch attention")
    q, k, v = (names[x].float().transpose(1, 2) for x in ("q", "k", "v"))
    for found, causal in (("o", True), ("whole", False)):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        got = names[found].float().transpose(1, 2)
        torch.testing.assert_close(got, o, atol=5e-3, rtol=3e-3)


def test_decoding_example() -> None:
    """Each step attends to what was appended so far."""
    torch = pytest.importorskip("torch")
    names = run("torch flash_attn_with_kvcache")
    q, k, v = (names[x].float().transpose(1, 2) for x in ("q", "k_cache", "v_cache"))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :3], v[:, :, :3], enable_gqa=True
    )
    got = names["o"].float().transpose(1, 2)
    torch.testing.assert_close(got, o, atol=5e-3, rtol=3e-3)
    assert not k[:, :, 3:].any()


FIRST_RESULTS = {
    re.findall(r"^import (\w+)", code, re.M)[0]: (commands, code)
    for commands, code in re.findall(r'^```sh\n([^`]*?)python -c "\n([^"]*)"\n```', README, re.M)
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_first_result(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a new environment is told to run prints a deviation, with five commands or fewer."""
    pytest.importorskip(framework)
    commands, code = FIRST_RESULTS[framework]
    assert len(re.split(r"&&|\n", commands.strip())) + 1 <= 5
    exec(compile(code, f"README.md, first result in {framework}", "exec"), {})
    (deviation,) = re.findall(r"\d\.\d+", capsys.readouterr().out)
    assert 0.1 < float(deviation) < 0.3


def test_environment_table_is_the_configuration() -> None:
    """The README's table of environment variables is the one that the code prints."""
    assert config.table() in README


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    """Links name files of the repository or headings of the README."""
    if target.startswith("#"):
        headings = re.findall(r"^#+ (.*)$", README, re.M)
        assert target[1:] in {h.lower().replace(" ", "-") for h in headings}
    else:
        assert (Path(__file__).parents[2] / target).exists()


def test_flash_example() -> None:
    """The example of docs/flash.md gives causal attention, and the gradients of its shape."""
    names = example_of("flash.md")
    q, k, v = (names[x].swapaxes(1, 2) for x in "qkv")
    expected = oracle(q, k, v, np.tri(512, dtype=bool)).swapaxes(1, 2)
    np.testing.assert_allclose(names["out"], expected, atol=1e-12)
    assert names["dq"].shape == names["q"].shape


def example_of(page: str) -> dict[str, Any]:
    """The names that the first example of a page leaves."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    code, *_ = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(code, f"docs/{page}", "exec"), names)
    return names


def test_docs_torch_example() -> None:
    """The example of docs/torch.md gives an output, and gradients of its shape."""
    pytest.importorskip("torch")
    names = example_of("torch.md")
    assert names["out"].shape == names["q"].grad.shape == (2, 8, 512, 64)


def test_docs_torch_models() -> None:
    """The examples of models in docs/torch.md, one after the other, give gradients."""
    pytest.importorskip("torch")
    text = (Path(__file__).parents[2] / "docs" / "torch.md").read_text(encoding="utf-8")
    _, *examples = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {}
    for code, model in zip(examples, ("layer", "model"), strict=True):
        if model == "model":
            pytest.importorskip("transformers")
        exec(compile(code, f"docs/torch.md, the example of a {model}", "exec"), names)
        assert all(p.grad is not None for p in names[model].parameters())


def test_docs_jax_example() -> None:
    """The example of docs/jax.md gives gradients of the shape of its arrays."""
    pytest.importorskip("jax")
    names = example_of("jax.md")
    assert {x.shape for x in names["gradients"]} == {names["q"].shape}
