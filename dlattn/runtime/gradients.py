"""What autograd must hear of, in frameworks that have it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from dlattn.runtime.tensors import WATCHED_TYPES, framework

#: What the files of dlattn begin with.
_PACKAGE = str(Path(__file__).parents[1] / "_").removesuffix("_")


def wants_gradient(obj: Any) -> bool:
    """Whether, at present, what is computed from a tensor would have a gradient to pass on."""
    return framework(obj).wants_gradient(obj)


def is_learned(obj: Any) -> bool:
    """Whether, at present, a tensor is what gradients are for, which nothing may write to."""
    return framework(obj).is_learned(obj)


def warn_of_gradients(objs: Iterable[Any]) -> None:
    """Says that gradients end here, if there are any; to be asked once for a kind of call."""
    if not any(obj is not None and wants_gradient(obj) for obj in objs):
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "An input requires a gradient, but gets none from here: graphs, and functions outside of "
        "dlattn.torch, are none of autograd's; call dlattn.torch.attention to learn, or this under "
        "torch.no_grad().",
        stacklevel=level,
    )


#: Of a call's tensors, as one found them at its places.
Note = Callable[[Any], object]


def note_of(values: Any, written: Iterable[Any]) -> Note | None:
    """What tells frameworks that tensors were written to, in calls like this one, so that who saved
    them for a gradient learns of it; ``None`` if none of theirs wants to know.

    Args:
        values: of the first such call, a sequence or a dict.
        written: positions or keys of them.
    """
    watched = [at for at in written if type(values[at]) in WATCHED_TYPES]
    if not watched:
        return None
    tell = WATCHED_TYPES[type(values[watched[0]])]
    if len(watched) == 1:
        (at,) = watched
        return lambda given: tell((given[at],))
    pick = itemgetter(*watched)
    return lambda given: tell(pick(given))


def note_written(objs: Iterable[Any]) -> None:
    """As what :func:`note_of` makes, of tensors that were written to."""
    for obj in objs:
        WATCHED_TYPES[type(obj)]((obj,))
