"""The training run: two attentions learn alike, and one that is wrong is found out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench import train_gpt, train_report
from bench.train_report import DLATTN, TORCH, Step


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring at this size."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_small_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """dlattn's curve is torch's within noise; figures, text and chart are written."""
    status = train_gpt.main(["--small", "--steps", "8", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "Within noise" in said
    steps = train_report.read(tmp_path / "train_gpt.csv")
    found = train_report.curves(steps, "eager")
    assert {len(curve) for curve in found.values()} == {8}
    assert found[DLATTN][0] == pytest.approx(found[TORCH][0], abs=1e-3)
    assert found[DLATTN][-1] < found[DLATTN][0] - 0.05, "it does not learn"
    assert (tmp_path / "train_gpt.md").read_text().startswith("CPU; torch")


def test_wrong_attention_is_out_of_noise() -> None:
    """A mask that is left out is seen in the curve."""
    import torch

    own = torch.nn.functional.scaled_dot_product_attention

    def wrong(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return own(q, k, v, is_causal=False)

    chosen = train_gpt.attentions("cpu") | {DLATTN: wrong}
    setting = replace(train_gpt.SMALL, steps=20, head_dim=32, rate=3e-3)
    found = train_report.curves(train_gpt.train(setting, chosen, "cpu", "eager"), "eager")
    assert train_report.verdict(found, train_report.noise(found)).startswith("Out of noise")


def steps_of(curves: dict[str, list[float]]) -> list[Step]:
    return [
        Step(run, "eager", i, loss, 2.0 if run == DLATTN else 3.0, "abc", "2026-01-02")
        for run, curve in curves.items()
        for i, loss in enumerate(curve)
    ]


def test_verdict() -> None:
    """Noise is what torch's runs differ by; a curve may be off twice that, and must be finite."""
    draw = random.Random(0)
    smooth = [5.0 - 0.01 * i for i in range(200)]

    def noisy(size: float, shift: float = 0.0) -> list[float]:
        return [x + draw.gauss(0, size) + shift for x in smooth]

    of_torch = {TORCH: noisy(0.01), "torch again": noisy(0.01), "torch, math": noisy(0.01)}
    for ours, is_wrong in (
        (noisy(0.01), False),
        (noisy(0.01, shift=0.05), True),
        (noisy(0.06), True),
        ([*smooth[:-1], float("nan")], True),
    ):
        text, found = train_report.summary(steps_of({**of_torch, DLATTN: ours}))
        assert found is is_wrong, text
    assert "A step takes torch 1.500 of the time" in text


def test_batches() -> None:
    """Targets are the next bytes of the text, and batches are the same in every run."""
    import torch

    (tokens, targets), *_ = train_gpt.batches(train_gpt.SMALL, "cpu")
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert bytes(tokens[0].tolist()) in train_gpt.text()
    (again, _), *_ = train_gpt.batches(train_gpt.SMALL, "cpu")
    assert torch.equal(tokens, again)
