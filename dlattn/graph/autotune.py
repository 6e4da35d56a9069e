"""Timing the plans of a graph, and remembering the fastest on disk, beside the compiled kernels."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from dlattn.config import settings
from dlattn.graph.execution import Execution
from dlattn.graph.lower import Lowered
from dlattn.graph.planning import Engine, Planning
from dlattn.plans.base import Runnable
from dlattn.runtime import cache, jit
from dlattn.runtime.cuda_graph import replayed
from dlattn.runtime.log import log
from dlattn.runtime.target import device_name
from dlattn.runtime.timing import stopwatch

#: Part of every key. Raise it when what is remembered changes its meaning.
_FORMAT = 1

#: Microseconds that one timing on a device lasts at least, and the most calls it may take.
_LONG_ENOUGH, _MOST_CALLS = 1000.0, 20

#: Pack, workspace and handle of a call.
Arguments = tuple[Any, Any, int | None]


def autotune(
    lowered: Lowered,
    engines: Sequence[Engine],
    planning: Planning,
    arguments: Arguments,
    rounds: int,
) -> list[tuple[str, float]]:
    """Time every plan, choose the fastest, and remember it; see ``pygraph.autotune``."""
    planning.check()
    executions = [planning.built_at(index) for index in range(len(planning.plans))]
    for execution in executions:
        execution(*arguments)  # as any call does: it waits for the inputs
    in_time = _on_host if lowered.target.kind == "cpu" else _on_device
    times = in_time(executions, arguments, rounds)
    order = sorted(range(len(times)), key=lambda index: times[index])
    planning.build_at(order[0])
    result = [(planning.plans[index].title, times[index]) for index in order]
    possible = {(it.name, number) for it in engines for number in range(it.configurations)}
    if len(possible) > 1 and {(it.name, it.configuration) for it in planning.plans} == possible:
        _remember(lowered, engines, planning.plans[order[0]], result)
    return result


def _on_host(executions: Sequence[Execution], arguments: Arguments, rounds: int) -> list[float]:
    def timed(execution: Execution) -> float:
        begin = time.perf_counter()
        execution(*arguments)
        return 1e6 * (time.perf_counter() - begin)

    return _medians(executions, timed, rounds)


def _on_device(executions: Sequence[Execution], arguments: Arguments, rounds: int) -> list[float]:
    """Calls one after the other in a CUDA graph, so that no plan waits for the host."""
    pack, workspace, _ = arguments
    with stopwatch(executions[0].plan.target.index) as clock, ExitStack() as graphs:
        replays = []
        for execution in executions:
            with execution.operations(pack, workspace) as operations:
                with replayed(operations, 1) as once:
                    least = min(clock(once) for _ in range(3))
                calls = math.ceil(_LONG_ENOUGH / max(least, 1.0))
                calls = max(1, min(_MOST_CALLS, calls))
                replays.append((graphs.enter_context(replayed(operations, calls)), calls))
        return _medians(replays, lambda it: clock(it[0]) / it[1], rounds)


def _medians(contenders: Sequence[Any], timed: Callable[[Any], float], rounds: int) -> list[float]:
    """In turns, so that what changes between rounds changes for all."""
    samples = [[timed(it) for it in contenders] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*samples, strict=True)]


# On disk ------------------------------------------------------------------------------------------


def _entry_name(lowered: Lowered, engines: Sequence[Engine]) -> str:
    """By all that times depend on: the kernels of this version, what there is to choose from, the
    device's name, the graph. Names of tensors, and which of equal devices, do not count."""
    geometry, target = lowered.geometry, lowered.target
    tensors = [(role, replace(spec, name="")) for role, spec in sorted(geometry.tensors.items())]
    told = (
        *(_FORMAT, jit.headers_digest()),
        [(engine.name, [choice.cpp for choice in engine.choices]) for engine in engines],
        *(device_name(target), replace(target, index=0)),
        *(lowered.problem, replace(geometry, tensors={}), tensors),
    )
    return f"autotune-{hashlib.sha256(repr(told).encode()).hexdigest()[:32]}"


def _remember(
    lowered: Lowered,
    engines: Sequence[Engine],
    plan: Runnable,
    times: Sequence[tuple[str, float]],
) -> None:
    tiling = getattr(plan, "tiling", None)
    facts = {
        "plan": plan.name,
        "tiling": None if tiling is None else tiling.cpp,
        "device": device_name(lowered.target),
        "microseconds": dict(times),
    }
    # Not what another process remembered: this is newer.
    cache.write(settings().cache_dir, _entry_name(lowered, engines), {}, facts, replace=True)


def recall(lowered: Lowered, engines: Sequence[Engine]) -> list[tuple[int, int]]:
    """The engine and configuration that were remembered; empty if none were, or are no more."""
    found = cache.read(settings().cache_dir, _entry_name(lowered, engines))
    if found is None:
        return []
    plan, tiling = found.facts["plan"], found.facts["tiling"]
    for number, engine in enumerate(engines):
        known = [choice.cpp for choice in engine.choices]
        if engine.name == plan and (tiling in known or not known):
            log(2, f"autotune remembers {plan} for a graph on {lowered.target}")
            return [(number, known.index(tiling) if known else 0)]
    return []
