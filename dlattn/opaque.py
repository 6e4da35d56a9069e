"""Functions that ``torch.compile`` runs as they are.

It follows calls into Python code, and in code that it has not followed it begins anew: with NumPy's
arrays, such as the reference engine's views of the caller's memory, as tensors of its own. What it
finds marked here ends its graph, and the next one begins behind the call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar

Entry = TypeVar("Entry")

#: What torch has not been told of.
_codes: list[CodeType] = []

_REASON = "it is no operator of PyTorch's; those of dlattn.torch are"


def opaque(entry: Entry) -> Entry:
    """Marks a function, or every method of a class, which stay what they are: calls cost nothing.

    Neither they nor what they call is compiled or has parts in a graph.
    """
    for function in _functions(entry):
        # What torch.compiler.disable sets, read where a call would be followed.
        vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
        # A function that is made again and again has one code.
        if function.__code__ not in _codes:
            _codes.append(function.__code__)
    leave_alone()
    return entry


def leave_alone() -> None:
    """Tells torch of what is marked, if it is loaded."""
    try:
        frames: Any = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        # Of the frame itself, and of those below it.
        strategy = frames._FrameExecStrategy(skip, skip)
        while _codes:
            frames.set_code_exec_strategy(_codes.pop(), strategy)
    except (AttributeError, KeyError):  # there is none, or half of it, or one that knows no frames
        return


def _functions(entry: Any) -> Iterator[FunctionType]:
    if not isinstance(entry, type):
        yield entry
        return
    for base in entry.__mro__:
        if base.__module__.partition(".")[0] != __package__:
            continue
        for member in vars(base).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            # The code of one that wraps another is its decorator's, and of others, too.
            if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
                yield function
