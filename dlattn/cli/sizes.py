"""Sizes as arguments of commands."""

from __future__ import annotations

import argparse


def size(text: str) -> int:
    """A number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return number
