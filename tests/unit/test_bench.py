"""The benchmark's arithmetic, files and adapters, without a GPU."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest

from bench import ceiling, results
from bench.cases import BACKWARD, EXTRAS, FORWARD, PASSES, Case, case
from bench.peers import PEERS, base, make_peer
from bench.presets import PRESETS
from bench.reference import TOLERANCE, error, is_off, make_tensors, outputs_of
from bench.results import COLUMNS, Row, compare, merge, read_csv, tables, write_csv
from bench.run import main

SMALL = [
    case(2, (4, 2), 48, (16, 16)),
    case(2, (4, 4), 48, (16, 8), "causal"),
    case(1, (2, 1), 48, (8, 16), "window", window=7),
    case(3, (2, 2), 48, (16, 16), "causal", lengths=(48, 1, 30)),
    case(3, (4, 1), 48, (16, 16), lengths=(5, 48, 17), dtype="fp16"),
    case(3, (4, 2), 48, (16, 8), "causal", lengths=(5, 48, 17), page=8),
    *(case(2, (4, 4), 48, (16, 16), "causal", extra=extra) for extra in EXTRAS[:-1]),
    case(3, (4, 2), 48, (16, 8), "causal", lengths=(5, 48, 17), extra="ragged"),
    Case("longer keys", 1, 2, 2, 20, 48, 16, 16, "causal"),
    Case("window, longer keys", 1, 2, 2, 20, 48, 16, 16, "window", window=30),
]
NAMES = [c.name for c in SMALL]


def attended(c: Case) -> np.ndarray:
    """(B, Sq, Skv): True where a query attends to a key."""
    keep = np.zeros((c.batch, c.seq_q, c.seq_kv), bool)
    for b in range(c.batch):
        n_q = c.seq_q if c.lengths is None else c.lengths[b]
        n_kv = c.seq_kv if c.lengths is None else c.lengths[b]
        for q in range(n_q):
            for k in range(n_kv):
                diagonal = q + n_kv - n_q
                causal = c.mask == "full" or k <= diagonal
                keep[b, q, k] = causal and (c.window is None or k > diagonal - c.window)
    return keep


@pytest.mark.parametrize("c", SMALL, ids=NAMES)
def test_flops(c: Case) -> None:
    """FLOP are two for each multiplication of an attended pair: 2 products forward, 5 backward."""
    pairs = int(attended(c).sum()) * c.heads_q
    assert c.area == pairs
    s, o = 2 * c.head_dim_qk * pairs, 2 * c.head_dim_v * pairs
    assert c.flops(FORWARD) == s + o
    s_again, dP, dV, dQ, dK = s, o, o, s, s
    assert c.flops(BACKWARD) == s_again + dP + dV + dQ + dK


def test_usual_flops() -> None:
    """For equal head dimensions the counts are the usual 4 and 10 times area times dimension."""
    c = case(4, (16, 16), 64, (128, 128))
    assert c.flops(FORWARD) == 4 * 4 * 16 * 64 * 64 * 128
    assert c.flops(BACKWARD) == 10 * 4 * 16 * 64 * 64 * 128
    assert c.tflops(FORWARD, 1.0) == pytest.approx(c.flops(FORWARD) / 1e9)
    assert c.kv_bytes == 4 * 16 * 64 * 128 * 2 * 2


def test_keys_that_are_not_as_many_as_queries() -> None:
    """The name says how many there are of each, and a causal mask ends in the corner of both."""
    c = case(1, (16, 2), 64, (128, 128), "causal", keys=1024)
    assert c.name == "b1 h16/2 s64/1024 d128 causal"
    assert (c.seq_q, c.seq_kv, c.area) == (64, 1024, 16 * sum(range(1024 - 63, 1025)))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str) -> None:
    """Names of cases are unique, and say what the case is."""
    cases = PRESETS[preset]
    assert cases
    assert len({c.name for c in cases}) == len(cases)
    assert len({dataclasses.replace(c, name="") for c in cases}) == len(cases)
    for c in cases:
        assert c in PRESETS["all"]
        assert "," not in c.name
        assert results.head_dims(c.name).split("/")[0] == str(c.head_dim_qk)
        assert results.find_case(c.name) == c


def test_dense_holds_the_same_work() -> None:
    """Dense cases of equal heads hold 16384 tokens of width 2048; foundation is part of dense."""
    for c in PRESETS["dense"]:
        if c.heads_q == c.heads_kv:
            assert (c.batch * c.seq_q, c.heads_q * c.head_dim_qk) == (16384, 2048)
    assert len(PRESETS["dense"]) == 34
    assert set(PRESETS["foundation"]) < set(PRESETS["dense"])


def test_cases_that_contradict_themselves() -> None:
    """A window needs its mask, and lengths need one for each batch entry."""
    with pytest.raises(ValueError, match="window"):
        case(1, (1, 1), 8, (8, 8), "causal", window=4)
    with pytest.raises(ValueError, match="2 lengths"):
        case(1, (1, 1), 8, (8, 8), lengths=(8, 8))
    with pytest.raises(ValueError, match="whole pages"):
        case(1, (1, 1), 24, (8, 8), lengths=(8,), page=16)


@pytest.mark.parametrize("c", SMALL, ids=NAMES)
def test_reference_and_dlattn_adapter(c: Case) -> None:
    """The check's float32 attention and dlattn's graphs (on the reference engine) agree."""
    pytest.importorskip("torch")
    tensors = make_tensors(c, PASSES, device="cpu")
    for direction in PASSES:
        prepared = make_peer("dlattn").prepare(c, tensors, direction)
        outputs = prepared.outputs(prepared.call())
        for name, output in zip(outputs_of(c, direction), outputs, strict=True):
            expected = tensors.expected[name]
            assert expected.shape == output.shape
            assert not is_off(c, error(output, expected, tensors.lengths)), name
        assert prepared.note == "reference"


def test_reference_sees_what_is_wrong() -> None:
    """An output with NaN, or with one key too many, is beyond the tolerance."""
    torch = pytest.importorskip("torch")
    c = case(1, (2, 2), 64, (16, 16), "causal")
    right = make_tensors(c, (FORWARD,), device="cpu").expected["o"]
    full = dataclasses.replace(c, mask="full")
    assert error(make_tensors(full, (FORWARD,), "cpu").expected["o"], right, None) > TOLERANCE
    spoiled = right.clone()
    spoiled[0, 5, 0, 0] = torch.nan
    assert not error(spoiled, right, None) < TOLERANCE


# Adapters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PEERS, "dlattn:sm80", "dlattn:bwd_sm80"])
def test_absent_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender whose modules are absent says which, and is not prepared."""
    monkeypatch.setattr(base, "has_module", lambda module: False)
    reason = make_peer(name).supports(PRESETS["gpt2"][0], BACKWARD)
    assert reason == f"{name} needs the Python module torch, which is not installed."


def test_flash_attention_3_without_binary(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Without a package or a folder of binaries, the sentence names both ways."""
    pytest.importorskip("torch")
    monkeypatch.setenv("PEERS", str(tmp_path))
    reason = make_peer("fa3").supports(PRESETS["gpt2"][0], FORWARD)
    assert reason is not None
    assert "flash_attn_3" in reason and "PEERS" in reason
    assert reason.endswith(".")


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a contender cannot do is a sentence of its own; what it can is None."""
    monkeypatch.setattr(base, "has_module", lambda module: True)
    window = PRESETS["window"][0]
    padded = next(c for c in PRESETS["padding"] if c.lengths)
    mla, dense = PRESETS["mla"][0], PRESETS["dense"][0]
    fixed = next(c for c in PRESETS["deterministic"] if c.deterministic)
    refused = [
        ("torch_cudnn", window, "windows"),
        ("fa2", padded, "lengths"),
        ("fa2", mla, "equal head dimensions"),
        ("fa2", fixed, "order of additions"),
        ("fa2", SMALL[-2], "top left"),
        ("fa3", SMALL[5], "no pages"),
        ("dlattn:bwd_sm80", dense, "forward pass"),
    ]
    for name, c, words in refused:
        assert words in (make_peer(name).supports(c, FORWARD) or "")
    assert "that of fa3" in (make_peer("fa3_splits").supports(dense, BACKWARD) or "")
    for name, c in (("fa2", window), ("cudnn", padded), ("dlattn:sm80", mla), ("flex", dense)):
        assert make_peer(name).supports(c, FORWARD) is None


def test_engine_is_asked_for_while_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """``dlattn:<engine>`` sets DLATTN_ENGINE while a graph is built, and then restores it."""
    import os

    monkeypatch.setenv("DLATTN_ENGINE", "before")
    for name, plan in (("dlattn:sm80", "bwd_sm80"), ("dlattn:bwd_sm90", "bwd_sm90")):
        with make_peer(name).building(BACKWARD):
            assert os.environ["DLATTN_ENGINE"] == plan
        assert os.environ["DLATTN_ENGINE"] == "before"
    monkeypatch.delenv("DLATTN_ENGINE")
    with make_peer("dlattn").building(FORWARD):
        assert "DLATTN_ENGINE" not in os.environ


def test_unknown_contender() -> None:
    """An unknown name is refused with those that are known."""
    for name in ("fa5", "fa2:sm80"):
        with pytest.raises(ValueError, match="known: dlattn, fa2"):
            make_peer(name)


# Results ------------------------------------------------------------------------------------------


def row(name: str, impl: str, ms: float, timing: str = "eager", commit: str = "abc") -> Row:
    found = results.find_case(name)
    assert found is not None
    return Row(
        name, FORWARD, impl, timing, ms, round(found.tflops(FORWARD, ms), 2), commit, "2026-01-02"
    )


A, B = "b16 h32/32 s1024 d64 full", "b4 h16/16 s4096 d128 causal"
ROWS = [
    row(A, "dlattn", 0.4),
    row(A, "fa3", 0.5),
    row(A, "cudnn", 0.8),
    row(B, "dlattn", 0.5),
    row(B, "fa3", 0.25),
]


def test_csv_round_trip(tmp_path) -> None:
    """What is written is read back, under exactly the documented columns."""
    path = tmp_path / "gpu" / "dense.csv"
    write_csv(path, ROWS)
    first = path.read_text().splitlines()[0]
    assert first == "case,pass,impl,timing,ms,tflops,commit,date" == ",".join(COLUMNS)
    assert read_csv(path) == ROWS
    path.write_text("case,ms\n")
    with pytest.raises(ValueError, match="expected the columns"):
        read_csv(path)


def test_merge() -> None:
    """Measuring a setting again replaces all its contenders, and nothing else."""
    again = [row(A, "dlattn", 0.3)]
    assert merge(ROWS, again) == [r for r in ROWS if r.case == B] + again
    graph = [row(A, "dlattn", 0.3, "graph")]
    assert merge(ROWS, graph) == ROWS + graph


def test_tables() -> None:
    """Tables show TFLOP/s, ours over the best peer, means by head dimension, and the least."""
    text = tables(ROWS, wrong=[(B, FORWARD, "cudnn")])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert "### forward, eager (TFLOP/s)" in text
    assert ["case", "dlattn", "fa3", "cudnn", "dlattn / best peer"] in lines
    first = [f"{ROWS[i].tflops:.0f}" for i in range(3)]
    assert [A, *first, "1.250"] in lines
    assert [B, f"{ROWS[3].tflops:.0f}", f"{ROWS[4].tflops:.0f}", "WRONG", "0.500"] in lines
    assert (
        f"dlattn / best peer: geometric mean {(1.25 * 0.5) ** 0.5:.3f} of 2 cases "
        f"(d64 1.250, d128 0.500); least 0.500 at {B}"
    ) in text
    assert "dlattn / cudnn: geometric mean 2.000 of 1 cases" in text
    widths = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_tables_without_peers_or_rows() -> None:
    """Nothing to divide by is a dash, and no rows are no table."""
    text = tables(ROWS[:1])
    assert results.ABSENT in text
    assert "geometric" not in text
    assert tables([]).strip() == ""


def test_compare(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files are compared where they have a figure in common; above 1 is faster now."""
    paths = [tmp_path / "before.csv", tmp_path / "after.csv"]
    write_csv(paths[0], ROWS)
    write_csv(paths[1], [row(A, "dlattn", 0.2, commit="def"), row(A, "fa2", 1.0)])
    assert main(["--compare", *map(str, paths)]) == 0
    text = capsys.readouterr().out
    assert "before: abc; after: abc" not in text
    assert "before: abc; after: def" in text
    line = next(x for x in text.splitlines() if x.startswith("| b16"))
    assert [c.strip() for c in line.strip("|").split("|")][-3:] == ["0.4000", "0.2000", "2.000"]
    assert "fa2" not in text.split("before / after")[1]
    assert "no figure in common" in compare(ROWS, [])


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Cases can be listed and chosen by the words of their names; mistakes are refused."""
    assert main(["--list", "--preset", "dense", "--match", "d64 causal"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    for wrong in (["--pass", "sideways"], ["--peers", "fa9"], ["--timing", "eager,later"]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert "known: dlattn" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_ceiling_compiles(dtype: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel compiles for Hopper, with its accumulators in registers, if NVRTC is there."""
    from dlattn.errors import CompileError
    from dlattn.runtime import jit, nvrtc

    monkeypatch.setenv("DLATTN_CACHE_DIR", str(tmp_path))
    try:
        nvrtc.load(tmp_path)
    except CompileError as missing:
        pytest.skip(str(missing))
    kernel = jit.compile_kernel(ceiling.source(dtype), "sm_90a")
    assert (kernel.stack, kernel.spill_stores, kernel.warnings) == (0, 0, ())
    assert kernel.registers > 64


def test_ceiling_source_is_complete() -> None:
    """No placeholder is left, and the operands are numbered to the last."""
    text = ceiling.source().text
    assert "@" not in text
    assert "%63}, %64, %65, 1, 1, 1, 0, 0;" in text


@pytest.mark.parametrize(
    "command", ["ceiling", "forms", "host", "tune_ragged", "tune_sm80", "tune_sm90 forward"]
)
def test_commands_say_that_they_need_a_gpu(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence, and fail."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, *arguments = command.split()
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit, match=rf"bench\.{name} needs a CUDA device; there is none\."):
        importlib.import_module(f"bench.{name}").main()
