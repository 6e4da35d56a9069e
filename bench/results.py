"""Results: rows of a CSV file, the tables made of them, and the comparison of two files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cases import Case
from bench.peers import is_ours
from bench.presets import PRESETS
from bench.timing import geometric_mean

COLUMNS = ("case", "pass", "impl", "timing", "ms", "tflops", "commit", "date")
ABSENT = "–"


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        case: the case's name.
        direction: the ``pass`` column.
        impl: the contender.
        timing: ``eager`` or ``graph``; ``host``: the CPU's time of a call; ``start``: what a
            process takes until its first result.
        ms: milliseconds per call.
        tflops: TFLOP/s, attended area only; 0 where nothing is counted.
        commit: dlattn's, abbreviated.
        date: ISO date of the run.
    """

    case: str
    direction: str
    impl: str
    timing: str
    ms: float
    tflops: float
    commit: str
    date: str

    @property
    def setting(self) -> tuple[str, str, str]:
        """What rows have in common that were measured side by side."""
        return (self.case, self.direction, self.timing)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells a row from all others of a file."""
        return (*self.setting, self.impl)


@dataclass(frozen=True)
class Unit:
    """How figures of some rows are shown.

    Attributes:
        name: e.g. ``TFLOP/s``.
        of: a row's figure.
        higher_is_better: whether it is a speed.
        whole: from where on no decimals are shown.
    """

    name: str
    of: Callable[[Row], float]
    higher_is_better: bool
    whole: float = 20


TFLOPS = Unit("TFLOP/s", lambda row: row.tflops, True)
BANDWIDTH = Unit("TB/s", lambda row: decode_bytes(row.case) / row.ms * 1e-9, True)
US = Unit("us", lambda row: 1e3 * row.ms, False, 200)
MS = Unit("ms", lambda row: row.ms, False)


def unit_of(row: Row) -> Unit:
    """Host times are microseconds, starts milliseconds, and a decode's speed is its bandwidth."""
    if row.timing in ("host", "start"):
        return US if row.timing == "host" else MS
    return BANDWIDTH if decode_bytes(row.case) else TFLOPS


def decode_bytes(name: str) -> int:
    """Bytes of keys and values of a decode by its case's name; 0 of any other."""
    words = {word[0]: word[1:] for word in name.split()}
    if not words.get("q", "").isdigit():
        return 0
    heads_kv, batch, keys = int(words["h"].split("/")[1]), int(words["b"]), int(words["s"])
    rows = keys * (batch + 1) // 2 if "u" in words else keys * batch
    return rows * heads_kv * int(words["d"]) * 4


# Files --------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: its columns are not :data:`COLUMNS`.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header != COLUMNS:
            raise ValueError(f"{path}: expected the columns {','.join(COLUMNS)}, got {header}")
        return [Row(*r[:4], float(r[4]), float(r[5]), *r[6:]) for r in reader]


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Writes the rows, replacing the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for r in rows:
            ms, tflops = f"{r.ms:.5f}", f"{r.tflops:.2f}"
            writer.writerow((r.case, r.direction, r.impl, r.timing, ms, tflops, r.commit, r.date))
    part.replace(path)


def merge(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The old rows of settings that were not measured again, and the new rows.

    A setting is replaced as a whole, because contenders are comparable only side by side.
    """
    again = {row.setting for row in new}
    return [row for row in old if row.setting not in again] + list(new)


# Tables -------------------------------------------------------------------------------------------


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, padded so that it also reads well in a terminal."""
    lines = [list(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    justified = [
        [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        for line in (list(header), rule, *lines)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in justified)


def tables(rows: Sequence[Row], wrong: Iterable[tuple[str, str, str]] = ()) -> str:
    """A table for each pass, timing and unit: figures, and ours beside the best peer, with means.

    Args:
        wrong: (case, pass, impl) of contenders whose outputs were wrong.
    """
    wrong = set(wrong)
    groups: dict[tuple[str, str, Unit], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.direction, row.timing, unit_of(row)), []).append(row)
    parts = []
    for (direction, timing, unit), chosen in groups.items():
        mistaken = {
            (case, impl)
            for case, d, impl in wrong
            if d == direction and bool(decode_bytes(case)) == (unit is BANDWIDTH)
        }
        parts += [f"### {direction}, {timing} ({unit.name})", _table(chosen, unit, mistaken)]
        parts += [summary(chosen)] if any(is_ours(r.impl) for r in chosen) else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Row], unit: Unit, wrong: set[tuple[str, str]]) -> str:
    """One line a case, one column a contender; rows of one pass and timing."""
    speeds = _speeds(rows)
    cases = dict.fromkeys([*(r.case for r in rows), *(case for case, _ in wrong)])
    impls = list(dict.fromkeys([*(r.impl for r in rows), *(impl for _, impl in wrong)]))
    ours = [impl for impl in impls if is_ours(impl)]
    shown = {
        (row.case, row.impl): f"{value:.0f}"
        if (value := unit.of(row)) >= unit.whole
        else f"{value:.2f}"
        for row in rows
    } | dict.fromkeys(wrong, "WRONG")
    has_peers = len(ours) < len(impls)
    lines = []
    for case in cases:
        best = _best_peer(speeds, case, impls)
        ratios = [
            f"{speeds[case, impl] / best:.3f}" if best and (case, impl) in speeds else ABSENT
            for impl in ours
        ]
        line = [case, *(shown.get((case, impl), ABSENT) for impl in impls)]
        lines.append([*line, *(ratios if has_peers or unit is TFLOPS else ())])
    title = "{} / best peer" if unit.higher_is_better else "best peer / {}"
    titles = [title.format(impl) for impl in ours] if has_peers or unit is TFLOPS else []
    return markdown(["case", *impls, *titles], lines)


def _speeds(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Calls a millisecond, by case and contender: what ratios are made of, whatever the unit."""
    return {(r.case, r.impl): 1 / r.ms for r in rows}


def summary(rows: Sequence[Row]) -> str:
    """Geometric means and the least of ours over each peer and over the best; one pass, timing."""
    figures = _speeds(rows)
    impls = list(dict.fromkeys(r.impl for r in rows))
    peers = [impl for impl in impls if not is_ours(impl)]
    sentences = []
    for ours in filter(is_ours, impls):
        against: list[tuple[str, Callable[[str], float | None]]] = [
            ("best peer", lambda case: _best_peer(figures, case, impls)),
            *((p, lambda case, p=p: figures.get((case, p))) for p in peers),  # type: ignore
        ]
        for name, other in against:
            ratios = {
                case: figures[case, ours] / value
                for case, impl in figures
                if impl == ours and (value := other(case))
            }
            if ratios:
                sentences.append(f"- {ours} / {name}: {_means(ratios)}")
    return "\n".join(sentences)


def _means(ratios: dict[str, float]) -> str:
    """``geometric mean 0.91 of 12 cases (d64 0.95, d128 0.88); least 0.80 at <case>``."""
    groups: dict[str, list[float]] = {}
    for case, ratio in ratios.items():
        groups.setdefault(head_dims(case), []).append(ratio)
    by_dim = ", ".join(f"d{d} {geometric_mean(g):.3f}" for d, g in groups.items() if d != "?")
    least = min(ratios, key=lambda case: ratios[case])
    return (
        f"geometric mean {geometric_mean(ratios.values()):.3f} of {len(ratios)} cases"
        f"{f' ({by_dim})' if by_dim else ''}; "
        f"least {ratios[least]:.3f} at {least}"
    )


def _best_peer(
    figures: dict[tuple[str, str], float], case: str, impls: Iterable[str]
) -> float | None:
    found = [figures[case, p] for p in impls if not is_ours(p) and (case, p) in figures]
    return max(found, default=None)


def head_dims(name: str) -> str:
    """The head dimensions of a case by its name, ``128`` or ``192/128``."""
    return next((word[1:] for word in name.split() if word[0] == "d" and word[1].isdigit()), "?")


def find_case(name: str) -> Case | None:
    """The case of any preset that has this name."""
    return next((case for case in PRESETS["all"] if case.name == name), None)


# Comparison ---------------------------------------------------------------------------------------


def compare(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Milliseconds before and after, their ratio (above 1: faster now), and means per contender."""
    old = {row.key: row for row in before}
    lines = []
    ratios: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in after:
        if row.key not in old:
            continue
        then = old[row.key]
        ratio = then.ms / row.ms
        ratios.setdefault((row.impl, row.direction, row.timing), {})[row.case] = ratio
        words = (row.case, row.direction, row.impl, row.timing)
        lines.append((*words, f"{then.ms:.4f}", f"{row.ms:.4f}", f"{ratio:.3f}"))
    if not lines:
        return "The two files have no figure in common.\n"
    commits = [", ".join(dict.fromkeys(r.commit for r in rows)) for rows in (before, after)]
    header = ("case", "pass", "impl", "timing", "ms before", "ms after", "before / after")
    means = [f"- {' '.join(key)}: {_means(group)}" for key, group in ratios.items()]
    parts = [f"before: {commits[0]}; after: {commits[1]}", markdown(header, lines)]
    return "\n\n".join([*parts, "\n".join(means)]) + "\n"
