"""A line for each slow step: what is being done, then how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(doing: str) -> Iterator[None]:
    """Print ``doing ...``, and the wall time in seconds once the block ends."""
    print(f"{doing} ... ", end="", flush=True)
    started = time.perf_counter()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.perf_counter() - started:.1f} s", flush=True)
