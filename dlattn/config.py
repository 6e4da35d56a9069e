"""Every environment variable that dlattn reads: one table, validated, printable.

The environment is read at each call of :func:`settings` (about 10 us, and only builds call it), so
a change of ``os.environ`` takes effect at the next build; there is nothing to refresh.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dlattn.errors import DlattnError
from dlattn.records import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        default: what holds when it is unset or empty, in words.
        meaning: one sentence for people.
    """

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Settings:
    """The validated values.

    Attributes:
        cache_dir: folder of compiled kernels; it may not exist yet.
        engine: the only plan that may be chosen, or ``None`` for the best one.
        log: 0 says nothing, 1 says what is compiled, 2 also which plan runs each graph.
    """

    cache_dir: Path
    engine: str | None
    log: int


VARIABLES = (
    Variable(
        "DLATTN_CACHE_DIR",
        "$XDG_CACHE_HOME/dlattn, else ~/.cache/dlattn",
        "Folder of compiled kernels; safe to share between processes and to delete.",
    ),
    Variable(
        "DLATTN_ENGINE",
        "the best plan that supports the graph",
        "Plan or family of plans that alone may run, e.g. reference, fwd_sm80 or sm80.",
    ),
    Variable(
        "DLATTN_LOG",
        "0",
        "What goes to stderr: 0 nothing, 1 compilations, 2 also the plan chosen for each graph.",
    ),
    Variable(
        "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT",
        "no limit",
        "cuDNN's limit in bytes, or -1, of a backward's quadratic workspace; dlattn has none.",
    ),
)

LOG_LEVELS = ("0", "1", "2")


def settings() -> Settings:
    """The settings that the environment asks for now.

    Raises:
        DlattnError: a variable has a value that means nothing.
    """
    cache_dir, engine, log, limit = (os.environ.get(variable.name, "") for variable in VARIABLES)
    if engine and not engine.isidentifier():
        raise DlattnError(
            f"DLATTN_ENGINE is {engine!r}, but expected a plan such as 'fwd_sm80' or a family such "
            "as 'sm80'; unset it to let dlattn choose"
        )
    if log and log not in LOG_LEVELS:
        raise DlattnError(f"DLATTN_LOG is {log!r}, but expected one of {', '.join(LOG_LEVELS)}")
    if limit and limit != "-1" and not limit.isdecimal():
        raise DlattnError(
            f"CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT is {limit!r}, but expected a number of bytes "
            "or -1; dlattn needs none, so unset it"
        )
    return Settings(
        cache_dir=Path(cache_dir).expanduser() if cache_dir else _default_cache_dir(),
        engine=engine or None,
        log=int(log or 0),
    )


def table() -> str:
    """The variables, their defaults and meanings, as a Markdown table."""
    head = ("Variable", "Default", "Meaning")
    rows = [(f"`{v.name}`", v.default, v.meaning) for v in VARIABLES]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(3)]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        f"| {' | '.join(map(str.ljust, line, widths))} |" for line in (head, rule, *rows)
    )


def _default_cache_dir() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification tells to ignore relative paths
        return Path(xdg, "dlattn")
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home, ".cache", "dlattn")
    # A user without a home (some containers): private to the user, kept between processes.
    return Path(tempfile.gettempdir(), f"dlattn-{os.getuid()}")
