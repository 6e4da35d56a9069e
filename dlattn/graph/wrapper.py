"""``Graph``: a graph declared from tensors in a ``with`` block, then called like a function."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, InvalidGraphError
from dlattn.graph.checks import flag, text
from dlattn.graph.declarations import tensor_arguments
from dlattn.graph.handle import explicit_stream
from dlattn.graph.names import Names, Once, said_name
from dlattn.graph.operations import Operations
from dlattn.graph.pygraph import pygraph
from dlattn.graph.ragged import allocation_model
from dlattn.graph.tensor import Tensor
from dlattn.graph.vocabulary import heur_mode, tensor_reordering
from dlattn.opaque import opaque
from dlattn.runtime.tensors import allocate, allocate_bytes, framework, to_caller


@opaque
class Graph(Operations):
    """A graph that is built at the end of a ``with`` block (cuDNN frontend 1.23 ``cudnn.Graph``).

    Inside the block, operations take tensors of any DLPack framework: each distinct object becomes
    one graph tensor. Afterwards the graph is called with tensors, or with a dict of them, and
    returns its outputs in the caller's framework::

        with Graph(
            io_data_type=data_type.HALF, inputs=["SDPA::q", "SDPA::k", "SDPA::v"], outputs=["o"]
        ) as graph:
            o, _ = graph.sdpa(q, k, v, attn_scale=0.125, is_inference=True, name="SDPA")
            o.set_output(True).set_name("o")
        result = graph(q, k, v)

    Inputs are found under ``"<node>::<argument>"`` or ``"<node>::<position>"`` (and
    ``"<node>::dropout::1"`` inside tuples), outputs under the name they are created with, such as
    ``"SDPA::O"``; both also under the tensor's own name, its uid, the tensor itself, or the object
    that it was declared from. A node without a name is called ``"<operation>.<n>"``.

    Args:
        handle: stream and device, see :func:`create_handle`. ``None`` and ``"auto"`` follow the
            frameworks' current stream. Outputs that calls allocate belong to that stream, so the
            caller must order a stream set on the handle after it.
        inputs, outputs: the order of tensors in positional calls, see :meth:`set_io_tuples`.
        heuristics: accepted as by ``create_execution_plans``.
        workspace_alloc: keep a workspace for calls that give none. Calls that may run at the same
            time must each give their own.
        pygraph_kwargs: the arguments of :class:`pygraph`, such as ``io_data_type``.
    """

    def __init__(
        self,
        *,
        handle: int | str | None = None,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
        heuristics: Iterable[heur_mode] | None = None,
        workspace_alloc: bool = True,
        **pygraph_kwargs: Any,
    ) -> None:
        self._graph = pygraph(handle=_handle(handle), **pygraph_kwargs)
        self._heuristics = heuristics
        self._workspace_alloc = flag("workspace_alloc", workspace_alloc)
        self._workspace: Any = None
        self._names = Names()
        self._counts: Counter[str] = Counter()
        self._nodes: set[str] = set()
        self._inputs: list[Tensor] | None = None
        self._outputs: list[Tensor] | None = None
        self._asked: tuple[Sequence[Any] | None, Sequence[Any] | None] = (None, None)
        self._is_open = False
        self._is_built = False
        self.set_io_tuples(inputs, outputs)

    # Declaring --------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self._is_built:
            raise InvalidGraphError("A Graph is declared in one with block; make a new Graph.")
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        if kind is not None:
            return
        self._graph.build(self._heuristics)
        self._is_built = True
        model = self._graph.lowered.model
        like = None if model is None else self._names.source_of(model)
        if self._workspace_alloc and like is not None and self.get_workspace_size():
            self._workspace = allocate_bytes(like, self.get_workspace_size())
        self._names.release()
        if any(side is not None for side in self._asked):
            self.set_io_tuples(*self._asked)

    def tensor(
        self,
        dim: Iterable[int],
        stride: Iterable[int] | None = None,
        data_type: Any = data_type.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int = -1,
    ) -> Tensor:
        """Declare a tensor; see :meth:`pygraph.tensor`."""
        self._check_open()
        declared = self._graph.tensor(
            dim,
            stride,
            data_type,
            is_virtual,
            is_pass_by_value,
            ragged_offset,
            reordering_type,
            name,
            uid,
        )
        return self._names.add(declared)

    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        """Declare a tensor like another one; see :meth:`pygraph.tensor_like`."""
        self._check_open()
        declared = self._graph.tensor_like(source, name)
        return self._names.add(declared, None if isinstance(source, Tensor) else source)

    def tensor_scalar(self, *args: Any, **kwargs: Any) -> Tensor:
        """Declare a number; see :meth:`pygraph.tensor_scalar`."""
        self._check_open()
        return self._graph.tensor_scalar(*args, **kwargs)

    def _add(self, operation: str, given: dict[str, Any]) -> list[Any]:
        self._check_open()
        if given["name"] is not None:
            text("name", given["name"])
        node = given["name"] or f"{operation}.{self._counts[operation]}"
        if node in self._nodes:
            raise InvalidGraphError(f"Two nodes are named {node!r}; give each its own name.")
        arguments = {"name": node}
        for position, (argument, value) in enumerate(given.items()):
            if argument == "name":
                continue
            port = f"{node}::{argument}"
            if argument in tensor_arguments(operation) or argument == "attn_scale":
                value = self._operand(port, value)
            elif isinstance(value, (tuple, list)):
                value = tuple(self._operand(f"{port}::{n}", item) for n, item in enumerate(value))
            if isinstance(value, Tensor):
                self._names.add_port(f"{node}::{position}", value)
            arguments[argument] = value
        outputs = self._graph._add(operation, arguments, Once(self, self._names))
        self._nodes.add(node)
        self._counts[operation] += 1
        for output in outputs:
            if output is not None:
                self._names.add_port(output.get_name(), self._names.add(output))
        return outputs

    def _operand(self, port: str, value: Any) -> Any:
        """The graph tensor for an operand; numbers and ``None`` stay what they are."""
        if value is None or isinstance(value, numbers.Real):
            return value
        if not isinstance(value, Tensor):
            value = self._names.declared_from(value) or self.tensor_like(value, port)
        self._names.add_port(port, value)
        return value

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidGraphError(
                "A Graph is declared inside its with block: with dlattn.Graph(...) as graph: ..."
            )

    # Naming -----------------------------------------------------------------------------------

    def set_io_tuples(self, inputs: Sequence[Any] | None, outputs: Sequence[Any] | None) -> None:
        """Set the order of inputs and outputs in positional calls; inside the block, record it.

        Args:
            inputs, outputs: port names, tensor names, uids, tensors, or the objects that tensors
                were declared from; together every tensor that is not virtual, each once.

        Raises:
            InvalidGraphError: an entry is unknown, virtual, given twice or on the wrong side, or a
                tensor is left out.
            TypeError: one of the two is no sequence.
        """
        for side, asked in (("inputs", inputs), ("outputs", outputs)):
            if isinstance(asked, str) or not isinstance(asked, Iterable | None):
                raise TypeError(f"{side} must be a sequence of names; got {asked!r:.100}.")
        if not self._is_built:
            self._asked = (inputs, outputs)
            return
        if inputs is None or outputs is None:
            raise InvalidGraphError("Give both inputs and outputs, or neither.")
        chosen_inputs = [self._names.find(entry) for entry in inputs]
        chosen_outputs = [self._names.find(entry) for entry in outputs]
        lowered = self._graph.lowered
        written = [lowered.tensors[role] for role in lowered.outputs]
        for side, chosen, wants_written in (
            ("inputs", chosen_inputs, False),
            ("outputs", chosen_outputs, True),
        ):
            for t in chosen:
                if (t in written) != wants_written:
                    raise InvalidGraphError(f"{side} has {said_name(t)}, which is not one of them.")
        listed = Counter([*chosen_inputs, *chosen_outputs])
        twice = [said_name(t) for t, count in listed.items() if count > 1]
        if twice:
            raise InvalidGraphError(
                f"inputs and outputs have {', '.join(twice)} more than once; an array that "
                "operations take more than once is one tensor, so list it once."
            )
        missing = [said_name(t) for t in lowered.held if t not in listed]
        if missing:
            raise InvalidGraphError(
                f"inputs and outputs leave out {', '.join(missing)}, which the graph uses; add it."
            )
        self._inputs, self._outputs = chosen_inputs, chosen_outputs
        self._asked = (None, None)  # which may have held the caller's memory

    # Calling ----------------------------------------------------------------------------------

    def __call__(
        self, *tensors: Any, handle: int | str | None = None, workspace: Any = None
    ) -> Any:
        """Run the graph.

        Args:
            tensors: the inputs in the order of :meth:`set_io_tuples`; or one dict from names, uids
                or graph tensors to tensors, outputs included as the caller wishes.
            handle: instead of the graph's.
            workspace: ``get_workspace_size()`` bytes, instead of the graph's.

        Returns:
            For positional calls the output, or a list of several; for dicts the same dict, with
            the outputs that it did not have. Outputs are made in the framework and on the device
            of ``q``, or of a primitive graph's first input.

        Raises:
            InvalidGraphError: a positional call without input and output names, or with another
                number of tensors; an unknown key, or keys of one tensor with different values
                (``ValueError``).
            InvalidArgumentError: not built, or without inputs or workspace (``RuntimeError``).
            InvalidVariantPackError: a tensor is not what the graph declared (``ValueError``).
        """
        if not self._is_built:
            raise InvalidArgumentError("A Graph can be called once its with block has ended.")
        if len(tensors) == 1 and isinstance(tensors[0], dict):
            return self._call_by_key(tensors[0], handle, workspace)
        if self._inputs is None or self._outputs is None:
            raise InvalidGraphError(
                "A positional call needs to know the order of tensors; give inputs and outputs to "
                "Graph or set_io_tuples(), or pass one dict."
            )
        if len(tensors) != len(self._inputs):
            wanted = ", ".join(map(said_name, self._inputs))
            raise InvalidGraphError(
                f"Expected {len(self._inputs)} tensors ({wanted}), got {len(tensors)}."
            )
        results = self._run(dict(zip(self._inputs, tensors, strict=True)), handle, workspace)
        ordered = [results[output] for output in self._outputs]
        return ordered[0] if len(ordered) == 1 else ordered

    def _call_by_key(self, given: dict[Any, Any], handle: Any, workspace: Any) -> dict[Any, Any]:
        keys = self._names.keys(given)
        pack = {t: given[key] for key, t in keys.items()}
        made = self._run(pack, handle, workspace)
        given.update({key: made[t] for key, t in keys.items() if t in made})
        given.update({t.get_name(): out for t, out in made.items() if t not in pack})
        return given

    def _run(self, pack: dict[Tensor, Any], handle: Any, workspace: Any) -> dict[Tensor, Any]:
        """Execute, with memory for the outputs of which the pack has none; those outputs."""
        lowered = self._graph.lowered
        outputs = [lowered.tensors[role] for role in lowered.tensors if role in lowered.outputs]
        missing = [t for t in lowered.held if pack.get(t) is None]
        absent = [said_name(t) for t in missing if t not in outputs]
        if absent:
            raise InvalidArgumentError(f"The call lacks the inputs {', '.join(absent)}; add them.")
        like = None if lowered.model is None else pack[lowered.model]
        if missing and like is None:
            raise InvalidArgumentError(
                "The graph has no input in memory that outputs could be allocated like; pass "
                f"memory for {', '.join(map(said_name, missing))} too."
            )
        made = {t: self._allocate(t, pack) for t in missing}
        chosen = self._graph._handle if handle is None else _handle(handle)
        if made and self._is_unordered(like, chosen):
            raise InvalidArgumentError(
                "JAX waits for outputs on CuPy's current stream, but the handle has a stream of "
                "its own; call set_stream(handle, None) and make that stream CuPy's current one."
            )
        self._graph.execute({**pack, **made}, self._workspace_for(workspace, like), chosen)
        return {t: to_caller(out, like) for t, out in made.items()}

    def _allocate(self, t: Tensor, pack: dict[Tensor, Any]) -> Any:
        tensors, it = self._graph.lowered.tensors, t.attributes
        dim, stride, model = it.dim, it.stride, self._graph.lowered.model
        assert model is not None
        if it.ragged_offset is not None:
            role = next(role for role, other in tensors.items() if other is t)
            model = tensors[allocation_model(role)]
            shape = tuple(getattr(pack[model], "shape", ()))
            if len(shape) != 3:
                raise InvalidArgumentError(
                    f"{said_name(t)} is ragged, and {said_name(model)} does not tell how many "
                    "tokens there are; pass it as (tokens, heads, columns), or pass memory for "
                    f"{said_name(t)} too."
                )
            dim, stride = (shape[0], dim[1], dim[3]), (stride[2], stride[1], stride[3])
        if isinstance(pack[model], int):
            raise InvalidArgumentError(
                f"{said_name(t)} cannot be allocated like an address; pass its memory too."
            )
        return allocate(pack[model], dim, stride, it.dtype)

    def _workspace_for(self, given: Any, like: Any) -> Any:
        size = self._graph.get_workspace_size()
        if given is not None or size == 0:
            return given
        if self._workspace is None:
            if not self._workspace_alloc:
                raise InvalidArgumentError(
                    f"The graph was made with workspace_alloc=False; give {size} bytes as "
                    "workspace=."
                )
            self._workspace = allocate_bytes(like, size)
        return self._workspace

    def _is_unordered(self, like: Any, handle: int | None) -> bool:
        on_device = self._graph.lowered.target.kind == "cuda"
        return on_device and framework(like).name == "jax" and explicit_stream(handle) is not None

    # What passes through ----------------------------------------------------------------------

    def get_workspace_size(self) -> int:
        """Bytes that a call needs as workspace; may be 0."""
        return self._graph.get_workspace_size()

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """See :meth:`pygraph.get_workspace_size_plan_at_index`."""
        return self._graph.get_workspace_size_plan_at_index(index)

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """See :meth:`pygraph.query_tensor_attributes_of_uid`."""
        return self._graph.query_tensor_attributes_of_uid(uid)

    def serialize(self) -> list[int]:
        """See :meth:`pygraph.serialize`."""
        return self._graph.serialize()

    def deserialize(self, *args: Any) -> None:
        """Become a serialised graph, outside of any block; see :meth:`pygraph.deserialize`.

        Calls then find tensors by uid and by name, or in the order of :meth:`set_io_tuples`.
        """
        self._graph.deserialize(*args)
        if self._graph.get_execution_plan_count() == 0:
            self._graph.build(self._heuristics)
        for t in self._graph._tensors:
            self._names.add(t)
        self._is_built = True
        if any(side is not None for side in self._asked):
            self.set_io_tuples(*self._asked)

    def __repr__(self) -> str:
        return repr(self._graph)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(pygraph, name):
            raise AttributeError(f"Graph has no attribute {name!r}.")
        raise InvalidArgumentError(
            f"A Graph builds and runs itself, so it has no {name}(); declare a pygraph for that."
        )


def _handle(handle: int | str | None) -> int | None:
    if handle is None or (isinstance(handle, str) and handle == "auto"):
        return None
    if isinstance(handle, int):
        return handle
    raise InvalidArgumentError(
        f"handle must be None, 'auto' or from create_handle(); got {handle!r:.100}."
    )
