"""docs/troubleshooting.md quotes messages as the code has them, and commands that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dlattn.cli import demo, env, main, show

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

#: What differs from case to case, on the page and in :func:`said`.
GAP = "…"


def said(it: ast.AST) -> str | None:
    """A text of the source, with a gap for each expression."""
    if isinstance(it, ast.Constant) and isinstance(it.value, str):
        return it.value
    if not isinstance(it, ast.JoinedStr):
        return None
    text = "".join(x.value if isinstance(x, ast.Constant) else GAP for x in it.values)
    return text.replace(f"{GAP}:{GAP}", GAP)  # a device's kind and number


def quoted() -> list[str]:
    """Messages: code with a gap, and what tables have of several words in their first column."""
    first = "\n".join(re.findall(r"^\| (.*?) \|", PAGE, re.M))
    spans = {span for span in re.findall(r"`([^`\n]+)`", PAGE) if GAP in span}
    return sorted(spans | {span for span in re.findall(r"`([^`]+)`", first) if " " in span})


@pytest.fixture(scope="module")
def texts() -> list[str]:
    trees = (
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "dlattn").rglob("*.py")
    )
    return [text for tree in trees for it in ast.walk(tree) if (text := said(it)) is not None]


@pytest.mark.parametrize("message", quoted())
def test_message_is_in_the_code(message: str, texts: list[str]) -> None:
    """The words that readers look for are those that dlattn prints."""
    assert any(message in text for text in texts)


def test_messages_are_found() -> None:
    """The page has dozens, so that the test above is not one of nothing."""
    assert len(quoted()) > 30


@pytest.mark.parametrize("command", re.findall(r"python -m dlattn (\w[^`#\n]*)", PAGE))
def test_commands_are_taken(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page, with its options, is one that dlattn has."""
    for module in (demo, env, show):
        monkeypatch.setattr(module, "run", lambda arguments: 0)
    assert main(command.split()) == 0
