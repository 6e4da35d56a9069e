"""The environment table: defaults, validation, printing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlattn import config
from dlattn.errors import DlattnError


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_at_most_eight_variables() -> None:
    """The table stays small, and every name is ours, or cuDNN's frontend's."""
    names = [variable.name for variable in config.VARIABLES]
    assert len(names) <= 8
    assert len(set(names)) == len(names)
    assert all(name.startswith(("DLATTN_", "CUDNN_FRONTEND_")) for name in names)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing set: the user's cache folder, the best plan, silence."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.settings() == config.Settings(tmp_path / ".cache" / "dlattn", None, 0)


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME moves the default, a relative one is ignored as its specification says."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.settings().cache_dir == tmp_path / "xdg" / "dlattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.settings().cache_dir == tmp_path / ".cache" / "dlattn"


def test_a_change_is_seen_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to refresh."""
    monkeypatch.setenv("DLATTN_ENGINE", "reference")
    monkeypatch.setenv("DLATTN_LOG", "2")
    monkeypatch.setenv("DLATTN_CACHE_DIR", "~/kernels")
    assert config.settings() == config.Settings(Path.home() / "kernels", "reference", 2)
    monkeypatch.setenv("DLATTN_ENGINE", "")
    assert config.settings().engine is None


@pytest.mark.parametrize("limit", ["-1", "0", "268435456"])
def test_a_workspace_limit_changes_nothing(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """What it limits in cuDNN, workspace that is quadratic in the length, does not exist."""
    before = config.settings()
    monkeypatch.setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", limit)
    assert config.settings() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", value) for value in ("all", "-2", "1.5")]
    + [("DLATTN_LOG", "loud"), ("DLATTN_LOG", "3"), ("DLATTN_ENGINE", "fwd sm90")],
)
def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The sentence names the variable, its value, and what would do."""
    monkeypatch.setenv(name, value)
    with pytest.raises(DlattnError, match=rf"{name} is '{value}', but expected"):
        config.settings()


def test_table_is_markdown() -> None:
    """One row per variable, columns aligned."""
    head, rule, *rows = config.table().splitlines()
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    assert set(rule) == {"|", "-", " "}
    for row, variable in zip(rows, config.VARIABLES, strict=True):
        assert f"`{variable.name}`" in row
        assert variable.meaning in row
