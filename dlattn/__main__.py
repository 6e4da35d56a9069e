"""``python -m dlattn``: see :mod:`dlattn.cli`."""

from __future__ import annotations

from dlattn.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
