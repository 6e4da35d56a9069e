"""What ``bench.run`` knows by name: the presets of cases, and other measures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from bench import decode, host, score_mod, serving, starts
from bench.jobs import CaseJob, Job
from bench.presets import PRESETS, telling_first


def _suites() -> dict[str, tuple[Job, ...]]:
    jobs = {c.name: CaseJob(c) for c in PRESETS["all"]}
    of_cases = {name: cases for name, cases in PRESETS.items() if name != "all"}
    return {
        **{name: tuple(jobs[c.name] for c in telling_first(cs)) for name, cs in of_cases.items()},
        "decode": tuple(decode.jobs()),
        "serving": tuple(serving.jobs()),
        "host": (host.HostJob(),),
        "start": (starts.StartJob(),),
        "score_mod": tuple(score_mod.jobs()),
    }


#: By preset, those that say most first.
SUITES = _suites()
#: What charts show; a run measures these first.
CHARTED = ("dense", "features", "host", "decode", "start", "head_dims", "score_mod")


def in_turn(names: Sequence[str]) -> list[Job]:
    """The jobs of some suites, one of each at a time, those of charts first; each case once."""
    found: dict[tuple[str, ...], Job] = {}
    others = [name for name in names if name not in CHARTED]
    for group in ([name for name in CHARTED if name in names], others):
        for jobs in zip_longest(*(SUITES[name] for name in group)):
            for job in jobs:
                if job is not None:
                    found.setdefault(job.cases, job)
    return list(found.values())
