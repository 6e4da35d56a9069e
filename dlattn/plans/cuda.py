"""What every CUDA plan shares: its kernels compiled side by side, one ``Params``, launches."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from dlattn.dtypes import data_type, to_numpy
from dlattn.plans.argument import Params, SlopeRef
from dlattn.plans.base import Bound, Places, Plan
from dlattn.plans.dumps import debug_kernels, dump_kernels
from dlattn.plans.kernels import MOST_BLOCKS_YZ, FirstScratch, KernelLaunch, round_up
from dlattn.plans.params import Place, address_slot, number_at, number_slot, params_for
from dlattn.plans.ragged import RaggedScratch
from dlattn.problem import Alibi, Direction, Geometry, Problem, alibi_slopes
from dlattn.problem.layout import LONGEST
from dlattn.problem.problem import BROADCAST_ROLES
from dlattn.runtime import jit
from dlattn.runtime.launch import Clear, Launch, Operation, guards_of
from dlattn.runtime.tables import Tables
from dlattn.runtime.target import Target, cuda_device_count

if TYPE_CHECKING:
    from dlattn.plans.score_blocks import ScoreBlocksScratch
    from dlattn.runtime.tensormap import AddressSlot


class CudaPlan(Plan):
    """A plan that launches kernels of ``cuda_src/kernels``, in order, with one ``Params``."""

    def __init__(self, problem: Problem, geometry: Geometry, target: Target) -> None:
        problem = self.skipping(problem)
        super().__init__(problem, geometry, target)
        self._argument = self.make_argument()
        self._params = self.params_in(self._argument)
        if self.score_blocks is not None:
            self.score_blocks.describe(self._params)
        if problem.dropout is not None:
            self._params.dropout_addend = problem.dropout.addend(geometry.dropout_p)
        #: Held by one call at a time, by ``with`` alone: what interrupts an ``acquire()``, or an
        #: ``__enter__`` of Python's, would leave it held.
        self._lock = Lock()
        self._guard: Callable[[], AbstractContextManager[object]] = nullcontext
        self._clear: Clear | None = None
        self._operations: list[Operation] | None = None
        self._tables = Tables(target.index)
        self._scratch_at: int | None = None
        by_value = {role: spec for role, spec in geometry.tensors.items() if spec.by_value}
        self._host_numbers = [
            (role, to_numpy(spec.dtype), number_slot(self._params, geometry, role))
            for role, spec in by_value.items()
        ]
        given = "block_mask" if self.score_blocks is None else "given_block_mask"
        #: Of each address the role, the field, and what is added to it.
        self._slots: list[tuple[str, AddressSlot, int]] = [
            (role, address_slot(self._params, geometry, given if role == "block_mask" else role), 0)
            for role in geometry.tensors
            if role not in by_value
        ]

    @abstractmethod
    def kernels(self) -> list[KernelLaunch]:
        """The kernels, in launch order."""

    @cached_property
    def ragged(self) -> RaggedScratch | None:
        """What a ragged problem's kernels are told of its entries."""
        return RaggedScratch(self.geometry) if self.problem.ragged else None

    @classmethod
    def skipping(cls, problem: Problem) -> Problem:
        """The problem, with blocks that a user's function masks skipped only where that does not
        ask for another kernel; where they are, kernels mask elements, too."""
        return problem.masked_apart

    @cached_property
    def score_blocks(self) -> ScoreBlocksScratch | None:
        """The block mask that a user's function of scores is."""
        if (blocks := self.problem.score_blocks) is None:
            return None
        from dlattn.plans.score_blocks import ScoreBlocksScratch

        return ScoreBlocksScratch(blocks, self.geometry)

    def first_kernels(self) -> list[KernelLaunch]:
        """What runs before :meth:`kernels`."""
        return [scratch.kernel() for scratch in self.first_scratch()]

    def make_argument(self) -> ctypes.Structure:
        """The argument of every kernel, with every address null; they are set at each execute."""
        return params_for(self.geometry)

    @staticmethod
    def params_in(argument: ctypes.Structure) -> Params:
        """The ``Params`` that an argument is or has."""
        assert isinstance(argument, Params)
        return argument

    @cached_property
    def workspace_size(self) -> int:
        return self.scratch_bytes + sum(scratch.nbytes for scratch in self.first_scratch())

    def first_scratch(self) -> list[FirstScratch]:
        """What the first kernels write, after what is for the others."""
        return [scratch for scratch in (self.ragged, self.score_blocks) if scratch is not None]

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of the workspace that :meth:`scratch_places` divides; a multiple of 16."""
        return 0

    @cached_property
    def cleared_bytes(self) -> int:
        """Bytes at the start of the workspace that are zero when the first kernel starts."""
        return 0

    def scratch_places(self) -> list[Place]:
        """Where addresses of what the kernels leave each other go."""
        return []

    @cached_property
    def _places(self) -> list[Place]:
        """The same of all that is in the workspace."""
        places, begin = self.scratch_places(), self.scratch_bytes
        for scratch in self.first_scratch():
            places += [(slot, begin + offset) for slot, offset in scratch.places(self._params)]
            begin += scratch.nbytes
        return places

    def place_workspace(self, workspace: int) -> None:
        """Writes the addresses of scratch arrays into the argument, if they are others."""
        if workspace == self._scratch_at:
            return
        for slot, offset in self._places:
            slot.value = workspace + offset
        if self._clear is not None:
            self._clear.address = workspace
        self._scratch_at = workspace

    def _all_kernels(self) -> list[KernelLaunch]:
        return [
            *self.first_kernels(),
            *self.kernels(),
            *dump_kernels(self.problem, self.geometry),
            *debug_kernels(self.problem.masked_by_edits, self.geometry),
        ]

    def sources(self) -> list[jit.KernelSource]:
        return [kernel.source for kernel in self._all_kernels()]

    def compile(self) -> list[jit.CompiledKernel]:
        return jit.compile_kernels(self.sources(), self.target.arch, self.companions)

    def build(self) -> None:
        if self._operations is not None:
            return
        self._place_slopes()
        if self.ragged is not None:
            self.ragged.describe(self._params)
        self._guard = guards_of(self.target.index, cuda_device_count())
        operations: list[Operation] = []
        if self.cleared_bytes:
            self._clear = Clear(self.cleared_bytes)
            operations.append(self._clear)
        for kernel, cubin in zip(self._all_kernels(), self.compile(), strict=True):
            loaded = jit.load(cubin, self.target.index)
            loaded.set_shared(kernel.shared)
            operations.append(
                Launch(
                    loaded.function,
                    kernel.grid,
                    kernel.block,
                    kernel.shared,
                    ctypes.addressof(self._params if kernel.plain else self._argument),
                    programmatic=kernel.programmatic,
                    name=kernel.source.name,
                    cluster=kernel.cluster,
                )
            )
        self._operations = operations

    def _place_slopes(self) -> None:
        """ALiBi's slopes, unless the user gives them: on the device as long as the plan is."""
        alibi = any(isinstance(edit, Alibi) for edit in self.problem.edits)
        if alibi and "alibi_slopes" not in self.geometry.tensors:
            slopes = alibi_slopes(self.geometry.heads_q).reshape(-1)
            self._params.alibi_slopes = SlopeRef(self._tables.place(slopes), 0, 1)

    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        # The driver copies Params during the launch call, so the lock covers no device work.
        with self._guard(), self._lock:
            self._tables.stay_if_captured(stream)
            for operation in self._placed(pointers, workspace):
                operation(stream)

    def bind(self, places: Places) -> Bound:
        operations = self._operations
        if self._host_numbers or operations is None:
            return super().bind(places)
        placed = [(it, places[role][0], places[role][1] + to) for role, it, to in self._slots]
        stay = self._tables.stay_if_captured if self._tables else None
        enqueued = [operation for operation in operations if not operation.is_empty]
        lock, guard = self._lock, self._guard

        def run(addresses: Sequence[int], workspace: int, stream: int) -> None:
            with lock:
                for slot, at, more in placed:
                    slot.value = addresses[at] + more
                if workspace:
                    self.place_workspace(workspace)
                if stay is not None:
                    stay(stream)
                for operation in enqueued:
                    # `operation(stream)`, but for a frame.
                    if operation.stream != stream:
                        operation.move(stream)
                    if status := operation.function(*operation.arguments):
                        operation.retry(status)

        if guard is nullcontext:
            return run

        def guarded(addresses: Sequence[int], workspace: int, stream: int) -> None:
            with guard():
                run(addresses, workspace, stream)

        return guarded

    @contextmanager
    def operations(
        self, pointers: Mapping[str, int], workspace: int
    ) -> Iterator[Sequence[Operation]]:
        with self._guard(), self._lock:
            yield self._placed(pointers, workspace)

    def _placed(self, pointers: Mapping[str, int], workspace: int) -> Sequence[Operation]:
        """The operations, with the addresses and numbers of one call."""
        if self._operations is None:
            raise RuntimeError(f"{self.name}: build() comes before execute()")
        for role, slot, begin in self._slots:
            slot.value = pointers[role] + begin
        for role, dtype, number in self._host_numbers:
            number.value = number_at(pointers[role], dtype)
        self.place_workspace(workspace)
        return self._operations


#: The largest head dimension of the portable kernels, and of Hopper's.
MOST_HEAD_DIM, MOST_HOPPER_HEAD_DIM = 512, 256


def refusal(
    problem: Problem,
    geometry: Geometry,
    target: Target,
    direction: Direction,
    kernel: str,
    most_head_dim: int = MOST_HEAD_DIM,
) -> str | None:
    """Why no CUDA kernel up to a head dimension can run a problem, or ``None``."""
    if problem.direction is not direction:
        return f"{kernel} computes the {direction.value} pass only."
    if target.kind != "cuda":
        return "it needs a CUDA device."
    if direction is Direction.BACKWARD and "o" not in geometry.tensors:
        return "o is not given."
    if target.capability < (8, 0):
        return f"it needs compute capability 8.0 (Ampere) or above; {target} has {target.version}."
    if problem.dtype not in (data_type.HALF, data_type.BFLOAT16):
        return (
            f"tensor cores take HALF or BFLOAT16; the graph has {problem.dtype.name}. "
            "Cast q, k and v, or run on the CPU."
        )
    if problem.compute is not data_type.FLOAT:
        return f"tensor cores accumulate in FLOAT; the graph asks for {problem.compute.name}."
    for name, dim in (("q and k", problem.head_dim_qk), ("v", problem.head_dim_v)):
        if dim > most_head_dim:
            return f"the head dimension of {name} must be at most {most_head_dim}; got {dim}."
        if dim % 8:
            return (
                f"the head dimension of {name} must be a multiple of 8; got {dim}. Pad the last "
                f"dimension with zeros to {round_up(dim, 8)}."
            )
    if problem.stats not in (None, data_type.FLOAT, data_type.HALF, data_type.BFLOAT16):
        return f"stats must be FLOAT, HALF or BFLOAT16; got {problem.stats.name}."
    if "debug_softmax" in geometry.tensors and problem.stats is None:
        return "debug_softmax is made from stats; make them an output, too."
    for role in BROADCAST_ROLES:
        added = geometry.tensors.get(role)
        if added is not None and added.dtype is data_type.DOUBLE:
            return f"{role} must be HALF, BFLOAT16, FLOAT, BOOLEAN or UINT8; got DOUBLE."
    if max(geometry.batch, geometry.heads_q) > MOST_BLOCKS_YZ:
        return f"batch and heads must each be at most {MOST_BLOCKS_YZ}."
    longest = max(geometry.seq_q, geometry.rows_kv)
    if longest > LONGEST:
        return f"sequences must have at most {LONGEST} rows; got {longest}."
    return None
