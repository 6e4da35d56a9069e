"""Timing on a GPU: interleaved rounds, so that clock drift falls on every contender alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int = 5, seconds: float = 0.02
) -> dict[str, float]:
    """Median milliseconds per call of each contender.

    Each round times every contender once, back to back calls between two CUDA events; a
    contender's repeat count is chosen so that one timing lasts about ``seconds``.
    """
    import torch

    def time_once(call: Callable[[], object], repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats

    repeats = {}
    for name, call in contenders.items():
        call()
        repeats[name] = max(3, min(1000, int(seconds * 1e3 / max(time_once(call, 3), 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            samples[name].append(time_once(call, repeats[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive values."""
    return statistics.geometric_mean(values)
