"""Jobs: what a run measures one after another, a few seconds each, and is resumed by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bench.cases import FORWARD, PASSES, Case
from bench.measure import (
    GRAPH,
    Measured,
    Subject,
    check_device,
    measure,
    sentence,
    side_stream,
)
from bench.peers import Peer
from bench.peers.graph import Dlattn


@dataclass(frozen=True)
class Effort:
    """How long a run measures.

    Attributes:
        rounds: timings of each contender, of which the median (of host times, the least) counts.
        seconds: what one timing of a GPU takes.
        timings: ``eager`` and ``graph``, for jobs that know both.
    """

    rounds: int
    seconds: float
    timings: tuple[str, ...]


class Job(ABC):
    """One thing to measure.

    Attributes:
        cases: the ``case`` column of what it yields.
        passes: the ``pass`` column.
        timings: those of an effort's that it knows; empty for a timing of its own.
    """

    cases: tuple[str, ...]
    passes: tuple[str, ...] = PASSES
    timings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A few words for a line of progress."""
        return self.cases[0]

    @abstractmethod
    def measure(
        self, directions: Sequence[str], peers: Sequence[Peer], effort: Effort
    ) -> Iterable[Measured]:
        """What became of each contender, for each case and pass.

        Raises:
            LostDevice: a contender broke the CUDA context.
        """

    def compile(self, direction: str, device: Any) -> None:  # noqa: B027
        """Compiles dlattn's kernels into the cache, if that can be done before they are needed.

        Args:
            device: of ``dlattn.create_device_properties``.
        """


class CaseJob(Job):
    """A case beside its peers."""

    def __init__(self, case: Case) -> None:
        self.case, self.cases = case, (case.name,)
        self.timings = ("eager", "graph")

    def measure(
        self, directions: Sequence[str], peers: Sequence[Peer], effort: Effort
    ) -> Iterable[Measured]:
        return measure(self.case, directions, peers, effort.timings, effort.rounds, effort.seconds)

    def compile(self, direction: str, device: Any) -> None:
        Dlattn().compile(self.case, direction, device)


_Row = TypeVar("_Row", bound=Subject)


class RowJob(Job, Generic[_Row]):
    """A forward that no case describes, beside its peers, by graph replay."""

    passes, timings = (FORWARD,), (GRAPH,)

    def __init__(self, row: _Row) -> None:
        self.row, self.cases = row, (row.name,)

    @abstractmethod
    def times(self, measured: Measured, names: Sequence[str], effort: Effort) -> dict[str, float]:
        """Milliseconds a call of those of these contenders that are right. Their memory is free
        when it returns."""

    def measure(
        self, directions: Sequence[str], peers: Sequence[Peer], effort: Effort
    ) -> Iterable[Measured]:
        import torch

        measured = Measured(self.row, FORWARD)
        with on_side_stream():
            torch.manual_seed(0)
            names = [peer.name for peer in peers]
            measured.ms[GRAPH] = self.times(measured, names, effort)
        yield measured


@dataclass(frozen=True)
class Named:
    """What is measured where no arithmetic is counted."""

    name: str

    def tflops(self, direction: str, ms: float) -> float:
        """None."""
        return 0.0


@contextmanager
def on_side_stream() -> Iterator[None]:
    """Work of a job in a stream that can be captured; memory is given back afterwards."""
    import torch

    torch.cuda.synchronize()
    with torch.cuda.stream(side_stream()):
        yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def prepared(
    measured: Measured, makers: Mapping[str, Callable[[], tuple[Any, str]]]
) -> dict[str, Any]:
    """What each contender's maker returns, unless it raises or has a complaint.

    Args:
        makers: by contender: returns its calls, and what is wrong with their results or ``""``.
    """
    calls = {}
    for impl, make in makers.items():
        try:
            made, complaint = make()
        except Exception as raised:  # one contender must not end the run
            measured.left_out[impl] = sentence(raised)
            check_device(impl, measured.case.name, raised)
            continue
        if complaint:
            measured.wrong[impl] = complaint
        else:
            calls[impl] = made
    return calls
