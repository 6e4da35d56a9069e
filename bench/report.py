"""The results of one preset: its file of rows, and the text beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.measure import Measured
from bench.results import Row, merge, read_csv, tables, write_csv


class Report:
    """Rows that are on disk as soon as they are measured, and what else there is to say.

    Args:
        path: of the CSV file; the Markdown file has the same name.
        cases: those that belong here.
    """

    def __init__(self, path: Path, cases: Iterable[str]) -> None:
        self.path, self._cases = path, set(cases)
        self._old = read_csv(path) if path.exists() else []
        self._new: list[Row] = []
        self._wrong: dict[tuple[str, str, str], str] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._notes: Counter[tuple[str, str, str]] = Counter()

    @property
    def rows(self) -> list[Row]:
        """Of this run and of earlier ones."""
        return merge(self._old, self._new)

    @property
    def is_wrong(self) -> tuple[str, ...]:
        """Contenders with wrong outputs."""
        return tuple(impl for _, _, impl in self._wrong)

    def has(self, case: str, direction: str, timings: Sequence[str], commit: str) -> bool:
        """Whether a commit's figures are on disk already.

        Args:
            timings: all that are wanted; empty for any.
        """
        there = {
            r.timing
            for r in self.rows
            if (r.case, r.direction, r.commit) == (case, direction, commit)
        }
        return bool(there) and there >= set(timings)

    def take(self, measured: Measured, rows: Sequence[Row]) -> None:
        """Records one pass of a case, if it belongs here."""
        case, direction = measured.case.name, measured.direction
        if case not in self._cases:
            return
        self._new += rows
        for impl, what in measured.wrong.items():
            self._wrong[case, direction, impl] = what
        self._left_out.update((impl, reason) for impl, reason in measured.left_out.items())
        self._notes.update((impl, direction, note) for impl, note in measured.notes.items())
        if rows:
            write_csv(self.path, self.rows)

    def write(self, machine: str) -> None:
        """The text beside the rows, once there are any of this run."""
        if self._new:
            text = f"{machine}\n\n{self.text()}"
            self.path.with_suffix(".md").write_text(text, encoding="utf-8")

    def text(self) -> str:
        """Tables of all rows with their commits; of this run: what ran, was wrong, was left out."""
        commits: dict[tuple[str, str], int] = Counter((r.commit, r.date) for r in self.rows)
        parts = [tables(self.rows, self._wrong)]
        for title, lines in (
            ("Figures", [f"{n} of commit {c}, {d}" for (c, d), n in commits.items()]),
            ("Ran", [f"{i} {d}: {n} ({c} cases)" for (i, d, n), c in self._notes.items()]),
            ("Wrong", [f"{' '.join(key)}: {what}" for key, what in self._wrong.items()]),
            ("Left out", [f"{i} ({c} cases): {r}" for (i, r), c in self._left_out.items()]),
        ):
            if lines:
                parts.append(f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
        return "\n".join(parts)
