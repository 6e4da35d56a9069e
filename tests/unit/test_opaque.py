"""Functions that ``torch.compile`` runs as they are."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import dlattn
from dlattn import flash, opaque
from dlattn.graph.execution import Execution
from dlattn.problem import POINTWISE

MODULES: dict[str, Any] = {"dlattn": dlattn, "dlattn.flash": flash}
TAKES_TENSORS = {"q", "o1"}
FUNCTIONS = [
    (module, name)
    for module, found in MODULES.items()
    for name in found.__all__
    if inspect.isfunction(getattr(found, name))
    and TAKES_TENSORS & set(inspect.signature(getattr(found, name)).parameters)
]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_every_function_of_tensors_is_marked(module: str, name: str) -> None:
    """Of those that users see, none is followed into NumPy."""
    assert getattr(MODULES[module], name)._torchdynamo_disable


@pytest.mark.parametrize("kind", [dlattn.pygraph, dlattn.Graph])
def test_every_method_of_graphs_is_marked(kind: Any) -> None:
    """Those of their bases, too, but for pointwise operations, which are made when asked for, and
    see no memory."""
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    followed = {name for name, it in methods.items() if not hasattr(it, "_torchdynamo_disable")}
    assert "sdpa" in methods
    assert followed <= set(POINTWISE)


def test_code_of_others_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decorator of somebody else's made has that one's code, which all that it made share;
    what is no method stays what it is."""
    told: list[Any] = []
    monkeypatch.setattr(opaque, "_codes", told)
    monkeypatch.setattr(opaque, "leave_alone", lambda: None)

    class Some:
        number = 3

        def plain(self) -> int:
            return 1

        @property
        def read(self) -> int:
            return 2

        @contextlib.contextmanager
        def block(self) -> Iterator[None]:
            yield

    Some.__module__ = "dlattn.some"
    assert opaque.opaque(Some) is Some
    assert told == [Some.plain.__code__, Some.read.fget.__code__]  # type: ignore[attr-defined]
    assert not hasattr(Execution.operations, "_torchdynamo_disable")


def test_what_is_made_again_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that each call of another one makes have one code, which is kept once until there
    is a torch to tell, however many there are; each of them is marked."""
    told: list[Any] = []
    monkeypatch.setattr(opaque, "_codes", told)
    monkeypatch.setattr(opaque, "leave_alone", lambda: None)

    def make() -> Any:
        def made() -> int:
            return 1

        return opaque.opaque(made)

    first, second = make(), make()
    assert told == [first.__code__]
    assert first._torchdynamo_disable and second._torchdynamo_disable
