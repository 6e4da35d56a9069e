"""What autograd must hear of, in frameworks that have it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dlattn.runtime.tensors import WATCHED_TYPES, framework, picker

#: What the files of dlattn begin with.
_PACKAGE = str(Path(__file__).parents[1] / "_").removesuffix("_")


def wants_gradient(obj: Any) -> bool:
    """Whether, at present, what is computed from a tensor would have a gradient to pass on."""
    return framework(obj).wants_gradient(obj)


def warn_of_gradients(objs: Iterable[Any]) -> None:
    """Says that gradients end here, if there are any; to be asked once for a kind of call."""
    if any(obj is not None and wants_gradient(obj) for obj in objs):
        _warn(
            "An input requires a gradient, but gets none from here: graphs, and functions outside "
            "of dlattn.torch, are none of autograd's; call dlattn.torch.attention to learn, or "
            "this under torch.no_grad()."
        )


def warn_of_slopes(constant: str) -> None:
    """Says that slopes that are learned stay what they are.

    Args:
        constant: what makes a constant of them.
    """
    _warn(
        "alibi_slopes: slopes count as constants, and get no gradient from here; to learn them, "
        f"give -slope * distance as a bias; where no gradient is wanted, {constant}."
    )


def _warn(message: str) -> None:
    """Warns of what the program does where it calls dlattn."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


#: What tells a framework that tensors were written to, and what finds them in a call's.
Watched = tuple[Callable[[Any], object], Callable[[Any], Any]]


def watched_of(values: Sequence[Any], written: Iterable[int]) -> Watched | None:
    """How frameworks learn that tensors were written to, in calls like this one, so that who saved
    them for a gradient learns of it; ``None`` if none of theirs wants to know.

    Args:
        values: of the first such call.
        written: positions of them.
    """
    watched = [at for at in written if type(values[at]) in WATCHED_TYPES]
    if not watched:
        return None
    return WATCHED_TYPES[type(values[watched[0]])], picker(watched)


def note_written(objs: Iterable[Any]) -> None:
    """Tells frameworks that want to know it that tensors were written to."""
    for obj in objs:
        WATCHED_TYPES[type(obj)]((obj,))
