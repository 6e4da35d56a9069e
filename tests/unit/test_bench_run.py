"""Measuring and running, with the GPU and the contenders faked."""

from __future__ import annotations

import contextlib
import functools

import pytest

from bench import measure, run
from bench.cases import BACKWARD, FORWARD, PASSES, Case, case
from bench.jobs import CaseJob, Job, Named
from bench.peers import Peer, Prepared
from bench.reference import OUTPUTS, make_tensors
from bench.results import read_csv

CASES = (
    case(2, (4, 2), 48, (16, 16)),
    case(2, (4, 4), 48, (16, 8), "causal"),
    case(1, (2, 1), 48, (8, 16), "window", window=7),
)


def jobs(cases: tuple[Case, ...]) -> tuple[CaseJob, ...]:
    return tuple(map(CaseJob, cases))


class Fake(Peer):
    """Answers right, wrong, with an exception, or not at all."""

    def __init__(self, name: str, factor: float = 1.0, raises: str = "") -> None:
        self.name, self._factor, self._raises = name, factor, raises

    def refuses(self, case: Case, direction: str) -> str | None:
        return "It is shy." if self.name == "shy" else None

    def prepare(self, case: Case, tensors, direction: str) -> Prepared:  # type: ignore
        if self._raises:
            raise RuntimeError(self._raises)
        made = tuple(tensors.expected[name] * self._factor for name in OUTPUTS[direction])
        return Prepared(lambda: made, lambda outputs: outputs, note="a plan")


@pytest.fixture
def faked_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, and times that depend on the contender's name."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(measure, "make_tensors", functools.partial(make_tensors, device="cpu"))
    monkeypatch.setattr(measure, "side_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure, "capture", lambda call: (call, 10))
    monkeypatch.setattr(
        measure, "interleaved", lambda calls, **_: {name: float(len(name)) for name in calls}
    )


@pytest.mark.usefixtures("faked_gpu")
def test_measure() -> None:
    """Only right contenders are timed; the others are wrong, or left out with the reason."""
    peers = [Fake("right"), Fake("wrong", 1.1), Fake("raising", raises="no\nluck"), Fake("shy")]
    both = list(measure.measure(CASES[1], PASSES, peers))
    assert [m.direction for m in both] == list(PASSES)
    for m in both:
        assert m.ms == {"eager": {"right": 5.0}, "graph": {"right": 0.5}}
        assert list(m.wrong) == ["wrong"]
        assert m.left_out == {"raising": "RuntimeError: no luck", "shy": "It is shy."}
    assert "o is off by 1.0e-01" == both[0].wrong["wrong"]


@pytest.mark.usefixtures("faked_gpu")
def test_capture_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be captured is still timed eagerly."""

    def refuse(call: object) -> tuple[object, int]:
        raise RuntimeError("synchronises")

    monkeypatch.setattr(measure, "capture", refuse)
    (m,) = measure.measure(CASES[0], [FORWARD], [Fake("fa9")])
    assert m.ms == {"eager": {"fa9": 3.0}, "graph": {}}
    assert m.left_out == {"fa9 (graph)": "RuntimeError: synchronises"}


@pytest.mark.usefixtures("faked_gpu")
def test_run(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """A run writes CSV and Markdown, says what went wrong, and fails when dlattn is wrong."""
    import torch

    fakes = {"dlattn": Fake("dlattn"), "fa2": Fake("fa2"), "fa3": Fake("fa3", raises="ill")}
    monkeypatch.setattr(run, "make_peer", lambda name: fakes[name])
    monkeypatch.setattr(run, "machine", lambda: "a machine")
    monkeypatch.setitem(run.SUITES, "dense", jobs(CASES[:2]))
    monkeypatch.setattr(run, "draw_all", lambda folder: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("DLATTN_COMMIT", "c0ffee")
    arguments = ["--peers", "dlattn,fa2,fa3", "--out", str(tmp_path)]
    assert run.main(arguments) == 0
    said = capsys.readouterr().out
    assert "left out: fa3: RuntimeError: ill" in said
    assert "fa3 (4 cases): RuntimeError: ill" in said
    assert "dlattn forward: a plan (2 cases)" in said
    rows = read_csv(tmp_path / "dense.csv")
    assert len(rows) == 2 * 2 * 2 * 2  # cases, passes, timings, contenders
    assert {r.commit for r in rows} == {"c0ffee"}
    text = (tmp_path / "dense.md").read_text()
    assert text.startswith("a machine") and "### backward, graph (TFLOP/s)" in text
    fakes["dlattn"] = Fake("dlattn", float("nan"))
    assert run.main([*arguments, "--pass", "forward"]) == 1
    assert "WRONG" in capsys.readouterr().out
    again = read_csv(tmp_path / "dense.csv")
    assert {(r.direction, r.impl) for r in again} == {
        (FORWARD, "fa2"), (BACKWARD, "fa2"), (BACKWARD, "dlattn")
    }  # fmt: skip


@pytest.mark.usefixtures("faked_gpu")
def test_lost_device(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """A contender that breaks the CUDA context ends the run by name; results stay on disk."""
    import torch

    def broken(*_: object) -> None:
        raise RuntimeError("illegal memory access")

    class Crashing(Fake):
        def prepare(self, case: Case, tensors, direction: str) -> Prepared:  # type: ignore
            if case is CASES[1]:
                monkeypatch.setattr(torch.cuda, "synchronize", broken)
                broken()
            return super().prepare(case, tensors, direction)

    monkeypatch.setattr(run, "make_peer", {"fa2": Fake("fa2"), "fa3": Crashing("fa3")}.get)
    monkeypatch.setattr(run, "machine", lambda: "a machine")
    monkeypatch.setitem(run.SUITES, "dense", jobs(CASES))
    monkeypatch.setattr(run, "draw_all", lambda folder: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.main(["--peers", "fa2,fa3", "--out", str(tmp_path), "--pass", "forward"]) == 1
    assert f"fa3 broke the CUDA context on {CASES[1].name}" in capsys.readouterr().out
    assert {r.case for r in read_csv(tmp_path / "dense.csv")} == {CASES[0].name}


@pytest.fixture
def two_presets(monkeypatch: pytest.MonkeyPatch, faked_gpu: None) -> dict[str, Fake]:
    """Presets that share a case, one of them with a measure that is no attention's."""
    import torch

    class Calls(Job):
        cases, passes = ("a call", "another"), (FORWARD,)

        def measure(self, directions, peers, effort):  # type: ignore
            for name in self.cases:
                yield measure.Measured(Named(name), FORWARD, {"host": {"dlattn": 0.0125}})

    fakes = {"dlattn": Fake("dlattn"), "fa2": Fake("fa2")}
    first, second, third = jobs(CASES)
    suites = {"dense": (first, second), "window": (second, third), "host": (Calls(),)}
    monkeypatch.setattr(run, "make_peer", fakes.get)
    monkeypatch.setattr(run, "machine", lambda: "a machine")
    monkeypatch.setattr(run, "draw_all", lambda folder: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("DLATTN_COMMIT", "c0ffee")
    for name, of_name in suites.items():
        monkeypatch.setitem(run.SUITES, name, of_name)
    return fakes


def test_presets_take_turns(two_presets: object, tmp_path, capsys) -> None:
    """Every preset has its own files, and a case of two is measured once and is in both."""
    arguments = ["--peers", "dlattn,fa2", "--out", str(tmp_path), "--preset", "window,dense,host"]
    assert run.main([*arguments, "--quick"]) == 0
    said = capsys.readouterr().out
    assert said.count(f"] {CASES[1].name} forward: dlattn") == 1
    assert "a call forward: dlattn 12.5 us" in said
    of_file = {
        name: {row.case for row in read_csv(tmp_path / f"{name}.csv")}
        for name in ("dense", "window", "host")
    }
    assert of_file == {
        "dense": {c.name for c in CASES[:2]},
        "window": {c.name for c in CASES[1:]},
        "host": {"a call", "another"},
    }
    assert {row.timing for row in read_csv(tmp_path / "dense.csv")} == {"graph"}
    assert "### forward, host (us)" in (tmp_path / "host.md").read_text()


def test_resume(two_presets: dict[str, Fake], monkeypatch, tmp_path, capsys) -> None:
    """What a commit's results have is not measured again; what another commit's have, is."""
    arguments = ["--peers", "dlattn,fa2", "--out", str(tmp_path), "--preset", "dense,window"]
    assert run.main([*arguments, "--match", CASES[0].name, "--timing", "eager"]) == 0
    capsys.readouterr()
    assert run.main([*arguments, "--resume", "--timing", "eager"]) == 0
    said = capsys.readouterr().out
    assert f"] {CASES[0].name}" not in said
    assert f"] {CASES[1].name} forward" in said and f"] {CASES[2].name} forward" in said
    # A timing that is missing, and a commit that is another one, are measured.
    assert run.main([*arguments, "--resume", "--match", CASES[0].name]) == 0
    assert f"] {CASES[0].name} forward" in capsys.readouterr().out
    monkeypatch.setenv("DLATTN_COMMIT", "facade")
    assert run.main([*arguments, "--resume", "--match", CASES[0].name]) == 0
    assert f"] {CASES[0].name} backward" in capsys.readouterr().out
    monkeypatch.setenv("DLATTN_COMMIT", "unknown")
    assert run.main([*arguments, "--resume", "--match", CASES[0].name]) == 0
    assert "--resume needs a commit" in capsys.readouterr().out


def test_budget(two_presets: object, monkeypatch, tmp_path, capsys) -> None:
    """A run stops before the case that would be late, says what is left, and can be resumed."""
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(run.time, "perf_counter", lambda: float(next(clock)))
    arguments = ["--peers", "dlattn", "--out", str(tmp_path), "--preset", "dense,window"]
    assert run.main([*arguments, "--budget", "10"]) == 0
    said = capsys.readouterr().out
    assert "Out of time after" in said and "left out 2 of 3" in said
    assert f"--resume goes on with: {CASES[1].name}, {CASES[2].name}" in said
    assert run.main([*arguments, "--resume"]) == 0
    assert {row.case for row in read_csv(tmp_path / "window.csv")} == {c.name for c in CASES[1:]}


def test_precompile(two_presets: object, monkeypatch, tmp_path, capsys) -> None:
    """Every pass of every job is compiled before the first is measured; failures show later."""
    import dlattn

    compiled = []

    def compile_one(job: CaseJob, direction: str, device: str) -> None:
        compiled.append((job.name, direction, device))
        raise RuntimeError("cannot")

    monkeypatch.setattr(CaseJob, "compile", compile_one)
    monkeypatch.setattr(run, "has_module", lambda module: module == "torch" or module == "cupy")
    monkeypatch.setattr(dlattn, "create_device_properties", "device {}".format)
    arguments = ["--peers", "dlattn", "--out", str(tmp_path), "--preset", "dense"]
    assert run.main([*arguments, "--precompile", "2"]) == 0
    assert sorted(compiled) == sorted((c.name, d, "device 0") for c in CASES[:2] for d in PASSES)
    assert "kernels compiled ahead" in capsys.readouterr().out
