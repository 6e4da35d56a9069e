"""The graph: attention, validated, planned, built and executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlattn.dtypes import data_type, from_any
from dlattn.errors import InvalidArgumentError, InvalidGraphError
from dlattn.graph.checks import flag, integer, text
from dlattn.graph.handle import explicit_stream
from dlattn.graph.kernel_cache import checked
from dlattn.graph.lower import Lowered
from dlattn.graph.overrides import Overrides
from dlattn.graph.portable import Portable
from dlattn.graph.translate import translate
from dlattn.opaque import opaque

if TYPE_CHECKING:
    from dlattn.graph.execution import Execution
    from dlattn.graph.planning import Engine


@opaque
class pygraph(Portable):  # noqa: N801 - cuDNN's public spelling
    """A graph (cuDNN frontend 1.23 ``cudnn.pygraph``).

    It holds one ``sdpa`` or ``sdpa_backward``, or primitive operations. Those that together are
    attention run as one, by the same plans; others run on the CPU, by the reference engine.

    Life: tensors and operations -> ``validate`` -> ``build_operation_graph`` ->
    ``create_execution_plans`` -> ``check_support`` -> ``build_plans`` -> ``execute``. Each step
    takes the steps before it that were left out; ``build()`` takes them all.

    Args:
        name: for messages.
        io_data_type: element type of tensors that set none.
        intermediate_data_type: element type of virtual tensors that set none; in attention, nothing
            between nodes exists in memory, or is rounded.
        compute_data_type: FLOAT, or DOUBLE on the reference engine.
        handle: stream and device, see :func:`create_handle`. ``None``: the device is that of the
            tensors, and execution follows the frameworks' current stream.
        sm_version: compute capability that the device must have, e.g. 90. It need not be here:
            then the graph can be built and serialised, not executed.
        sm_count: multiprocessors of a device that is not here.
        kernel_cache: of :func:`create_kernel_cache`; it then holds the kernels of this graph, too.
        device_property: of :func:`create_device_properties`: the device, which need not be here.
        is_dynamic_shape_enabled: accepted; sizes are never compiled in.
        is_override_shape_enabled: ``execute`` takes other shapes than the declared ones.
    """

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = data_type.NOT_SET,
        intermediate_data_type: Any = data_type.NOT_SET,
        compute_data_type: Any = data_type.NOT_SET,
        handle: int | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
    ) -> None:
        super().__init__(text("name", name))
        flag("is_dynamic_shape_enabled", is_dynamic_shape_enabled)
        explicit_stream(handle)  # an unknown handle is an error now, not at execute
        self._types = {
            "io_data_type": from_any(io_data_type),
            "intermediate_data_type": from_any(intermediate_data_type),
            "compute_data_type": from_any(compute_data_type),
        }
        self._handle = handle
        self._sm_version = sm_version
        self._sm_count = sm_count
        self._kernel_cache = checked(kernel_cache)
        self._device_property = device_property
        overrides = flag("is_override_shape_enabled", is_override_shape_enabled)
        self._overrides = Overrides(self) if overrides else None

    # From declarations to plans ---------------------------------------------------------------

    def validate(self) -> None:
        """Infer what was left out, and check that some plan can run the graph; idempotent.

        Raises:
            InvalidGraphError: the graph is wrong (a ``ValueError``).
            cudnnGraphNotSupportedError: it is right, but nothing can run it; the message names the
                argument, or has every plan's reason.
        """
        if self._lowered is None:
            self._lower()

    def build_operation_graph(self) -> None:
        """Assign the missing uids, and freeze the graph. Raises as :meth:`validate` does."""
        if self._lowered is None:
            self._engines = self._freeze()

    def _freeze(self, engine: str | None = None) -> list[Engine]:
        """Build the operation graph; what makes its plans, or the plan of one name."""
        lowered, makers = self._lower(engine)
        taken = {t.attributes.uid for t in self._tensors}
        free = (uid for uid in range(1, len(taken) + len(self._tensors) + 1) if uid not in taken)
        for t in self._tensors:
            if t.attributes.uid is None:
                t.attributes.uid = next(free)
            self._inferred[t] = t.attributes.inferred
            t.freeze()
        self._lowered = lowered
        self._is_built = True
        return makers

    @property
    def lowered(self) -> Lowered:
        """What plans see of the graph; builds the operation graph if that is not done."""
        self.build_operation_graph()
        assert self._lowered is not None
        return self._lowered

    # Running ----------------------------------------------------------------------------------

    def execute(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        handle: int | None = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> None:
        """Enqueue the work; never allocates device memory, copies or synchronises.

        Args:
            variant_pack: memory of every tensor that is not virtual, under the graph's tensor or
                its uid: tensors of any framework, checked against the graph, or raw addresses,
                which cannot be. ``None`` keys and unknown ones are skipped. Inputs may be one
                tensor; outputs and workspace are memory of their own, though views may interleave.
            workspace: ``get_workspace_size()`` bytes, as a tensor or an address aligned to 16;
                may be ``None`` or 0 when the size is 0.
            handle: instead of the graph's. A stream set on it wins; else torch's current stream if
                the pack has torch tensors, else CuPy's.

            override_uids: of a graph with ``is_override_shape_enabled``, tensors that have other
                shapes in this call. Those that the graph has inferred follow by themselves.
            override_shapes, override_strides: one for each of these uids. Without strides, they
                are packed in the order of the declared ones.

        The best plan for the shapes runs, whichever runs the declared ones: with few queries, that
        for decoding. It is made at the first call with these shapes (up to a few milliseconds, and
        then it may allocate) and kept. Kernels are compiled then only if none of the graph's has
        run before: those of another plan, of strides that are aligned otherwise, or on Hopper of a
        backward with much more or less to do; NVRTC takes about a second. ``get_workspace_size``
        with the same arguments does all that in advance.

        Raises:
            InvalidVariantPackError: memory is missing, or is not what the graph, or the call,
                declared; the workspace is smaller than the shapes need; an output begins where
                another tensor does, or overlaps an output; or the workspace overlaps a tensor.
            InvalidArgumentError: no plan is built.
            InvalidGraphError: the shapes do not go together.
            cudnnGraphNotSupportedError: no plan runs the shapes.
        """
        if override_uids is None and override_shapes is None and override_strides is None:
            execution = self._built("execute")
        else:
            execution = self._overriding().execution(
                override_uids, override_shapes, override_strides, workspace
            )
        execution(variant_pack, workspace, self._handle if handle is None else handle)

    def execute_plan_at_index(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any,
        index: int,
        handle: int | None = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> None:
        """As :meth:`execute`, with one of several built plans."""
        execution = self._planned().execution_at(index)
        if not (override_uids is None and override_shapes is None and override_strides is None):
            execution = self._overriding().execution(
                override_uids, override_shapes, override_strides, workspace, index
            )
        execution(variant_pack, workspace, self._handle if handle is None else handle)

    def autotune(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        handle: int | None = None,
        *,
        rounds: int = 5,
    ) -> list[tuple[str, float]]:
        """Time every plan on the caller's tensors, and run the fastest from now on.

        cuDNN's ``Graph::autotune`` has no Python form; this one times each configuration of each
        engine, too (:meth:`get_knobs_for_engine`), and the graph has a plan for each afterwards.
        Plans that filters drop are not timed, nor, after :meth:`create_execution_plan`, other
        engines than those asked for. The outputs are overwritten many times: an output that shares
        memory with an input leaves neither worth anything. The host waits for the device.

        Unless some were left out, the best is remembered beside the compiled kernels, for graphs of
        the same problem, shapes, strides and numbers on a device of that name, with this version of
        dlattn. Only ``create_execution_plans([heur_mode.AUTOTUNED])``, and what takes the same
        heuristics, asks for it.

        Args:
            variant_pack, handle: as for :meth:`execute`.
            workspace: :meth:`get_autotune_workspace_size` bytes; as for :meth:`execute`.
            rounds: how often each plan is timed, in turns; the median counts.

        Returns:
            Plan names and microseconds of a call, fastest first: on a GPU, of calls back to back in
            a CUDA graph, without the host's time.

        Raises:
            InvalidArgumentError: ``rounds`` is not positive.
            CompileError, InvalidVariantPackError: as of :meth:`build_plans` and :meth:`execute`;
                the plan that ran still does then.
        """
        from dlattn.graph.autotune import autotune

        if integer("rounds", rounds) < 1:
            raise InvalidArgumentError(f"rounds: expected at least 1, got {rounds}.")
        planning = self._plan_every_configuration()
        arguments = (variant_pack, workspace, self._handle if handle is None else handle)
        return autotune(self.lowered, self._makers, planning, arguments, rounds)

    def populate_cuda_graph(
        self,
        handle: int | None,
        variant_pack: Mapping[Any, Any],
        workspace: Any,
        cuda_graph: Any,
    ) -> None:
        """Add the work to an empty CUDA graph, without running it.

        Kernels, and what clears the workspace, become nodes of that graph itself, in a line and
        without a child graph. The nodes hold the addresses, and what numbers in host memory are
        now; the memory, and this graph, must stay as long as the CUDA graph may run. Inputs of JAX
        are not waited for.

        Args:
            handle: as for :meth:`execute`; nothing is enqueued, so a stream on it means nothing.
            variant_pack, workspace: as for :meth:`execute`.
            cuda_graph: a ``cudaGraph_t`` as an int, or an object that ``int()`` makes one of.

        Raises:
            InvalidArgumentError: the CUDA graph is null or has nodes, or no plan is built.
            InvalidVariantPackError: memory is missing, or is not what the graph declared.
            cudnnGraphNotSupportedError: the graph runs on the CPU.
        """
        from dlattn.runtime.cuda_graph import populate

        explicit_stream(handle)
        with self._built("populate").operations(variant_pack, workspace) as operations:
            populate(_address_of(cuda_graph), operations)

    def update_cuda_graph(
        self,
        handle: int | None,
        variant_pack: Mapping[Any, Any],
        workspace: Any,
        cuda_graph: Any,
    ) -> None:
        """Give the nodes of a CUDA graph that this graph populated, or of a clone of it (such as a
        child graph), the addresses of another call.

        What was instantiated of it takes them over by ``cudaGraphExecUpdate``, or by
        ``cudaGraphExecChildGraphNodeSetParams``. Arguments and errors as of
        :meth:`populate_cuda_graph`.

        Raises:
            InvalidArgumentError: the CUDA graph has other nodes; none is changed.
        """
        from dlattn.runtime.cuda_graph import update

        explicit_stream(handle)
        with self._built("update").operations(variant_pack, workspace) as operations:
            update(_address_of(cuda_graph), operations)

    # Details ----------------------------------------------------------------------------------

    def _built(self, purpose: str) -> Execution:
        execution = None if self._planning is None else self._planning.chosen
        if execution is None:
            raise InvalidArgumentError(
                f"Graph {self._name!r} has no built plan to {purpose}; call build() first."
            )
        return execution

    def _lower(self, engine: str | None = None) -> tuple[Lowered, list[Engine]]:
        from dlattn.graph.planning import supported_plans

        for node in self._nodes:
            self._keep_tensors_of(node)  # ragged offsets may have been set since the call
        self._check_uids()
        place = self._place
        lowered = translate(self._name, self._nodes, self._types, place)
        place.check(self._name, lowered.target)
        return lowered, supported_plans(lowered, engine)

    def _check_uids(self) -> None:
        named: dict[int, str] = {}
        for t in self._tensors:
            uid = t.attributes.uid
            if uid is None:
                continue
            if uid in named:
                raise InvalidGraphError(
                    f"Tensors {named[uid]!r} and {t.get_name()!r} of graph {self._name!r} both "
                    f"have uid {uid}; give each its own."
                )
            named[uid] = t.get_name()


def _address_of(cuda_graph: Any) -> int:
    try:
        return int(cuda_graph)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"cuda_graph: expected a cudaGraph_t as an int, got {type(cuda_graph).__name__}; pass "
            "its address."
        ) from None
