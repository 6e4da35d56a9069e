"""The training run's figures: curves held to the noise, step times, the files and the chart."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench.peers import has_module
from bench.results import Row, markdown

DLATTN, TORCH, NAME = "dlattn", "torch", "train_gpt"
#: How many times the noise a curve may be off, in the root of the mean square over steps.
FACTOR = 2.0
#: The least noise, in nats: backends of a CPU may be one and the same.
LEAST = 1e-4
#: Steps that are not timed: compiling, choosing algorithms, filling caches.
WARM_UP = 20


@dataclass(frozen=True)
class Step:
    """One step of one run.

    Attributes:
        run: ``dlattn``, ``torch``, or another of torch's.
        mode: ``eager`` or ``compiled``.
        loss: before the step, in nats a byte.
        ms: forward, backward and optimizer.
    """

    run: str
    mode: str
    step: int
    loss: float
    ms: float
    commit: str
    date: str


COLUMNS = tuple(f.name for f in fields(Step))


def read(path: Path) -> list[Step]:
    """The steps of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [tuple(row) for row in csv.reader(file)]
    if not rows or rows[0] != COLUMNS:
        raise ValueError(f"{path}: expected the columns {','.join(COLUMNS)}")
    return [Step(r[0], r[1], int(r[2]), float(r[3]), float(r[4]), *r[5:]) for r in rows[1:]]


def curves(steps: Iterable[Step], mode: str) -> dict[str, list[float]]:
    """Losses by run, in the order of steps."""
    found: dict[str, list[float]] = {}
    for step in steps:
        if step.mode == mode:
            found.setdefault(step.run, []).append(step.loss)
    return found


def times(steps: Iterable[Step], mode: str) -> dict[str, float]:
    """Median milliseconds of a step by run, after the warm-up."""
    found: dict[str, list[float]] = {}
    for step in steps:
        if step.mode == mode:
            found.setdefault(step.run, []).append(step.ms)
    return {run: statistics.median(ms[min(WARM_UP, len(ms) // 2) :]) for run, ms in found.items()}


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Root of the mean square of the differences of two curves."""
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def noise(found: dict[str, list[float]]) -> float:
    """How far torch's runs are from each other at most."""
    of_torch = [curve for run, curve in found.items() if run != DLATTN]
    pairs = itertools.combinations(of_torch, 2)
    return max([LEAST, *(distance(one, other) for one, other in pairs)])


def verdict(found: dict[str, list[float]], allowed: float) -> str:
    """What is wrong with dlattn's curve, or nothing."""
    ours, own = found[DLATTN], found[TORCH]
    if not all(map(math.isfinite, ours)):
        return "dlattn's loss is not finite."
    off, most = distance(ours, own), FACTOR * allowed
    return "" if off <= most else f"Out of noise: dlattn is {off:.2e} off, allowed {most:.2e}."


def write(steps: Sequence[Step], setting: Any, machine: str, gpu: str, folder: Path) -> int:
    """Writes CSV, Markdown and PNG, prints the text, and returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for s in steps:
            figures = (s.step, f"{s.loss:.6f}", f"{s.ms:.4f}")
            writer.writerow((s.run, s.mode, *figures, s.commit, s.date))
    text, is_wrong = summary(steps)
    about = (
        f"{machine}\n\n{setting.layers} layers, {setting.heads} heads of {setting.head_dim}, "
        f"{setting.batch} x {setting.tokens} bytes of Python's standard library a step, bf16 "
        f"autocast, AdamW; commit {steps[0].commit}, {steps[0].date}.\n\n"
    )
    path.with_suffix(".md").write_text(about + text, encoding="utf-8")
    print(about + text, end="")
    if has_module("matplotlib"):
        print(f"Chart: {draw(path, gpu, folder)}")
    return int(is_wrong)


def summary(steps: Sequence[Step]) -> tuple[str, bool]:
    """Tables and sentences; and whether a curve is out of the noise."""
    parts, is_wrong = [], False
    allowed = noise(curves(steps, "eager"))
    for mode in dict.fromkeys(s.mode for s in steps):
        found, ms = curves(steps, mode), times(steps, mode)
        own = found[TORCH]
        lines = [
            [
                run,
                f"{curve[0]:.4f}",
                f"{statistics.fmean(curve[-10:]):.4f}",
                f"{distance(curve, own):.2e}",
                f"{ms[run]:.2f}",
            ]
            for run, curve in found.items()
        ]
        header = ("run", "first loss", "last 10", "off torch's", "ms a step")
        complaint = verdict(found, allowed)
        is_wrong |= bool(complaint)
        judged = complaint or (
            f"Within noise: dlattn's curve is {distance(found[DLATTN], own):.2e} off torch's (root "
            f"of the mean square), torch's own are up to {allowed:.2e} off each other."
        )
        ratio = ms[TORCH] / ms[DLATTN]
        timed = f"A step takes torch {ratio:.3f} of the time that it takes dlattn."
        parts += [
            f"### {mode}",
            markdown(header, lines),
            f"{judged}\n{timed}",
        ]
    return "\n\n".join(parts) + "\n", is_wrong


def draw(path: Path, gpu: str, folder: Path) -> Path:
    """The chart of a file of steps, into a folder."""
    from bench import style

    steps = read(path)
    found, ms = curves(steps, "eager"), times(steps, "eager")
    figure, (axes,) = style.panels(1, 3, (4.2, 3.0))
    left, middle, right = axes
    own = found[TORCH]
    for run, width in ((TORCH, 3.2), (DLATTN, 1.3)):
        left.plot(found[run], color=style.look(run)[1], linewidth=width, label=run)
    left.set_title("loss")
    left.set_ylabel("nats a byte")
    for run, curve in found.items():
        if run != TORCH:
            ours = run == DLATTN
            middle.plot(
                smooth([abs(a - b) for a, b in zip(curve, own, strict=True)]),
                color=style.look(DLATTN)[1] if ours else "#7A7A7A",
                linewidth=2.2 if ours else 1.0,
                linestyle="-" if ours else ["--", ":", "-."][len(middle.lines) % 3],
                label=run,
                zorder=4 if ours else 3,
            )
    middle.set_yscale("log")
    middle.set_title("distance from torch's loss, smoothed")
    middle.legend(fontsize=7, frameon=False)
    for axis in (left, middle):
        axis.set_xlabel("step")
    groups = {
        mode: {run: t for run, t in times(steps, mode).items() if run in (DLATTN, TORCH)}
        for mode in dict.fromkeys(s.mode for s in steps)
    }
    style.bars(right, groups, [DLATTN, TORCH], ".2f")
    right.set_title("ms a step")
    rows = [
        Row("train", "both", run, mode, ms[run], 0, steps[0].commit, steps[0].date)
        for run in (DLATTN, TORCH)
        for mode in groups
    ]
    title = "A small GPT, bf16, trained with dlattn's and with PyTorch's attention"
    place = gpu.upper() if gpu == "cpu" else f"NVIDIA {gpu.upper()}"
    return style.save(figure, title, rows, place, folder / "train-gpt.png")


def smooth(values: Sequence[float], over: int = 9) -> list[float]:
    """Means of neighbours, above 0 so that a logarithm can be drawn."""
    half = over // 2
    parts = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [max(1e-7, statistics.fmean(part)) for part in parts]
