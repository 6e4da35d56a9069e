"""Progress for people, on stderr, as much of it as ``DLATTN_LOG`` asks for."""

from __future__ import annotations

import sys

from dlattn.config import settings


def log(level: int, message: str) -> None:
    """Print a line when ``DLATTN_LOG`` is ``level`` or more (:class:`dlattn.config.Settings`)."""
    if settings().log >= level:
        print(f"dlattn: {message}", file=sys.stderr)
