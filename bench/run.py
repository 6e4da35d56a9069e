"""Times dlattn beside its peers.

    python -m bench.run --preset all --precompile 16 --budget 500
    python -m bench.run --preset dense,mla --pass forward --peers dlattn,fa2,fa3,cudnn --rounds 3
    python -m bench.run --compare before.csv after.csv

Every contender is checked against float32 attention first and not timed if it is wrong; those that
are not installed are left out with the reason. Results go to ``bench/results/<gpu>/<preset>.csv``
and, as tables, to a Markdown file beside it; ``bench.plots`` draws charts of all that are there.
Several presets take turns, and each begins with what says most, so that a run that is out of time
has something of everything; the same command with ``--resume`` goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.cases import PASSES
from bench.jobs import Effort, Job
from bench.machine import commit, gpu_name, machine
from bench.measure import TIMINGS, LostDevice, Measured
from bench.peers import has_module, is_ours, make_peer
from bench.report import Report
from bench.results import Row, compare, read_csv, unit_of
from bench.suites import SUITES, in_turn
from dlattn.runtime import jit

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if an output of dlattn was wrong or the device was lost."""
    given = _with_defaults(_parser().parse_args(arguments))
    if given.compare:
        print(compare(*(read_csv(path) for path in given.compare)), end="")
        return 0
    if given.list:
        for job in in_turn(given.preset):
            if all(word in job.name.split() for word in given.match):
                print(*job.cases, sep="\n")
        return 0
    if not has_module("torch"):
        print("bench.run needs torch, which is not installed.")
        return 1
    import torch

    if not torch.cuda.is_available():
        print("bench.run needs a CUDA device; there is none. --compare and --list do not.")
        return 1
    return Run(given).run()


class Run:
    """One run over jobs; every finished pass of a case is on disk at once."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._peers = [make_peer(name) for name in given.peers]
        self._out: Path = given.out or RESULTS / gpu_name()
        self._commit, self._date = commit(), datetime.date.today().isoformat()
        self._reports = {
            name: Report(
                self._out / f"{name}.csv", [case for job in SUITES[name] for case in job.cases]
            )
            for name in given.preset
        }
        self._todo = self._wanted()
        self._progress = Progress(len(self._todo))
        self._begun = time.perf_counter()

    def run(self) -> int:
        ended, place = "", machine()
        print(place, flush=True)
        if self._given.precompile:
            self._compile()
        try:
            ended = self._measure()
        except LostDevice as raised:
            ended = f"The run ended early: {raised}"
        except KeyboardInterrupt:
            ended = "The run ended early: interrupted"
        self._progress.close()
        for name, report in self._reports.items():
            report.write(place)
            print(f"\n## {name}\n\n{report.text()}")
        print(f"{time.perf_counter() - self._begun:.0f} s; results in {self._out}")
        if self._out.is_dir():
            draw_all(self._out)
        if ended:
            print(ended)
        wrong = any(is_ours(impl) for r in self._reports.values() for impl in r.is_wrong)
        return 1 if ended.startswith("The run ended") or wrong else 0

    def _wanted(self) -> list[tuple[Job, tuple[str, ...]]]:
        """Jobs and their passes; with ``--resume``, those that are not there already."""
        found = []
        if self._given.resume and self._commit == "unknown":
            print("--resume needs a commit: none in git; set DLATTN_COMMIT. Measuring all.")
            self._given.resume = False
        for job in in_turn(self._given.preset):
            if not all(word in job.name.split() for word in self._given.match):
                continue
            passes = tuple(d for d in job.passes if d in self._given.directions)
            if self._given.resume:
                passes = tuple(d for d in passes if not self._is_there(job, d))
            if passes:
                found.append((job, passes))
        return found

    def _is_there(self, job: Job, direction: str) -> bool:
        timings = [t for t in self._given.timing if t in job.timings]
        reports = [self._reports[n] for n in self._given.preset if job in SUITES[n]]
        return all(
            report.has(case, direction, timings, self._commit)
            for report in reports
            for case in job.cases
        )

    def _measure(self) -> str:
        """Runs the jobs, and returns a sentence if it ran out of time."""
        effort = Effort(self._given.rounds, self._given.seconds, self._given.timing)
        for done, (job, passes) in enumerate(self._todo):
            spent = time.perf_counter() - self._begun
            if self._given.budget and spent + spent / max(1, done) > self._given.budget:
                names = ", ".join(left.name for left, _ in self._todo[done:])
                return (
                    f"Out of time after {spent:.0f} s of {self._given.budget:g}; left out "
                    f"{len(self._todo) - done} of {len(self._todo)}, which --resume goes on with: "
                    f"{names}"
                )
            try:
                for measured in job.measure(passes, self._peers, effort):
                    self._take(measured)
            except LostDevice:
                raise
            except Exception as raised:  # such as no memory for the reference
                self._progress.say(f"{job.name} was left out: {raised}")
            self._progress.step()
        return ""

    def _compile(self) -> None:
        """All kernels into the cache, several at a time; what cannot be compiled shows later."""
        import dlattn

        if "dlattn" not in self._given.peers or not has_module("cupy"):
            return
        device = dlattn.create_device_properties(0)

        def compile_one(job: Job, direction: str) -> None:
            with contextlib.suppress(Exception):
                job.compile(direction, device)

        with ThreadPoolExecutor(self._given.precompile) as pool:
            for job, passes in self._todo:
                for direction in passes:
                    pool.submit(compile_one, job, direction)
        spent = time.perf_counter() - self._begun
        print(f"{jit.statistics.compiles} kernels compiled ahead in {spent:.0f} s", flush=True)

    def _take(self, measured: Measured) -> None:
        """Records one pass of a case, and says a line about it."""
        case, direction = measured.case, measured.direction
        rows = []
        for timing, times in measured.ms.items():
            for impl, ms in times.items():
                tflops = case.tflops(direction, ms)
                words = (case.name, direction, impl, timing)
                rows.append(Row(*words, ms, tflops, self._commit, self._date))
        for impl, what in measured.wrong.items():
            self._progress.say(f"WRONG {case.name} {direction} {impl}: {what}")
        for impl, reason in measured.left_out.items():
            self._progress.say_once(f"left out: {impl}: {reason}")
        for report in self._reports.values():
            report.take(measured, rows)
        first = rows[: len(next(iter(measured.ms.values()), {}))]
        figures = ", ".join(f"{row.impl} {unit_of(row).of(row):.3g}" for row in first)
        unit = unit_of(first[0]).name if first else "nothing timed"
        self._progress.say(f"{case.name} {direction}: {figures} {unit}")


class Progress:
    """A bar if tqdm and a terminal are there; else lines that say how many are done."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bar = total, 0, None
        self._said: set[str] = set()
        if has_module("tqdm") and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="case")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(f"[{self._done + 1}/{self._total}] {line}", flush=True)
        else:
            self._bar.write(line)

    def say_once(self, line: str) -> None:
        """Print a line unless it has been printed."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """No more steps."""
        if self._bar is not None:
            self._bar.close()


def draw_all(folder: Path) -> None:
    """Charts of all results of a GPU, if they can be drawn."""
    if not has_module("matplotlib"):
        print("No charts: matplotlib is not installed.")
        return
    from bench.plots import draw_folder

    print("Charts: " + ", ".join(path.name for path in draw_folder(folder)))


# Arguments ----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--preset",
        type=_presets,
        default=("dense",),
        help=f"all, or some of {','.join(SUITES)} (default: dense)",
    )
    parser.add_argument(
        "--pass",
        dest="directions",
        type=_words(PASSES),
        default=PASSES,
        metavar="PASSES",
        help="forward, backward, or both with a comma (default)",
    )
    parser.add_argument(
        "--peers",
        type=_peers,
        default=("dlattn", "fa2", "fa3", "fa4", "cudnn"),
        help="contenders, e.g. dlattn,dlattn:sm80,fa3; also fa3_splits, torch_cudnn and flex",
    )
    parser.add_argument("--timing", type=_words(TIMINGS), help="eager,graph (default: both)")
    parser.add_argument("--rounds", type=int, help="timings, of which the median counts (5)")
    parser.add_argument(
        "--quick", action="store_true", help="two short rounds, by graph replay alone"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="stop, and say what was left out"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip what this commit's results have already"
    )
    parser.add_argument(
        "--precompile", type=int, default=0, metavar="N", help="compile first, N kernels at a time"
    )
    parser.add_argument("--out", type=Path, help="folder of results (default: bench/results/<gpu>)")
    parser.add_argument(
        "--match", type=str.split, default=[], help='words of case names, e.g. "d64 causal"'
    )
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="CSV", help="compare two files and do nothing else"
    )
    return parser


def _with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """What ``--quick`` decides, unless it is given."""
    given.timing = given.timing or (TIMINGS[-1:] if given.quick else TIMINGS)
    given.rounds = given.rounds or (2 if given.quick else 5)
    given.seconds = 0.01 if given.quick else 0.02
    return given


def _presets(text: str) -> tuple[str, ...]:
    names = tuple(SUITES) if text == "all" else tuple(text.split(","))
    if not set(names) <= set(SUITES):
        raise argparse.ArgumentTypeError(f"expected all or some of {','.join(SUITES)}, got {text}")
    return names


def _words(allowed: Sequence[str]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if not set(words) <= set(allowed):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {text}")
        return words

    return parse


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        try:
            make_peer(name)
        except ValueError as unknown:
            raise argparse.ArgumentTypeError(str(unknown)) from None
    return names


if __name__ == "__main__":
    sys.exit(main())
