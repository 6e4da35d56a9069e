"""The commands of ``python -m dlattn``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dlattn
from dlattn import config
from dlattn.cli import demo, machine, main
from dlattn.errors import CompileError
from dlattn.runtime import nvrtc

SMALL = ["demo", "--device", "cpu", "--batch", "2", "--heads", "2", "--seq", "100"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache."""
    monkeypatch.setenv("DLATTN_CACHE_DIR", str(tmp_path))
    return tmp_path


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that finds the dlattn under test."""
    home = Path(dlattn.__file__).parents[1]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=home)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_demo_agrees_with_float64(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the reference engine each result and gradient is within its bound, and exit is 0."""
    assert main([*SMALL, "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    assert "engines: reference, reference" in printed
    assert "OUT OF BOUNDS" not in printed
    for name in ("o", "dQ", "dK", "dV", "forward", "backward"):
        assert any(line.startswith(f"{name} ") for line in printed.splitlines()), name


@pytest.mark.gpu
def test_demo_on_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU the demo runs the CUDA kernels, within the same bounds."""
    assert main(["demo"]) == 0
    assert "reference" not in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [1e-2, np.nan])
def test_demo_fails_when_results_are_wrong(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error beyond the bound, or a NaN, is named and makes the exit status 1."""
    exact = demo._exact

    def disturbed(**given: np.ndarray) -> dict[str, np.ndarray]:
        results = exact(**given)
        results["dK"][0, 0, 50, 10] += wrong
        return results

    monkeypatch.setattr(demo, "_exact", disturbed)
    assert main(SMALL) == 1
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.endswith("OUT OF BOUNDS"))
    assert line.startswith("dK")


def test_demo_oracle_has_the_right_gradient() -> None:
    """The demo's own float64 gradients are the central differences of its float64 output."""
    q, k, v, dO = demo._inputs((1, 1, 5, 3), np.dtype(np.float64)).values()
    given = {"q": q, "k": k, "v": v}
    exact = demo._exact(**given, dO=dO, scale=0.5)
    for name, gradient in (("q", "dQ"), ("k", "dK"), ("v", "dV")):
        for place in np.ndindex(q.shape):
            sides = []
            for change in (1e-5, -1e-5):
                moved = given[name].copy()
                moved[place] += change
                o = demo._exact(**{**given, name: moved}, dO=dO, scale=0.5)["o"]
                sides.append((o * dO).sum())
            assert exact[gradient][place] == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-8)


@pytest.mark.parametrize(
    ("driver", "cupy", "hint"),
    [(True, False, "[cu12]"), (True, True, "no CUDA device"), (False, False, None)],
)
def test_hint_says_what_to_install(
    driver: bool, cupy: bool, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver that dlattn cannot use, one sentence says why; without a driver, none."""
    monkeypatch.setattr(machine, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(machine, "_has_driver", lambda: driver)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: cupy or None)
    found = machine.install_hint()
    assert found is None if hint is None else found and hint in found


def test_env_prints_versions_and_variables(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions, cache, and every environment variable with its value."""
    monkeypatch.setenv("DLATTN_LOG", "0")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert dlattn.__version__ in printed
    assert np.__version__ in printed
    assert str(cache) in printed
    for variable in config.VARIABLES:
        assert f"{variable.name} " in printed
        assert variable.meaning in printed


def test_env_goes_on_where_a_variable_means_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report of a bug has everything else, and says what is wrong with it."""
    monkeypatch.setenv("DLATTN_LOG", "loud")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "DLATTN_LOG is 'loud', but expected one of" in printed
    assert config.VARIABLES[-1].meaning in printed


def test_env_imports_no_framework() -> None:
    """Asking for versions does not pay for importing torch or JAX."""
    script = (
        "import sys; from dlattn.cli import main; main(['env']);"
        "sys.exit(bool({'torch', 'jax'} & set(sys.modules)))"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("direction", "plan"), [("forward", "fwd_sm80"), ("backward", "bwd_sm80")])
def test_show_prints_source_and_registers(
    direction: str, plan: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The generated source of each kernel, and what ptxas says of it, without a GPU."""
    try:
        nvrtc.load(cache)
    except CompileError:
        pytest.skip("NVRTC is not installed")
    command = ["show", "--pass", direction, "--head-dim", "64", "--causal", "--arch", "sm_80"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{plan} on sm_80")
    assert "head_dim_qk = 64" in printed
    assert "Band<false, true>" in printed
    assert "spilled 0 stored and 0 loaded" in printed
    assert printed.count("registers per thread") == printed.count("__global__")


@pytest.mark.parametrize(("dropout", "form"), [("philox", "Philox"), ("flash", "Flash")])
def test_show_takes_every_edit_and_dropout(
    dropout: str, form: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What may follow the scale stands in the printed source, in order; so do masks."""
    try:
        nvrtc.load(cache)
    except CompileError:
        pytest.skip("NVRTC is not installed")
    edits = ["--softcap", "--bias", "bool", "--alibi", "slopes", "--dropout", dropout]
    edits += ["--causal", "--block-mask"]
    assert main(["show", "--head-dim", "64", "--arch", "sm_80", *edits]) == 0
    printed = capsys.readouterr().out
    assert "Edits<PositiveScale, SoftCap, Bias<bool, true, false>, Alibi<true>>" in printed
    assert "Masks<Padding, Band<false, true>, BlockMask>" in printed
    assert f"using Dropout = {form}Dropout;" in printed


def test_show_takes_block_masks_whose_tiles_have_an_order(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hopper's forward orders its tiles by the mask's numbers of batch entries and heads."""
    try:
        nvrtc.load(cache)
    except CompileError:
        pytest.skip("NVRTC is not installed")
    assert main(["show", "--head-dim", "64", "--arch", "sm_90a", "--block-mask"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fwd_sm90") and "dlattn_tile_order" in printed


@pytest.mark.parametrize(("page", "plan"), [("4", "fwd_sm80"), ("16", "fwd_sm90")])
def test_show_takes_pages(
    page: str, plan: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hopper's kernel is the one of pages that its copy engine can move."""
    try:
        nvrtc.load(cache)
    except CompileError:
        pytest.skip("NVRTC is not installed")
    assert main(["show", "--head-dim", "64", "--arch", "sm_90a", "--page", page]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(plan) and "paged_k = true, paged_v = true" in printed


def test_show_explains_what_is_not_supported(capsys: pytest.CaptureFixture[str]) -> None:
    """A problem that no plan takes gives every plan's reason on stderr, of the architecture that
    was asked for, and exit status 1."""
    assert main(["show", "--head-dim", "12", "--arch", "sm_80"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dlattn: No plan runs this graph on sm_80 (described)")
    assert "multiple of 8" in error


def test_show_refuses_heads_without_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of keys that no whole number of query heads shares are no problem to show."""
    assert main(["show", "--heads", "3", "--heads-kv", "2", "--arch", "sm_90a"]) == 1
    assert capsys.readouterr().err.startswith("dlattn: --heads-kv: expected a divisor of --heads")


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["fly"], ["show", "--arch", "sm_10"], ["show", "--head-dim", "0"],
        ["show", "--seq", "-1"], ["show", "--causal", "--right", "2"],
        ["demo", "--heads", "-3"], ["demo", "--batch", "many"],
    ],
)  # fmt: skip
def test_meaningless_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse's usage message and status."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: python -m dlattn" in capsys.readouterr().err


def test_module_runs_as_a_command() -> None:
    """``python -m dlattn`` is the same as ``dlattn.cli.main``."""
    done = python("-m", "dlattn", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("demo", "env", "show"):
        assert command in done.stdout
