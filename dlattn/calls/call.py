"""A built plan and the memory of its results: what a function runs.

This is the hot path: no shape is looked at, and nothing is checked that the key of the cache says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlattn.calls.apart import Check
from dlattn.calls.arguments import Argument
from dlattn.calls.keyless import Finish, finished
from dlattn.calls.request import Request
from dlattn.config import settings
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.opaque import opaque
from dlattn.plans.base import Bound, Executable, Plan, bound
from dlattn.plans.host import host_array
from dlattn.plans.select import select
from dlattn.problem import Geometry
from dlattn.runtime.gradients import Watched, watched_of
from dlattn.runtime.log import log
from dlattn.runtime.protocols import compact_strides, strides_as
from dlattn.runtime.streams import current_stream_of
from dlattn.runtime.target import CPU, Target, cuda_target
from dlattn.runtime.tensors import (
    ORDERED_TYPES,
    allocator,
    array_beside,
    assign,
    hands_over,
    on_device,
    order_before,
    reader,
    to_caller,
)


@dataclass(frozen=True)
class Output:
    """One result of a call.

    Attributes:
        role: of the plan's tensors; ``None`` for a result that no kernel writes.
        shape, dtype: of memory that the call makes, without gaps.
        given: the caller's memory, in place of that.
        order: what has its dimensions in the same order in memory; ``None`` for row-major.
        fill: what it holds before the plan runs: a number, or one of each head, (H,), in results
            of shape (..., H, S); ``None`` is anything.
        finish: says more of what it holds then.
    """

    role: str | None
    shape: tuple[int, ...]
    dtype: data_type
    given: Argument | None = None
    fill: float | Argument | None = None
    order: Argument | None = None
    finish: Finish | None = None

    @property
    def name(self) -> str:
        return self.role or "" if self.given is None else self.given.name

    @property
    def stride(self) -> tuple[int, ...]:
        if self.given is not None:
            return self.given.stride
        if self.order is not None:
            return strides_as(self.shape, self.order.shape, self.order.stride)
        return compact_strides(self.shape)


#: What a function does for all calls that look alike. It takes tensors that look like the first
#: call's and the list of their addresses, appends those of the results to it, and returns the
#: results in the first tensor's framework. It raises :class:`InvalidArgumentError` if memory for a
#: result is another tensor's, or, in host memory, cumulative lengths leave the tensors.
Call = Callable[[Sequence[Any], list[int]], list[Any]]

#: Of a result: the position of the caller's memory, or what makes memory.
Memory = tuple[int, Callable[[], Any] | None]

#: What few calls do before the plan runs: of tensors, addresses, results and the stream.
First = Callable[[Sequence[Any], Sequence[int], Sequence[Any], int], None]


@dataclass(frozen=True)
class _First:
    """See :data:`First`.

    Attributes:
        unordered: positions of tensors whose frameworks run on streams of their own.
        check: see :func:`cu_seqlens_check`; of the addresses at these places.
        fills: of results, by number, what they hold then; see :class:`Output`.
        finishes: and what says more of it, with the numbers of rows.
    """

    unordered: Sequence[int]
    check: Callable[[Mapping[str, int]], None] | None
    places: Mapping[str, tuple[int, int]]
    fills: Sequence[tuple[int, float | Argument]]
    finishes: Sequence[tuple[int, Finish, Any]]

    @property
    def is_needed(self) -> bool:
        return any((self.unordered, self.check, self.fills, self.finishes))

    def do(
        self, values: Sequence[Any], addresses: Sequence[int], results: Sequence[Any], stream: int
    ) -> None:
        if self.unordered:
            order_before([values[at] for at in self.unordered], stream)
        if self.check is not None:
            self.check({role: addresses[at] for role, (at, _) in self.places.items()})
        for number, filling in self.fills:
            if isinstance(filling, Argument):
                numbers = array_beside(values[filling.position], results[number])
                filling = numbers.reshape(-1, 1)
            assign(results[number], filling)
        for number, finish, row in self.finishes:
            finished(finish, results[number], row, values)


def prepared(
    values: Sequence[Any],
    device: tuple[str, int],
    inputs: Mapping[str, int],
    outputs: Sequence[Output],
    request: Request | Executable,
    byte_offsets: Mapping[str, int] | None = None,
    apart: Check | None = None,
    idle: bool = False,
    written: Iterable[int] = (),
) -> Call:
    """What calls like this one do, built.

    Args:
        values: the tensors of the first such call, which nothing keeps; the first one's framework
            gets the results.
        device: where they are.
        inputs: role -> position among the tensors.
        outputs: in the order of the results.
        request: what is wanted, or what does it.
        idle: filling the outputs is all there is to do for it.
        byte_offsets: role -> bytes from the address of its tensor.
        apart: refuses memory of the caller's that is another tensor's.
        written: positions among the tensors of those that are written to beside the outputs.

    Raises:
        cudnnGraphNotSupportedError: no plan can do it; the message lists every plan's reason.
        CompileError: NVRTC refused a kernel.
    """
    kind, index = device
    on_cpu = kind == "cpu"
    like = values[0]
    memory = [_memory(like, output) for output in outputs]
    given = {at for at, make in memory if make is None}
    offsets = byte_offsets or {}
    places = {role: (at, offsets.get(role, 0)) for role, at in inputs.items()}
    # Addresses of results follow those of the tensors, of which some may be left out.
    results = enumerate(outputs, -len(outputs))
    places |= {out.role: (at, 0) for at, out in results if out.role}
    check: Callable[[Mapping[str, int]], None] | None = None
    plan: Executable | None = None
    if isinstance(request, Request):
        if on_cpu:
            check = cu_seqlens_check(request.geometry)
        if not idle:
            plan = built(request, CPU if on_cpu else cuda_target(index))
    else:
        plan = request
        plan.build()
    first = _First(
        [at for at in sorted({*inputs.values(), *given}) if type(values[at]) not in ORDERED_TYPES],
        check,
        places,
        [(n, it.fill) for n, it in enumerate(outputs) if it.fill is not None],
        [
            (n, it.finish, on_device(np.arange(it.finish.rows, dtype=np.int32), like))
            for n, it in enumerate(outputs)
            if it.finish is not None
        ],
    )
    run: Bound | None = None
    workspace: Callable[[], Any] | None = None
    if plan is not None:
        run = bound(plan, places)
        if size := plan.workspace_size:
            workspace = allocator(like, (size,), (1,), data_type.UINT8)
    return _composed(
        memory,
        like,
        apart,
        # One result has nothing but its beginning to be told apart by.
        min(given) if len(given) == 1 and not written else None,
        None if on_cpu else current_stream_of(like, index),
        first.do if first.is_needed else None,
        run,
        workspace,
        watched_of(values, sorted({*given, *written})),
    )


def _composed(
    memory: Sequence[Memory],
    like: Any,
    apart: Check | None,
    alone: int | None,
    current_stream: Callable[[], int] | None,
    first: First | None,
    run: Bound | None,
    workspace: Callable[[], Any] | None,
    watched: Watched | None,
) -> Call:
    """The call of these parts: a function that keeps them in its own variables, because objects and
    their attributes would take a tenth of a call's time.

    Args:
        alone: where the only result's memory is, of which ``apart`` needs to be asked only if
            something else begins there.
    """
    read, is_handed_over = reader(like), hands_over(like)
    tell, pick = watched or (None, None)

    def call(values: Sequence[Any], addresses: list[int]) -> list[Any]:
        if apart is not None and (alone is None or addresses.count(addresses[alone]) > 1):
            apart(addresses)
        results = []
        for at, make in memory:
            if make is None:
                results.append(values[at])
                addresses.append(addresses[at])
            else:
                result = make()
                results.append(result)
                addresses.append(read(result))
        stream = 0 if current_stream is None else current_stream()
        if first is not None:
            first(values, addresses, results, stream)
        if run is not None:
            if workspace is None:
                run(addresses, 0, stream)
            else:
                # Freed as it was made, in the order of the stream.
                scratch = workspace()
                run(addresses, read(scratch), stream)
        if tell is not None and pick is not None:
            tell(pick(values))
        if not is_handed_over:
            return results
        return [
            made if make is None else to_caller(made, values[0])
            for made, (_, make) in zip(results, memory, strict=True)
        ]

    return opaque(call)


def cu_seqlens_check(geometry: Geometry) -> Callable[[Mapping[str, int]], None] | None:
    """What refuses lengths of packed sequences, in host memory, with which one would leave the
    tensors, reach into another, or have rows that nobody reads or writes; of addresses."""
    if "cu_seqlens_q" not in geometry.tensors:
        return None
    sides = (
        ("cu_seqlens_q", "seq_len_q", geometry.seq_q, geometry.most_tokens_q or 0),
        ("cu_seqlens_kv", "seq_len_kv", geometry.seq_kv, geometry.most_tokens_kv or 0),
    )

    def read(pointers: Mapping[str, int], role: str) -> Any:
        spec = geometry.tensors.get(role)
        return None if spec is None else host_array(pointers[role], spec).reshape(-1).astype(int)

    def check(pointers: Mapping[str, int]) -> None:
        for begins, role, longest, most in sides:
            cu_seqlens, lengths = read(pointers, begins), read(pointers, role)
            if cu_seqlens is not None:
                sizes = _sizes(geometry.tensors[begins].name, cu_seqlens, most)
                if lengths is None:
                    role, lengths = begins, sizes
                else:
                    # Behind the last token there is, there is no sequence to reach into.
                    lengths = np.minimum(lengths, most - cu_seqlens[:-1])
                    _expect_lengths(geometry.tensors[role].name, lengths, sizes)
            if lengths is not None and (lengths > longest).any():
                raise InvalidArgumentError(
                    f"{geometry.tensors[role].name}: expected sequences of at most {longest} rows, "
                    f"as the maximum (max_seqlen) or the pages say, got {lengths.tolist()}; give a "
                    "larger maximum, or more pages."
                )

    return check


def _sizes(name: str, cu_seqlens: Any, most: int) -> Any:
    sizes = np.diff(cu_seqlens)
    if cu_seqlens[0] < 0 or (sizes < 0).any() or cu_seqlens[-1] > most:
        raise InvalidArgumentError(
            f"{name}: expected numbers that never fall, from 0 to at most {most}, the tokens there "
            f"are, got {cu_seqlens.tolist()}."
        )
    return sizes


def _expect_lengths(name: str, lengths: Any, sizes: Any) -> None:
    if (lengths > sizes).any():
        raise InvalidArgumentError(
            f"{name}: expected at most the rows that each sequence has, {sizes.tolist()}, got "
            f"{lengths.tolist()}, which reach into the next one; give shorter ones."
        )


def _memory(like: Any, output: Output) -> Memory:
    if output.given is not None:
        return output.given.position, None
    return -1, allocator(like, output.shape, output.stride, output.dtype)


def built(request: Request, target: Target) -> Plan:
    """The best plan for a request, ready to run."""
    problem, geometry = request.problem, request.geometry
    kind = select(problem, geometry, target, settings().engine)[0]
    plan = kind(problem, geometry, target)
    plan.build()
    log(2, f"{problem.direction.value} call on {target}: {plan.name}")
    return plan
