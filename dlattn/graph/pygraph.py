"""The graph: attention, validated, planned, built and executed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dlattn.dtypes import data_type, from_any
from dlattn.errors import InvalidArgumentError, InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.handle import explicit_stream
from dlattn.graph.kernel_cache import checked
from dlattn.graph.lower import Lowered
from dlattn.graph.notes import behavior_notes, numerical_notes
from dlattn.graph.overrides import Overrides
from dlattn.graph.portable import Portable
from dlattn.graph.translate import translate
from dlattn.graph.vocabulary import behavior_note, build_plan_policy, heur_mode, numerical_note
from dlattn.plans.base import Runnable

if TYPE_CHECKING:
    from dlattn.graph.execution import Execution
    from dlattn.graph.planning import Planning


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
        super().__init__(name)
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
        self._overrides = Overrides(self) if is_override_shape_enabled else None
        self._lowered: Lowered | None = None
        self._makers: list[Callable[[], Runnable]] = []
        self._filters: list[Callable[[Runnable], bool]] = []
        self._planning: Planning | None = None

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
        if self._lowered is not None:
            return
        lowered, self._makers = self._lower()
        taken = {t.attributes.uid for t in self._tensors}
        free = (uid for uid in range(1, len(taken) + len(self._tensors) + 1) if uid not in taken)
        for t in self._tensors:
            if t.attributes.uid is None:
                t.attributes.uid = next(free)
            t.freeze()
        self._lowered = lowered
        self._is_built = True

    @property
    def lowered(self) -> Lowered:
        """What plans see of the graph; builds the operation graph if that is not done."""
        self.build_operation_graph()
        assert self._lowered is not None
        return self._lowered

    def create_execution_plans(
        self, heuristics: Iterable[heur_mode] = (heur_mode.A, heur_mode.FALLBACK)
    ) -> None:
        """Make the plans, best first. dlattn has one ranking, whatever the heuristic's name."""
        for mode in heuristics:
            if not isinstance(mode, heur_mode):
                raise TypeError(f"create_execution_plans takes heur_mode members; got {mode!r}.")
        self._plan(keep_others=False, engines=range(self.get_engine_count()))

    def create_execution_plan(self, engine_id: int, knobs: Mapping[Any, int] | None = None) -> None:
        """Add the plan of one engine, from 0 to ``get_engine_count() - 1``, best first.

        Raises:
            InvalidArgumentError: there is no such engine.
            cudnnGraphNotSupportedError: knobs were given; plans have none.
        """
        if knobs:
            raise cudnnGraphNotSupportedError("Plans have no knobs to turn; leave knobs out.")
        if not 0 <= engine_id < self.get_engine_count():
            raise InvalidArgumentError(
                f"There is no engine {engine_id}; {len(self._makers)} can run this graph, counted "
                "from 0."
            )
        self._plan(keep_others=True, engines=[engine_id])

    def check_support(self) -> None:
        """Check that filtering left a plan.

        Raises:
            cudnnGraphNotSupportedError: it left none.
        """
        self._planned().check()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Compile and load the best plan, or all of them: the slow step.

        Raises:
            CompileError: NVRTC refused a kernel.
        """
        self._planned().build(policy)

    def build(self, heuristics: Iterable[heur_mode] | None = None) -> None:
        """All steps at once."""
        self.create_execution_plans(*() if heuristics is None else (heuristics,))
        self.build_plans()

    def build_plan_at_index(self, index: int) -> None:
        """Compile and load one plan, which becomes the one that ``execute`` runs."""
        self._planned().build_at(index)

    # Choosing among plans ---------------------------------------------------------------------

    def get_engine_count(self) -> int:
        """How many plans can run the graph."""
        self.build_operation_graph()
        return len(self._makers)

    def get_knobs_for_engine(self, engine_id: int) -> list[Any]:
        """None: plans choose their tiling themselves."""
        return []

    def get_execution_plan_count(self) -> int:
        """Plans made so far; 0 before ``create_execution_plans``."""
        return 0 if self._planning is None else len(self._planning.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._planned().at(index).name

    def get_workspace_size(
        self, override_uids: Any = None, override_shapes: Any = None, override_strides: Any = None
    ) -> int:
        """Bytes of scratch memory that ``execute`` needs; may be 0.

        Of the declared shapes; with dlattn's own arguments, of a call of ``execute`` with these
        shapes, for which all is then ready.
        """
        if override_uids is not None:
            return self._overriding().workspace_size(
                override_uids, override_shapes, override_strides
            )
        return self._planned().workspace_size

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self._planned().at(index).workspace_size

    def get_behavior_notes(self) -> list[behavior_note]:
        """The notes of the best plan."""
        return self.get_behavior_notes_for_plan_at_index(0)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        return sorted(behavior_notes(self._planned().at(index)), key=lambda note: note.name)

    def select_behavior_notes(self, notes: Iterable[behavior_note]) -> None:
        """Keep only plans that have every note."""
        wanted = set(notes)
        self._filter(lambda plan: wanted <= behavior_notes(plan))

    def deselect_behavior_notes(self, notes: Iterable[behavior_note]) -> None:
        """Keep only plans that have none of the notes."""
        unwanted = set(notes)
        self._filter(lambda plan: not unwanted & behavior_notes(plan))

    def select_numeric_notes(self, notes: Iterable[numerical_note]) -> None:
        """Keep only plans that have every note."""
        wanted = set(notes)
        self._filter(lambda plan: wanted <= numerical_notes(plan))

    def deselect_numeric_notes(self, notes: Iterable[numerical_note]) -> None:
        """Keep only plans that have none of the notes."""
        unwanted = set(notes)
        self._filter(lambda plan: not unwanted & numerical_notes(plan))

    def deselect_engines(self, names: Iterable[str]) -> None:
        """Keep only plans with other names than these."""
        unwanted = set(names)
        self._filter(lambda plan: plan.name not in unwanted)

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        """Keep only plans that need at most this much workspace."""
        self._filter(lambda plan: plan.workspace_size <= nbytes)

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
                which cannot be. ``None`` keys and unknown ones are skipped.
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
        run before: those of another plan, or of strides that are aligned otherwise; NVRTC takes
        about a second. ``get_workspace_size`` with the same arguments does all that in advance.

        Raises:
            InvalidVariantPackError: memory is missing, or is not what the graph, or the call,
                declared; or the workspace is smaller than the shapes need.
            InvalidArgumentError: no plan is built.
            InvalidGraphError: the shapes do not go together.
            cudnnGraphNotSupportedError: no plan runs the shapes.
        """
        if not (override_uids is None and override_shapes is None and override_strides is None):
            execution: Execution | None = self._overriding().execution(
                override_uids, override_shapes, override_strides, workspace
            )
        else:
            execution = None if self._planning is None else self._planning.chosen
        if execution is None:
            raise InvalidArgumentError(
                f"Graph {self._name!r} has no built plan to execute; call build() first."
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

    # CUDA graphs ------------------------------------------------------------------------------

    def populate_cuda_graph(self, *args: Any) -> None:
        """Not supported yet."""
        raise _not_yet("Populating a CUDA graph")

    def update_cuda_graph(self, *args: Any) -> None:
        """Not supported yet."""
        raise _not_yet("Updating a CUDA graph")

    # Details ----------------------------------------------------------------------------------

    def _lower(self) -> tuple[Lowered, list[Callable[[], Runnable]]]:
        from dlattn.graph.planning import supported_plans

        for node in self._nodes:
            self._keep_tensors_of(node)  # ragged offsets may have been set since the call
        self._check_uids()
        place = self._place
        lowered = translate(self._name, self._nodes, self._types, place)
        place.check(self._name, lowered.target)
        return lowered, supported_plans(lowered)

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

    def _planned(self) -> Planning:
        if self._planning is None:
            self.create_execution_plans()
        assert self._planning is not None
        return self._planning

    def _plan(self, keep_others: bool, engines: Iterable[int]) -> None:
        from dlattn.graph.planning import Planning

        assert self._lowered is not None
        if self._planning is None or not keep_others:
            self._planning = Planning(self._lowered, self._kernel_cache)
        for engine in engines:
            self._planning.append(self._makers[engine]())
        for wanted in self._filters:
            self._planning.keep(wanted)

    def _filter(self, wanted: Callable[[Runnable], bool]) -> None:
        self._filters.append(wanted)
        if self._planning is not None:
            self._planning.keep(wanted)


def _not_yet(what: str) -> cudnnGraphNotSupportedError:
    return cudnnGraphNotSupportedError(f"{what} is not supported yet; leave it out.")
