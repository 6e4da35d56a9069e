"""Times dlattn beside its peers.

    python -m bench.run --preset dense --pass forward --peers dlattn,fa2,fa3,cudnn --rounds 3
    python -m bench.run --compare before.csv after.csv

Every contender is checked against float32 attention first and not timed if it is wrong; those that
are not installed are left out with the reason. Results go to ``bench/results/<gpu>/<preset>.csv``
and, as tables, to a Markdown file beside it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.measure import TIMINGS, LostDevice, Measured, measure
from bench.peers import has_module, is_ours, make_peer
from bench.presets import PASSES, PRESETS, Case
from bench.results import Row, compare, merge, read_csv, tables, write_csv

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if an output of dlattn was wrong or the device was lost."""
    given = _parser().parse_args(arguments)
    if given.compare:
        print(compare(*(read_csv(path) for path in given.compare)), end="")
        return 0
    cases = [c for c in PRESETS[given.preset] if all(w in c.name.split() for w in given.match)]
    if given.list:
        print("\n".join(c.name for c in cases))
        return 0
    if not has_module("torch"):
        print("bench.run needs torch, which is not installed.")
        return 1
    import torch

    if not torch.cuda.is_available():
        print("bench.run needs a CUDA device; there is none. --compare and --list do not.")
        return 1
    return Run(given, cases).run()


class Run:
    """One run over the cases of a preset; every finished case is on disk at once."""

    def __init__(self, given: argparse.Namespace, cases: list[Case]) -> None:
        self._given, self._cases = given, cases
        self._peers = [make_peer(name) for name in given.peers]
        self._out: Path = (given.out or RESULTS / gpu_name()) / f"{given.preset}.csv"
        self._old = read_csv(self._out) if self._out.exists() else []
        self._rows: list[Row] = []
        self._wrong: dict[tuple[str, str, str], str] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._notes: Counter[tuple[str, str, str]] = Counter()
        self._commit, self._date = commit(), datetime.date.today().isoformat()
        self._progress = Progress(len(cases) * len(given.directions))

    def run(self) -> int:
        given, lost = self._given, None
        started = time.perf_counter()
        print(machine(), flush=True)
        try:
            for case in self._cases:
                try:
                    for measured in measure(
                        case, given.directions, self._peers, given.timing, given.rounds
                    ):
                        self._take(measured)
                except LostDevice:
                    raise
                except Exception as raised:  # such as no memory for the reference
                    self._progress.say(f"{case.name} was left out: {raised}")
        except LostDevice as raised:
            lost = str(raised)
        except KeyboardInterrupt:
            lost = "interrupted"
        self._progress.close()
        report = self._report()
        print(f"\n{report}\n{time.perf_counter() - started:.0f} s; results in {self._out}")
        if self._rows:
            self._out.with_suffix(".md").write_text(f"{machine()}\n\n{report}", encoding="utf-8")
        if lost:
            print(f"The run ended early: {lost}")
        return 1 if lost or any(is_ours(impl) for _, _, impl in self._wrong) else 0

    def _take(self, measured: Measured) -> None:
        """Records one pass of a case, and says a line about it."""
        case, direction = measured.case, measured.direction
        for timing, times in measured.ms.items():
            for impl, ms in times.items():
                tflops = case.tflops(direction, ms)
                words = (case.name, direction, impl, timing)
                self._rows.append(Row(*words, ms, tflops, self._commit, self._date))
        for impl, what in measured.wrong.items():
            self._wrong[case.name, direction, impl] = what
            self._progress.say(f"WRONG {case.name} {direction} {impl}: {what}")
        for impl, reason in measured.left_out.items():
            if (impl, reason) not in self._left_out:
                self._progress.say(f"left out: {impl}: {reason}")
            self._left_out[impl, reason] += 1
        for impl, note in measured.notes.items():
            self._notes[impl, direction, note] += 1
        if self._rows:
            write_csv(self._out, merge(self._old, self._rows))
        first = next(iter(measured.ms.values()), {})
        figures = [f"{impl} {case.tflops(direction, ms):.0f}" for impl, ms in first.items()]
        self._progress.step(f"{case.name} {direction}: {', '.join(figures) or 'nothing timed'}")

    def _report(self) -> str:
        """Tables of this run, then what ran, what was wrong, what was left out."""
        parts = [tables(self._rows, self._wrong)]
        for title, lines in (
            ("Ran", [f"{i} {d}: {n} ({c} cases)" for (i, d, n), c in self._notes.items()]),
            ("Wrong", [f"{' '.join(key)}: {what}" for key, what in self._wrong.items()]),
            ("Left out", [f"{i} ({c} cases): {r}" for (i, r), c in self._left_out.items()]),
        ):
            if lines:
                parts.append(f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
        return "\n".join(parts)


class Progress:
    """A bar if tqdm and a terminal are there, else a line for each step."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bar = total, 0, None
        if has_module("tqdm") and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="pass")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def step(self, line: str) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is None:
            print(f"[{self._done}/{self._total}] {line}", flush=True)
        else:
            self._bar.write(line)
            self._bar.update()

    def close(self) -> None:
        """No more steps."""
        if self._bar is not None:
            self._bar.close()


# Where figures come from --------------------------------------------------------------------------


def gpu_name() -> str:
    """The GPU as a folder name, e.g. ``h200``."""
    import torch

    words = torch.cuda.get_device_name().lower().split()
    return "-".join(word for word in words if word != "nvidia") or "gpu"


def machine() -> str:
    """GPU, clocks, driver and library versions, in one line."""
    import torch

    asked = "driver_version,clocks.max.sm,power.limit"
    parts = [torch.cuda.get_device_name()]
    parts.append("driver, maximal SM clock, power limit: " + (_output(
        "nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"
    ) or "unknown").splitlines()[0])  # fmt: skip
    parts.append(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    parts.append(f"Python {platform.python_version()}")
    return "; ".join(parts)


def commit() -> str:
    """dlattn's commit: ``DLATTN_COMMIT``, else git's abbreviated hash, else ``unknown``."""
    folder = str(Path(__file__).parent)
    return (
        os.environ.get("DLATTN_COMMIT")
        or _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
        or "unknown"
    )


def _output(*command: str) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# Arguments ----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="dense")
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
        help="contenders, e.g. dlattn,dlattn:sm80,fa3; also torch_cudnn and flex",
    )
    parser.add_argument("--timing", type=_words(TIMINGS), default=TIMINGS, help="eager,graph")
    parser.add_argument("--rounds", type=int, default=3, help="timings, of which the median counts")
    parser.add_argument("--out", type=Path, help="folder of results (default: bench/results/<gpu>)")
    parser.add_argument(
        "--match", type=str.split, default=[], help='words of case names, e.g. "d64 causal"'
    )
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="CSV", help="compare two files and do nothing else"
    )
    return parser


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
