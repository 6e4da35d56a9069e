"""What is measured beside cases, at small sizes on the CPU; and the charts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import decode, host, plots, score_mod, serving
from bench.cases import FORWARD, PASSES, case
from bench.decode import CONTENDERS, Data, Row, complaint, reference
from bench.presets import MODELS, PRESETS
from bench.reference import error, is_off, make_tensors, outputs_of
from bench.results import BANDWIDTH, MS, TFLOPS, US, decode_bytes, tables, unit_of, write_csv
from bench.results import Row as Figure
from bench.suites import SUITES, in_turn

RESULTS = Path(decode.__file__).parent / "results"


# Suites -------------------------------------------------------------------------------------------


def test_suites() -> None:
    """Every preset is a suite; all of them together have each case once."""
    assert set(PRESETS) - {"all"} < set(SUITES)
    jobs = in_turn(list(SUITES))
    names = [name for job in jobs for name in job.cases]
    assert len(set(names)) == len(names)
    assert {c.name for c in PRESETS["all"]} < set(names)
    assert {job.name for suite in ("decode", "serving") for job in SUITES[suite]} < set(names)
    assert "s4096" in jobs[0].name and jobs[1] in SUITES["features"]


def test_cases_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Without a GPU or tensors, a case's kernels are those that its graph on a device asks for."""
    pytest.importorskip("torch")
    import dlattn
    from dlattn.errors import CompileError
    from dlattn.runtime import jit, nvrtc

    try:
        nvrtc.load(tmp_path)
    except CompileError as missing:
        pytest.skip(str(missing))
    asked = []
    monkeypatch.setattr(
        jit, "compile_kernels", lambda sources, *_: asked.extend(sources) or _stop()
    )
    device = dlattn.create_device_properties("sm_90a")
    (job,) = (j for j in SUITES["features"] if j.name.endswith("ragged"))
    with pytest.raises(_Stop):
        job.compile(FORWARD, device)
    assert any("fwd_sm90" in source.name for source in asked)


class _Stop(Exception):
    pass


def _stop() -> None:
    raise _Stop


@pytest.mark.parametrize("extra", ["softcap", "alibi"])
def test_functions_of_scores(extra: str) -> None:
    """dlattn's functions compute what FlexAttention's are asked for."""
    pytest.importorskip("torch")
    c = case(2, (4, 4), 48, (16, 16), "causal", extra=extra)
    tensors = make_tensors(c, PASSES, device="cpu")
    for direction in PASSES:
        prepared = score_mod.Own().prepare(c, tensors, direction)
        outputs = prepared.outputs(prepared.call())
        for name, output in zip(outputs_of(c, direction), outputs, strict=True):
            assert not is_off(c, error(output, tensors.expected[name], None)), name


# Decoding, serving, host time ---------------------------------------------------------------------

DECODES = [
    Row(2, (4, 2), 64, head_dim=16),
    Row(2, (4, 4), 64, page=16, head_dim=16),
    Row(2, (4, 2), 64, head_dim=16, lengths=True),
    Row(4, (4, 2), 64, page=16, head_dim=16, uneven=True),
    Row(1, (4, 2), 64, queries=3, head_dim=16),
    Row(3, (2, 1), 64, queries=3, page=8, head_dim=16),
]


@pytest.mark.parametrize("row", DECODES, ids=lambda row: row.name)
def test_decode(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy's call is right, and a wrong output is a complaint."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(decode, "COPIES", 2)
    torch.manual_seed(0)
    data = Data(row, "cpu")
    calls, expected = CONTENDERS["dlattn"](row, data), reference(row, data)
    assert len(calls) == len(data.q) == 2
    assert complaint(data, calls[0], expected) == ""
    assert "off by" in complaint(data, calls[1], expected)  # of other tensors


def test_decode_is_counted_by_bytes() -> None:
    """A name says how many bytes of keys and values are read, and so the unit is bandwidth."""
    for row in decode.ROWS:
        assert decode_bytes(row.name) == row.bytes
    assert Row(8, (64, 8), 8192).bytes == 8 * 8192 * 8 * 128 * 2 * 2
    assert decode_bytes("b4 h16/16 s4096 d128 causal") == 0
    row = Row(1, (4, 4), 64, queries=2, head_dim=16)
    assert row.tflops(FORWARD, 1.0) == pytest.approx(4 * 4 * (64 + 63) * 16 / 1e9)


@pytest.mark.parametrize("page", [None, 16])
def test_serving(page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's call is right, and a wrong output is a complaint."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(serving, "BATCHES", {"few": ((1, 20), (5, 5), (70, 90))})
    torch.manual_seed(0)
    row = serving.Row("few", (4, 2), page, head_dim=16)
    data = serving.Data(row, "cpu")
    assert serving.complaint(row, data, serving.dlattn_call(row, data)) == ""
    others = serving.Data(row, "cpu").q.clone()
    assert "off by" in serving.complaint(row, data, lambda: data.o.copy_(others))
    pairs = 20 + (1 + 2 + 3 + 4 + 5) + sum(range(21, 91))
    assert row.tflops(FORWARD, 1.0) == pytest.approx(4 * 4 * pairs * 16 / 1e9)


def test_host_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that needs no GPU runs; all have a case of the job's."""
    pytest.importorskip("torch")
    monkeypatch.setattr(host, "DEVICE", "cpu")
    for make in (host.execute, host.functions, host.differentiable, host.add_one):
        for (name, _), call in make().items():
            call()
            assert name in host.HostJob.cases


# Units, charts ------------------------------------------------------------------------------------


def figure(name: str, impl: str, ms: float, timing: str = "graph", tflops: float = 0.0) -> Figure:
    return Figure(name, FORWARD, impl, timing, ms, tflops, "abc", "2026-01-02")


EVERYTHING = [
    figure("sdpa", "dlattn", 0.02, "host"),
    figure("sdpa", "torch", 0.03, "host"),
    figure("warm cache", "dlattn", 50.0, "start"),
    figure("import", "dlattn", 40.0, "start"),
    *(
        figure(f"b{batch} h64/8 s8192 q1 d128", impl, batch * 0.01 + 0.001 * i)
        for batch in (1, 8, 64)
        for i, impl in enumerate(("dlattn", "fa3"))
    ),
    *(
        figure(f"b4 h16/16 s4096 d128 causal{extra}", impl, 1.0, tflops=500.0 + i)
        for extra in ("", " alibi", " softcap", " sink", " softcap score_mod")
        for i, impl in enumerate(("dlattn", "flex"))
    ),
    *(
        figure(f"b{16384 // s} h{2048 // d}/{2048 // d} s{s} d{d} full", "dlattn", 1.0, tflops=s)
        for s in (512, 1024, 4096)
        for d in (64, 128)
    ),
    *(
        figure(layer.name, impl, 1.0, tflops=500.0 + i)
        for layer in MODELS.values()
        for i, impl in enumerate(("dlattn", "fa3"))
    ),
]


def test_units() -> None:
    """Each measure has its own unit, and a table of its own; ratios are of speeds in all."""
    assert [unit_of(EVERYTHING[i]) for i in (0, 2, 4, -1)] == [US, MS, BANDWIDTH, TFLOPS]
    assert BANDWIDTH.of(EVERYTHING[4]) == pytest.approx(8192 * 8 * 128 * 4 / 0.01 * 1e-9)
    text = tables(EVERYTHING)
    for title in ("host (us)", "start (ms)", "graph (TB/s)", "graph (TFLOP/s)"):
        assert f"### forward, {title}" in text
    line = next(x for x in text.splitlines() if x.startswith("| sdpa"))
    assert [c.strip() for c in line.strip("|").split("|")] == ["sdpa", "20.00", "30.00", "1.500"]
    assert "best peer / dlattn" in text and "dlattn / best peer" in text


def test_charts(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is a chart of everything that there are figures of, and of nothing else."""
    pytest.importorskip("matplotlib")
    write_csv(tmp_path / "h200" / "some.csv", EVERYTHING)
    (tmp_path / "h200" / "other.csv").write_text("not,ours\n")
    drawn = {path.stem for path in plots.draw_folder(tmp_path / "h200", tmp_path / "charts")}
    made = {path.stem for path in (tmp_path / "charts").glob("*.png")}
    of_kernels = {"speed-forward", "head-dims", "decode", "features", "score-mod", "models"}
    assert drawn == made == of_kernels | {"host", "start"}
    assert plots.main([str(tmp_path)]) == 1
    assert plots.main([str(tmp_path / "nowhere")]) == 2
    assert "bench.plots" in capsys.readouterr().out


def test_settings_of_several_files(tmp_path) -> None:
    """Of a setting in several files, the newest with dlattn's figure is shown, as a whole."""
    name = "b4 h16/16 s4096 d128 full"
    old = [figure(name, "dlattn", 2.0), figure(name, "fa2", 3.0)]
    new = [Figure(name, FORWARD, "dlattn", "graph", 1.0, 1.0, "def", "2026-02-02")]
    newest = [Figure(name, FORWARD, "fa2", "graph", 1.0, 1.0, "fed", "2026-03-02")]
    for file, rows in (("a", old), ("b", new), ("c", newest)):
        write_csv(tmp_path / f"{file}.csv", rows)
    assert plots.rows_of(tmp_path) == new


@pytest.mark.parametrize("folder", sorted(p for p in RESULTS.iterdir() if p.is_dir()))
def test_stored_results(folder: Path) -> None:
    """What is stored can be read, and its names are those of charts."""
    assert plots.rows_of(folder)
    for name in ("b4 h16/16 s4096 d192/128 causal page4", "b1 h1/1 s8 d8 full"):
        words = plots.words_of(name)
        assert words is not None and words.seq == int(name.split()[2][1:])
    assert plots.words_of("b1 h64/8 s8192 q1 d128") is None
    assert plots.words_of("execute") is None
