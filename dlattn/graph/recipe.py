"""A graph as JSON values from which it can be declared again: its tensors, then its calls.

Calls are kept as they were given, argument by argument, so that an operation needs no words of its
own here. A callback is kept as the operations that it has added.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from dlattn.dtypes import data_type, from_any
from dlattn.enums import VocabularyEnum
from dlattn.errors import DlattnError, InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph import vocabulary
from dlattn.graph.checks import integers
from dlattn.graph.declarations import Declarations, tensor_arguments
from dlattn.graph.tensor import Attributes, Tensor, packed_strides
from dlattn.graph.vocabulary import tensor_reordering

if TYPE_CHECKING:
    from dlattn.graph.portable import Portable

#: Shape and strides, or one of them, by uid, in place of those that were declared.
Overrides = Mapping[int, Mapping[str, tuple[int, ...]]]

_ENUMERATIONS: dict[str, type[VocabularyEnum]] = {
    name: kind
    for name, kind in (*vars(vocabulary).items(), ("data_type", data_type))
    if isinstance(kind, type) and issubclass(kind, VocabularyEnum)
}


def recipe(graph: Portable) -> dict[str, Any]:
    """The graph as JSON values.

    Raises:
        cudnnGraphNotSupportedError: a call has an argument that cannot be kept.
    """
    writer = _Writer(graph)
    calls = [
        writer.call(node, given) for node, given in zip(graph._nodes, graph._calls, strict=True)
    ]
    types = {name: dtype.name for name, dtype in graph._types.items()}
    tensors = [writer.attributes(t) for t in writer.tensors]
    return {"name": graph._name, **types, "tensors": tensors, "calls": calls}


def declare(graph: Portable, kept: Mapping[str, Any], overrides: Overrides | None = None) -> None:
    """Declare in a new graph what :func:`recipe` has kept.

    Args:
        overrides: what the graph had inferred from the shapes that are replaced is inferred again.
            Strides that are not replaced are packed, in the order that the declared ones have.

    Raises:
        InvalidGraphError: the graph holds something already, or this is no such description.
    """
    if graph._tensors or graph._is_built:
        raise InvalidGraphError("Graphs are deserialised into new ones; make one with pygraph().")
    try:
        with _said_to_be_wrong():
            graph._name = str(kept["name"])
            for name in graph._types:
                graph._types[name] = data_type[kept[name]]
            _Reader(graph, kept, overrides or {}).declare(kept["calls"])
    except Exception:
        graph._tensors, graph._nodes, graph._calls = [], [], []
        raise


@contextmanager
def _said_to_be_wrong() -> Iterator[None]:
    try:
        yield
    except DlattnError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidGraphError(
            "The data describes no graph of this version of dlattn "
            f"({type(error).__name__}: {error}); serialise the graph anew."
        ) from error


class _Writer:
    """Numbers the tensors of a graph."""

    def __init__(self, graph: Portable) -> None:
        self.tensors: list[Tensor] = list(graph._tensors)
        for node in graph._nodes:
            self.tensors += [t for t in node.tensors.values() if t not in self.tensors]
        self._numbers = {t: number for number, t in enumerate(self.tensors)}
        self._inferred = graph._inferred

    def number(self, t: Tensor) -> int:
        if t not in self._numbers:
            self._numbers[t] = len(self.tensors)
            self.tensors.append(t)
        return self._numbers[t]

    def attributes(self, t: Tensor) -> dict[str, Any]:
        it = t.attributes
        host = it.device is not None and it.device[0] == "cpu"
        return {
            **vars(it),
            "dtype": it.dtype.name,
            "reordering_type": it.reordering_type.name,
            "ragged_offset": None if it.ragged_offset is None else self.number(it.ragged_offset),
            "inferred": sorted(self._inferred.get(t, it.inferred)),
            # Which CUDA device it was says nothing elsewhere.
            "device": list(it.device) if host and it.device else None,
        }

    def call(self, node: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """One node, from what its operation was given."""
        given = {name: value for name, value in given.items() if value is not None}
        # Of a sequence, what the node has read: it may have been changed since, or be used up.
        if "permutation" in given:
            given["permutation"] = node.numbers["permutation"]
        if "compute_data_type" in given:  # torch's and NumPy's dtypes are welcome there
            given["compute_data_type"] = from_any(given["compute_data_type"])
        arguments = {name: self.value(value, name) for name, value in given.items()}
        arguments |= self._callbacks(getattr(node, "score_mod", None))
        numbers = {role: self.number(t) for role, t in node.outputs.items()}
        return {"operation": node.operation, "arguments": arguments, "outputs": numbers}

    def value(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self.number(value)}
        if isinstance(value, Enum):
            return {"member": str(value)}
        if isinstance(value, (tuple, list)):
            return {"tuple": [self.value(item, name) for item in value]}
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            return float(value)
        with suppress(TypeError):  # an array of one integer
            return operator.index(value)
        raise cudnnGraphNotSupportedError(
            f"{name} is a {type(value).__qualname__}, which a graph cannot be serialised with; "
            "give numbers and tensors."
        )

    def _callbacks(self, mod: Any) -> dict[str, Any]:
        """``score_mod`` and ``score_mod_bprop``: the operations that they have added."""
        if mod is None:
            return {}
        nodes, count = mod.nodes, len(mod.nodes)
        if mod.gradient is not None:
            ends = (n for n, node in enumerate(nodes) if mod.gradient in node.inputs.values())
            count = next(ends, count)
        made = {"score_mod": self._callback(mod.score, nodes[:count], mod.result)}
        if mod.gradient is not None:
            made["score_mod_bprop"] = self._callback(mod.gradient, nodes[count:], mod.d_score)
        return made

    def _callback(self, given: Tensor, nodes: Sequence[Any], result: Tensor) -> dict[str, Any]:
        calls = [
            self.call(
                node,
                {
                    **node.inputs,
                    **node.numbers,
                    "compute_data_type": node.compute_data_type,
                    "name": node.name,
                },
            )
            for node in nodes
        ]
        numbers = {"given": self.number(given), "result": self.number(result)}
        return {"callback": {**numbers, "calls": calls}}


class _Reader:
    """Makes the tensors of a graph, then its calls."""

    def __init__(self, graph: Portable, kept: Mapping[str, Any], overrides: Overrides) -> None:
        self._graph = graph
        self._kept = kept["tensors"]
        self._overrides = overrides
        self._attributes = [self._read(it) for it in self._kept]
        self._tensors = [Tensor(it) for it in self._attributes]

    def declare(self, calls: Sequence[Mapping[str, Any]]) -> None:
        made = set(_made(calls))
        graph, tensors = self._graph, self._tensors
        graph._tensors += [t for number, t in enumerate(tensors) if number not in made]
        for call in calls:
            self._call(graph, call)
        # Outputs that the user gave come back as they were; of the others, now is the time.
        for it, kept in zip(self._attributes, self._kept, strict=True):
            if kept["ragged_offset"] is not None:
                it.ragged_offset = tensors[kept["ragged_offset"]]
        known = set(graph._tensors)
        graph._tensors = [t for t in tensors if t in known]

    def _call(self, graph: Any, call: Mapping[str, Any]) -> None:
        operation = call["operation"]
        tensor_arguments(operation)  # so that nothing else of the graph is called
        for name, number in call["outputs"].items():
            if {"tensor": number} == call["arguments"].get(name):
                graph._tensors.append(self._tensors[number])
        arguments = {name: self._value(value) for name, value in call["arguments"].items()}
        getattr(graph, operation)(**arguments)
        outputs = (graph._nodes if isinstance(graph, Declarations) else graph.nodes)[-1].outputs
        for role, number in call["outputs"].items():
            outputs[role].attributes = self._attributes[number]
            self._tensors[number] = outputs[role]

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, it),) = value.items()
        if kind == "tensor":
            return self._tensors[it]
        if kind == "tuple":
            return tuple(map(self._value, it))
        if kind == "member":
            enumeration, _, member = it.partition(".")
            return _ENUMERATIONS[enumeration][member]
        if kind == "callback":
            return self._callback(it)
        raise KeyError(kind)

    def _callback(self, kept: Mapping[str, Any]) -> Callable[..., Any]:
        def callback(graph: Any, given: Tensor) -> Tensor:
            self._tensors[kept["given"]] = given
            for call in kept["calls"]:
                self._call(graph, call)
            return self._tensors[kept["result"]]

        return callback

    def _read(self, kept: Mapping[str, Any]) -> Attributes:
        value, device = kept["value"], kept["device"]
        it = Attributes(
            name=str(kept["name"]),
            dtype=data_type[kept["dtype"]],
            is_virtual=bool(kept["is_virtual"]),
            is_pass_by_value=bool(kept["is_pass_by_value"]),
            uid=None if kept["uid"] is None else int(kept["uid"]),
            uid_from_user=bool(kept["uid_from_user"]),
            reordering_type=tensor_reordering[kept["reordering_type"]],
            vector_count=int(kept["vector_count"]),
            vector_dimension=int(kept["vector_dimension"]),
            value=value if value is None or isinstance(value, int) else float(value),
            is_compile_time_constant=bool(kept["is_compile_time_constant"]),
            device=None if device is None else ("cpu", 0),
        )
        t = Tensor(it).set_alignment(kept["alignment"])
        t.set_dim(kept["dim"]).set_stride(kept["stride"])
        inferred = frozenset(kept["inferred"])
        if not inferred <= vars(it).keys():
            raise KeyError("inferred")
        overrides: dict[str, Any] = dict(self._overrides.get(-1 if it.uid is None else it.uid, {}))
        dim = overrides.get("dim")
        if dim is not None and len(dim) == len(it.stride):
            order = _order(it.dim, it.stride, ragged=kept["ragged_offset"] is not None)
            overrides.setdefault("stride", packed_strides(dim, order))
        it = replace(it, **overrides, inferred=inferred - overrides.keys())
        # One element that tensor_like saw on the host may stand for many.
        return replace(it, is_pass_by_value=it.is_pass_by_value and it.elements == 1)


def _order(dim: Sequence[int], stride: Sequence[int], ragged: bool) -> tuple[int, ...]:
    """Strides that tell the order of declared ones. A size of 1 may have any stride, such as the 0
    of NumPy's new axes: unless it is a distance between rows, the axis is outside of those behind
    it, as in row-major order. So may the batch of a ragged tensor, which is outside of all."""
    if ragged:
        within = _order(dim[1:], stride[1:], ragged=False)
        return (max(within) + 1, *within)
    outer = range(len(dim) - 1)
    unit = min((stride[axis] for axis in outer if dim[axis] > 1 and stride[axis] > 0), default=1)
    told, behind = list(stride), 0
    for axis in reversed(outer):
        if dim[axis] == 1 and (stride[axis] <= 0 or stride[axis] % unit):
            told[axis] = behind
        behind = max(behind, told[axis])
    return tuple(told)


def _made(calls: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """The tensors that calls make, and the callbacks in them."""
    for call in calls:
        yield from call["outputs"].values()
        for value in call["arguments"].values():
            if isinstance(value, dict) and "callback" in value:
                yield value["callback"]["given"]
                yield from _made(value["callback"]["calls"])


def overridden(graph: Portable, uids: Any, shapes: Any, strides: Any) -> dict[int, Any]:
    """What the arguments of ``execute`` say, by uid.

    Raises:
        InvalidGraphError: they differ in length, or name no tensor of the graph, or one twice, or
            say nothing of those that they name.
    """
    known = {t.attributes.uid: t for t in graph._tensors}
    said: dict[int, dict[str, tuple[int, ...]]] = {}
    uids = integers("override_uids", () if uids is None else uids)
    twice = [uid for uid, count in Counter(uids).items() if count > 1]
    if twice:
        raise InvalidGraphError(
            f"override_uids has {twice[0]} more than once; give one shape for each tensor."
        )
    for field, what, given in (("dim", "shapes", shapes), ("stride", "strides", strides)):
        if given is None:
            continue
        given = _sequence(given, f"override_{what}")
        if len(given) != len(uids):
            raise InvalidGraphError(
                f"override_{what} has {len(given)} entries for {len(uids)} override_uids; give one "
                "for each."
            )
        for uid, sizes in zip(uids, given, strict=True):
            said.setdefault(uid, {})[field] = integers(f"override_{what} of uid {uid}", sizes)
    if uids and shapes is strides is None:
        raise InvalidGraphError(
            "override_uids names tensors without override_shapes or override_strides; give what is "
            "other."
        )
    unknown = [uid for uid in uids if uid not in known]
    if unknown:
        raise InvalidGraphError(
            f"override_uids has {unknown[0]}, which is no tensor of graph {graph._name!r}."
        )
    return said


def _sequence(given: Any, argument: str) -> list[Any]:
    try:
        return [*given]
    except TypeError:
        raise TypeError(f"{argument} must be a sequence; got {given!r}.") from None
