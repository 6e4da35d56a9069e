"""Measuring one case: prepare every contender, check it, then time all that are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bench.cases import Case
from bench.peers import Peer, Prepared
from bench.reference import Tensors, error, is_off, make_tensors, outputs_of
from bench.timing import capture, interleaved

EAGER, GRAPH = "eager", "graph"
TIMINGS = (EAGER, GRAPH)


class LostDevice(RuntimeError):
    """A contender left the CUDA context unusable; only a new process can go on."""


class Subject(Protocol):
    """What a figure is about."""

    @property
    def name(self) -> str:
        """The ``case`` column."""

    def tflops(self, direction: str, ms: float) -> float:
        """TFLOP/s of a call that took ``ms`` milliseconds; 0 where nothing is counted."""


@dataclass
class Measured:
    """What became of each contender in one pass of one case.

    Attributes:
        case: a :class:`bench.cases.Case`, or what else has a name and counts arithmetic.
        ms: milliseconds per call, by timing and contender.
        wrong: what is wrong, by contender; those are not timed.
        left_out: why there is no time, by contender.
        notes: what ran, by contender, where that is worth a word.
    """

    case: Subject
    direction: str
    ms: dict[str, dict[str, float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def measure(
    case: Case,
    directions: Iterable[str],
    peers: Iterable[Peer],
    timings: Iterable[str] = TIMINGS,
    rounds: int = 3,
    seconds: float = 0.02,
) -> Iterable[Measured]:
    """Each pass of a case, on a stream of its own so that it can be captured.

    Raises:
        LostDevice: a contender broke the CUDA context.
    """
    import torch

    directions, timings, peers = tuple(directions), tuple(timings), tuple(peers)
    stream = side_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        tensors = make_tensors(case, directions)
    for direction in directions:
        measured = Measured(case, direction)
        with torch.cuda.stream(stream):
            calls = _prepare_all(case, measured, tensors, peers)
            for timing in timings:
                measured.ms[timing] = time_all(measured, calls, timing, rounds, seconds)
        calls.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        yield measured


_stream = None


def side_stream() -> object:
    """One for the process: libraries remember the stream that they were given."""
    global _stream
    if _stream is None:
        import torch

        _stream = torch.cuda.Stream()
    return _stream


def _prepare_all(
    case: Case, measured: Measured, tensors: Tensors, peers: Iterable[Peer]
) -> dict[str, Callable[[], object]]:
    """The calls of the contenders that support the case and compute it right."""
    direction = measured.direction
    calls: dict[str, Callable[[], object]] = {}
    for peer in peers:
        try:
            reason = peer.supports(case, direction)
            if reason is not None:
                measured.left_out[peer.name] = reason
                continue
            prepared = peer.prepare(case, tensors, direction)
            complaint = _complaint(case, prepared, tensors, direction)
        except Exception as raised:  # one contender must not end the run
            measured.left_out[peer.name] = sentence(raised)
            check_device(peer.name, case.name, raised)
            continue
        if prepared.note:
            measured.notes[peer.name] = prepared.note
        if complaint:
            measured.wrong[peer.name] = complaint
        else:
            calls[peer.name] = prepared.call
    return calls


def _complaint(case: Case, prepared: Prepared, tensors: Tensors, direction: str) -> str:
    """What is wrong with the outputs of two calls, or nothing.

    The second call finds what the first one left behind, such as a workspace that is not cleared.
    """
    import torch

    prepared.call()
    outputs = prepared.outputs(prepared.call())
    torch.cuda.synchronize()
    names = outputs_of(case, direction)
    errors = {
        name: error(output, tensors.expected[name], tensors.lengths)
        for name, output in zip(names, outputs, strict=True)
    }
    return ", ".join(f"{n} is off by {e:.1e}" for n, e in errors.items() if is_off(case, e))


def time_all(
    measured: Measured,
    calls: Mapping[str, Callable[[], object]],
    timing: str,
    rounds: int,
    seconds: float,
) -> dict[str, float]:
    """Milliseconds per call of each contender that can be timed so."""
    counts = dict.fromkeys(calls, 1)
    timed = dict(calls)
    if timing == GRAPH:
        for name, call in calls.items():
            try:
                timed[name], counts[name] = capture(call)
            except Exception as raised:
                del timed[name], counts[name]
                measured.left_out[f"{name} ({timing})"] = sentence(raised)
                check_device(name, measured.case.name, raised)
    try:
        times = interleaved(timed, rounds=rounds, seconds=seconds)
    except Exception as raised:
        measured.left_out[f"all ({timing})"] = sentence(raised)
        check_device("a timing", measured.case.name, raised)
        return {}
    return {name: ms / counts[name] for name, ms in times.items()}


def check_device(culprit: str, case: str, raised: Exception) -> None:
    """Raises LostDevice if the CUDA context is unusable after an exception."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        message = f"{culprit} broke the CUDA context on {case}: {sentence(raised)}"
        raise LostDevice(message) from raised


def sentence(raised: Exception) -> str:
    """The type and the first words of an exception, on one line."""
    return f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
