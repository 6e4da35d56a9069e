"""The commands of ``python -m dlattn``: one module each, with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dlattn.cli import demo, env, show
from dlattn.errors import DlattnError

_COMMANDS = {"demo": demo, "env": env, "show": show}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit status.

    0 is success, 1 a command that failed with a sentence on stderr, 2 arguments that mean nothing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dlattn", description="Fused attention for NVIDIA GPUs."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0].partition(": ")[2].rstrip(".")
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except DlattnError as error:
        print(f"dlattn: {error}", file=sys.stderr)
        return 1
    return status
