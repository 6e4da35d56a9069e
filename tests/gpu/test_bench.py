"""What the benchmark measures on a GPU is right, and compiled ahead of it."""

from __future__ import annotations

import dataclasses

import pytest

import dlattn
from bench import decode, host, score_mod
from bench.cases import EXTRAS, PASSES, case
from bench.jobs import CaseJob, Effort, Job
from bench.peers import make_peer
from dlattn.runtime import jit

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

EFFORT = Effort(1, 1e-3, ("eager", "graph"))
LENGTHS = (256, 100, 3)
SHAPE = (2, (4, 4), 256, (64, 64), "causal")
CASES = [
    *(case(*SHAPE, extra=extra) for extra in EXTRAS if extra != "ragged"),
    case(3, (4, 2), 256, (64, 64), "causal", lengths=LENGTHS, extra="ragged"),
    case(3, (4, 2), 256, (64, 64), "causal", lengths=LENGTHS, page=16),
    case(*SHAPE, deterministic=True),
]
JOBS: list[Job] = [
    *map(CaseJob, CASES),
    *(
        score_mod.ScoreModJob(dataclasses.replace(c, name=f"{c.name} score_mod"))
        for c in CASES
        if c.extra in ("softcap", "alibi")
    ),
    *(decode.DecodeJob(decode.Row(3, (8, 2), 512, queries, page)) for queries in (1, 4)
      for page in (None, 16)),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_jobs(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """dlattn is right and timed in every way; nothing is compiled but ahead."""
    monkeypatch.setenv("DLATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(score_mod, "Flex", score_mod.Own)  # torch would compile for seconds
    jit.forget()
    device = dlattn.create_device_properties(0)
    for direction in job.passes:
        job.compile(direction, device)
    ahead = jit.statistics.compiles
    assert ahead
    for measured in job.measure(job.passes, [make_peer("dlattn")], EFFORT):
        assert not measured.wrong and not measured.left_out
        assert set(measured.ms) == set(job.timings)
        assert all(times["dlattn"] > 0 for times in measured.ms.values())
    assert jit.statistics.compiles == ahead


def test_host() -> None:
    """Every call of the host's job is timed; torch's own beside dlattn's."""
    found = {m.case.name: m for m in host.HostJob().measure(PASSES, (), EFFORT)}
    assert not any(m.left_out for m in found.values())
    assert set(found) == set(host.HostJob.cases)
    assert set(found["sdpa, both passes"].ms["host"]) == {"dlattn", "torch"}
