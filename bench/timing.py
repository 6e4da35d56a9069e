"""Timing on a GPU: interleaved rounds, so that clock drift falls on every contender alike.

Eager timing is what a program sees that calls one after another, host time included where it is
longer than the kernels. Graph timing replays several captured calls at a time, which leaves the
kernels alone. The L2 cache is not flushed: consecutive calls read the same tensors.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping

#: Milliseconds of work that one captured graph holds at least, and the most calls it may take.
_GRAPH_MS, _GRAPH_CALLS = 1.0, 20


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int = 5, seconds: float = 0.02
) -> dict[str, float]:
    """Median milliseconds per call of each contender.

    Each round times every contender once, back to back calls between two CUDA events; repeat counts
    are chosen so that one timing lasts about ``seconds``. Each round has an order of its own,
    because the power that one contender takes is missing for the next.
    """
    repeats = {}
    for name, call in contenders.items():
        call()
        repeats[name] = max(3, min(1000, int(seconds * 1e3 / max(time_once(call, 3), 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(contenders), len(contenders)):
            samples[name].append(time_once(contenders[name], repeats[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def time_once(call: Callable[[], object], repeats: int) -> float:
    """Mean milliseconds of back to back calls on the current stream."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def capture(call: Callable[[], object]) -> tuple[Callable[[], object], int]:
    """A CUDA graph of some calls, and how many; the current stream must not be the default one.

    Raises:
        RuntimeError: the call does something that cannot be captured.
    """
    import torch

    call()
    calls = max(1, min(_GRAPH_CALLS, math.ceil(_GRAPH_MS / max(time_once(call, 3), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            call()
    return graph.replay, calls


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive values."""
    return statistics.geometric_mean(values)
