"""Graphs as bytes: what was declared, the plan that was chosen, and its compiled kernels.

A graph is declared again from its description, and so checked again in every way; its plan is then
the same class with the same tiling, for the device that is there, and finds its kernels in the
data. Nothing of the data is executed but these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.graph.handle import explicit_stream, pinned_target
from dlattn.graph.overrides import Overrides
from dlattn.graph.recipe import declare, recipe
from dlattn.plans.base import Runnable
from dlattn.runtime import jit
from dlattn.runtime.bundle import read_kernels, seal, unseal, write_kernels
from dlattn.runtime.target import CPU, Target

if TYPE_CHECKING:
    from dlattn.graph.portable import Portable

_KIND = "graph"
_FACTS = ("graph", "arch", "plan", "tiling", "configuration", "overrides", "kernels")


def serialize(graph: Portable) -> bytes:
    """A built graph as bytes.

    Raises:
        InvalidArgumentError: it is not built.
        cudnnGraphNotSupportedError: a call has an argument that cannot be kept.
    """
    planning = graph._planning
    execution = None if planning is None else planning.chosen
    if execution is None:
        raise InvalidArgumentError(
            f"Graph {graph._name!r} has no built plan to serialise; call build() first."
        )
    plan, target = execution.plan, execution.plan.target
    sources = dict.fromkeys([*plan.sources(), *plan.elsewhere()])
    if graph._overrides is not None:
        for it in (plan, *graph._overrides.plans):
            sources |= dict.fromkeys([*it.sources(), *it.companions()])
    kernels = zip(sources, jit.compile_kernels([*sources], target.arch), strict=True)
    facts = {
        "graph": recipe(graph),
        "arch": target.arch if target.kind == "cuda" else "cpu",
        "plan": plan.name,
        "tiling": vars(plan.tiling) if hasattr(plan, "tiling") else None,
        "configuration": plan.configuration,
        "overrides": graph._overrides is not None,
        "kernels": write_kernels(kernels),
    }
    return seal(_KIND, facts).encode()


def deserialize(graph: Portable, *arguments: Any) -> None:
    """Make a new graph what the data of :func:`serialize` says; or of ``repr``, without a plan.

    Args:
        arguments: the data, or a handle and the data.

    Raises:
        TypeError: neither of these.
        InvalidGraphError: the graph is not new.
        InvalidArgumentError: the data is damaged.
        cudnnGraphNotSupportedError: it is of another version of dlattn, or of another kind of
            device.
    """
    if not 1 <= len(arguments) <= 2:
        raise TypeError(f"deserialize takes the data, or a handle and the data; got {arguments!r}.")
    *handle, data = arguments
    if handle:
        explicit_stream(handle[0])  # an unknown one is an error that leaves the graph new
        graph._handle = handle[0]
    if isinstance(data, str):
        described = _described(data)
        if described is not None:
            declare(graph, described)
            return
    facts = unseal(_KIND, _bytes(data))
    missing = {*_FACTS} - facts.keys()
    if missing:
        raise InvalidArgumentError(f"The data lacks {', '.join(sorted(missing))}; serialise anew.")
    kernels = read_kernels(facts["kernels"])
    target = _target(graph, facts["arch"])
    here = target.arch if target.kind == "cuda" else "cpu"
    if facts["arch"] != here:
        raise cudnnGraphNotSupportedError(
            f"The graph was serialised for {facts['arch']}, and would run on {target}"
            f"{'' if here == 'cpu' else f', which is {here}'}; serialise one for that device, or "
            "give a handle of another."
        )
    declare(graph, facts["graph"])
    graph._decided = target
    fitting = {source: kernel for source, kernel in kernels if kernel.arch == here}
    for source, kernel in fitting.items():
        jit.remember(source, kernel)
    _build(graph, facts, {*fitting})


def _target(graph: Portable, arch: Any) -> Target:
    """Where the graph would run: what is for the CPU, there, unless its handle says otherwise."""
    if arch == "cpu" and pinned_target(graph._handle) is None:
        return CPU
    return graph._place.default


def _build(graph: Portable, facts: Mapping[str, Any], carried: set[jit.KernelSource]) -> None:
    if facts["overrides"]:
        graph._overrides = Overrides(graph)
    makers = graph._freeze(facts["plan"])
    plan = _with_tiling(makers[0](), facts["tiling"])
    if type(facts["configuration"]) is not int:
        raise InvalidArgumentError(
            f"The data has no configuration of {plan.name}; serialise the graph anew."
        )
    plan.configuration = facts["configuration"]
    absent = [source.name for source in plan.sources() if source not in carried]
    if absent:
        raise cudnnGraphNotSupportedError(
            f"The data lacks the kernel {absent[0]} as this device needs it; serialise the graph "
            f"on a device like {plan.target}."
        )
    graph._adopt(plan)


def _with_tiling(plan: Runnable, tiling: Mapping[str, Any] | None) -> Runnable:
    """The plan, or one like it that divides its work otherwise."""
    chosen = getattr(plan, "tiling", None)
    if chosen is None or tiling is None or vars(chosen) == tiling:
        return plan
    try:
        other = type(chosen)(**tiling)
        return type(plan)(plan.problem, plan.geometry, plan.target, tiling=other)  # type: ignore
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"The data has no tiling of {plan.name} ({error}); serialise the graph anew."
        ) from error


def _bytes(data: Any) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if isinstance(data, Iterable):
        try:
            # One by one: of an array of wider integers, memory has more bytes than that.
            return bytes([*data])
        except (TypeError, ValueError):
            pass
    raise TypeError(
        "deserialize takes the list of bytes that serialize() returned, numbers from 0 to 255, or "
        f"a graph's JSON text; got {data!r:.100} ({type(data).__qualname__})."
    )


def _described(text: str) -> dict[str, Any] | None:
    """A graph's own description, if the text is one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"The text is no JSON ({error}), and so describes no graph."
        ) from error
    return found if isinstance(found, dict) and "calls" in found else None
