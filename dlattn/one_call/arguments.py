"""What the forward's and the backward's arguments have in common, and the problem they describe."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from dlattn.calls.apart import apart
from dlattn.calls.arguments import (
    SAID,
    Argument,
    admit,
    choice,
    flag,
    integer,
    number,
    page_tables,
    plain_spec,
    same_type,
    soft_cap,
)
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output, prepared
from dlattn.calls.request import CPU_TYPES, KERNEL_TYPES, Request
from dlattn.calls.sizes import CU_SEQLENS, Sizes, check_shared, packed_sizes, plain_sizes
from dlattn.dtypes import BOOLEANS, data_type, itemsize
from dlattn.errors import InvalidArgumentError
from dlattn.problem import Bias, Direction, Philox, TensorSpec
from dlattn.problem.dropout import signed
from dlattn.problem.layout import bias_edit, canonical_stride

_LAYOUTS = ("bshd", "bhsd", "sbhd", "thd")
_ALIGNMENTS = ("bottom_right", "top_left")

#: Tensors of every call, in order. Those of one direction follow, then numbers in host memory.
TENSORS = (
    *("q", "k", "v", "bias", "alibi_slopes", "sinks"),
    *("lengths of q", "lengths of k and v", "cu_seqlens of q", "cu_seqlens of k and v"),
    "block_table",
    *("dropout's seed", "dropout's offset"),
)

#: Arguments whose rows are moved in wide accesses.
_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

#: What a number in host memory looks like.
_HOST_NUMBER = np.array(0, np.int64)


@dataclass(frozen=True)
class Options:
    """What is said in numbers, hashable; ``shared``: one tensor is of q, k and v alike, of lengths
    and of cu_seqlens; ``words``: see :data:`dlattn.calls.arguments.SAID`."""

    layout: Any
    causal: Any
    window: Any
    alignment: Any
    scale: Any
    softcap: Any
    most: tuple[Any, Any]
    p: float
    shared: tuple[bool, bool]
    words: str = "dlattn"


#: How many options there are.
_OPTIONS = len(fields(Options))


def sorted_out(
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    lengths: Any,
    cu_seqlens: Any,
    max_seqlens: Any,
    block_table: Any,
    dropout: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...], list[Any]]:
    """The tensors and options of a call in the order of :data:`TENSORS` and :class:`Options`, and
    its numbers as arrays in host memory.

    Args:
        tensors: from q to the sinks.
        options: from the layout to the soft cap.
    """
    p, seed, offset = _dropout(dropout)
    hosts = [np.array(signed(x), np.int64) for x in (seed, offset) if isinstance(x, int)]
    state = (None if isinstance(x, int) else x for x in (seed, offset))
    layout, causal, window, *numbers = options
    if window is not None:
        window = whole("window", window)
    most = pair(max_seqlens)
    if max_seqlens is not None:
        most = whole("max_seqlens", most)
    return (
        (*tensors, *pair(lengths), *pair(cu_seqlens), block_table, *state),
        (layout, causal, window, *numbers, most, p, shared(lengths, cu_seqlens), "dlattn"),
        hosts,
    )


@dataclass(frozen=True)
class Described:
    """What a call's arguments describe.

    Attributes:
        values: the call's tensors, and stand-ins for its numbers in host memory.
        there: the tensors that are not ``None``, by name.
        tensors, positions: role -> spec, and position among ``values``, of those that both
            directions read.
    """

    values: tuple[Any, ...]
    there: Mapping[str, Argument]
    options: Options
    dtype: data_type
    sizes: Sizes
    bias: Bias | None
    tensors: Mapping[str, TensorSpec]
    positions: Mapping[str, int]

    @property
    def lse_type(self) -> data_type:
        return data_type.DOUBLE if self.dtype is data_type.DOUBLE else data_type.FLOAT

    def spec(self, role: str, it: Argument | Output) -> TensorSpec:
        """A tensor with rows, or with the log-sum-exp of each, as the problem sees it."""
        return self.sizes.spec(role, it, self.options.layout)

    def request(
        self, direction: Direction, more: Mapping[str, TensorSpec], **asked: Any
    ) -> Request:
        """The call as a request, with the tensors of one direction."""
        options, sizes = self.options, self.sizes
        scale = options.scale
        dropout = Philox() if options.p else None
        return Request(
            direction,
            {**self.tensors, **more},
            attn_scale=(
                self.there["q"].shape[-1] ** -0.5 if scale is None else number("scale", scale)
            ),
            window=_window(options, sizes),
            bottom_right=options.alignment == "bottom_right",
            softcap=soft_cap(options.softcap),
            bias=self.bias,
            dropout=dropout,
            numbers=dropout.numbers(options.p) if dropout else {},
            max_seq_kv=sizes.seq_kv if sizes.paged else None,
            most_tokens_q=sizes.tokens_q,
            most_tokens_kv=sizes.tokens_kv,
            aligned=all(it.seen.ptr % 16 == 0 for name, it in self.there.items() if name in _ROWS),
            **asked,
        )


class Wanted(NamedTuple):
    """What a call comes down to.

    Attributes:
        values: as of :class:`Described`.
        positions: of what the request reads, by role.
        outputs: the results, in order.
        idle: filling the outputs is all there is to do.
    """

    values: tuple[Any, ...]
    positions: Mapping[str, int]
    outputs: list[Output]
    request: Request
    idle: bool = False


def describe(there: Mapping[str, Argument], values: tuple[Any, ...], options: Options) -> Described:
    """What a call's arguments describe.

    Args:
        there: the tensors that are not ``None``, by name.
        values: all tensors.

    Raises:
        InvalidArgumentError: they contradict each other.
    """
    check_words(options.layout, options.alignment)
    rows = [there[name] for name in _ROWS if name in there]
    on_cpu = there["q"].seen.device[0] == "cpu"
    dtype = same_type(rows, CPU_TYPES if on_cpu else KERNEL_TYPES)
    sizes = (
        packed_sizes(there, options.most)
        if options.layout == "thd"
        else plain_sizes(there, options.layout, options.most)
    )
    check_shared(options.shared, sizes, there)
    for it in rows:
        it.expect_rows()
    found = {role: (role, sizes.spec(role, there[role], options.layout)) for role in "qkv"}
    found |= _row_tensors(there, sizes)
    bias = None
    if "bias" in there:
        spec, bias = _bias(there["bias"], sizes)
        found["bias"] = ("bias", spec)
    tensors = {role: spec for role, (_, spec) in found.items()}
    positions = {role: there[name].position for role, (name, _) in found.items()}
    if options.p:
        for role in ("dropout_seed", "dropout_offset"):
            name = role.replace("dropout_", "dropout's ")
            tensors[role] = _number_spec(name, there.get(name))
            positions[role] = there[name].position if name in there else len(values)
            values = values if name in there else (*values, _HOST_NUMBER)
    return Described(values, there, options, dtype, sizes, bias, tensors, positions)


def check_words(layout: Any, alignment: Any) -> None:
    """Refuse words that mean nothing.

    Raises:
        InvalidArgumentError: one does.
    """
    choice("layout", layout, _LAYOUTS)
    choice("alignment", alignment, _ALIGNMENTS)


def call_of(
    names: Sequence[str],
    needed: Sequence[str],
    wanted: Callable[..., Wanted],
    given: tuple[Any, ...],
) -> Call:
    """What a call of one direction does, of its tensors and a tuple of its options.

    Args:
        names: of the tensors, of which the last may be missing.
        needed: of those that must not be ``None``.
    """
    *tensors, options = given
    values = (*tensors, *[None] * (len(names) - len(tensors)))
    said = Options(*options[:_OPTIONS])
    there = admit(needed, dict(zip(names, values, strict=True)), said.words)
    found = wanted(there, values, said, *options[_OPTIONS:])
    device = there["q"].seen.device
    memory = apart(there, (it.name for it in found.outputs if it.given is not None))
    return prepared(
        found.values, device, found.positions, found.outputs, found.request,
        apart=memory, idle=found.idle,
    )  # fmt: skip


def run(
    calls: CallCache[Call], tensors: tuple[Any, ...], options: tuple[Any, ...], hosts: Sequence[Any]
) -> list[Any]:
    """The results of a call of one direction.

    Args:
        hosts: arrays of one number in host memory, which follow the tensors.
    """
    call, addresses = calls.find(tensors, options)
    if hosts:
        tensors, addresses = (*tensors, *hosts), [*addresses, *(x.ctypes.data for x in hosts)]
    return call(tensors, addresses)


def check_outputs(outputs: Sequence[Output]) -> None:
    """Refuse memory of the caller's that cannot take the results."""
    for it in outputs:
        if it.given is not None:
            it.given.expect_shape(it.shape, "that of the output")
            it.given.expect_output()


def _row_tensors(there: Mapping[str, Argument], sizes: Sizes) -> dict[str, tuple[str, TensorSpec]]:
    """Slopes, sinks, lengths: role -> argument and spec."""
    specs = {}
    slopes, sinks = there.get("alibi_slopes"), there.get("sinks")
    if slopes is not None:
        slopes.expect_type(data_type.FLOAT)
        one = len(slopes.shape) == 1
        slopes.expect_shape((sizes.heads,) if one else (sizes.batch, sizes.heads), "(H) or (B, H)")
        specs["alibi_slopes"] = ("alibi_slopes", slopes.vector())
    if sinks is not None:
        sinks.expect_type(data_type.FLOAT)
        sinks.expect_shape((sizes.heads,), "(H)")
        specs["sink_token"] = ("sinks", plain_spec(sinks, "h"))
    for name, role in (("lengths of q", "seq_len_q"), ("lengths of k and v", "seq_len_kv")):
        if name in there:
            there[name].expect_type(data_type.INT32, data_type.INT64)
            there[name].expect_shape((sizes.batch,), "(B)")
            specs[role] = (name, there[name].vector())
    if sizes.paged:
        table = there["block_table"]
        pages = page_tables(table, sizes.batch)
        specs |= {role: ("block_table", spec) for role, spec in pages.items()}
    for name, role in CU_SEQLENS.items():
        # Of keys in pages, they tell nothing but lengths.
        unread = sizes.paged and role == "cu_seqlens_kv" and "seq_len_kv" in specs
        if name in there and not unread:
            specs[role] = (name, there[name].vector())
    return specs


def broadcast_spec(it: Argument | Output) -> TensorSpec:
    """A tensor that may lack dimensions in front, as one of four."""
    missing = max(0, 4 - len(it.shape))
    dim, stride = (1,) * missing + it.shape, (0,) * missing + it.stride
    return TensorSpec(it.name, dim, canonical_stride(dim, stride), it.dtype)


def _bias(it: Argument, sizes: Sizes) -> tuple[TensorSpec, Bias]:
    on_cpu = (data_type.DOUBLE,) if it.seen.device[0] == "cpu" else ()
    floats = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, *on_cpu)
    it.expect_type(*floats, *BOOLEANS)
    spec = broadcast_spec(it)
    full = (sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv)
    if len(spec.dim) > 4 or any(n not in (1, most) for n, most in zip(spec.dim, full, strict=True)):
        raise InvalidArgumentError(
            f"{it.name}: expected a shape that broadcasts to (B, H, S_q, S_kv) = {full}, got "
            f"{it.shape}."
        )
    alignment = 16 if it.seen.ptr % 16 == 0 else itemsize(it.dtype)
    return spec, bias_edit(spec.dim, spec.stride, spec.dtype, alignment, sizes.seq_q)


def _number_spec(name: str, it: Argument | None) -> TensorSpec:
    """Of a number in host memory, which each call says, or of a tensor of one."""
    if it is None:
        return TensorSpec(name, (1,) * 4, (0, 0, 0, 1), data_type.INT64, by_value=True)
    it.expect_type(data_type.INT32, data_type.INT64)
    it.expect_shape((1,) * len(it.shape), "one element")
    return TensorSpec(name, (1,) * 4, (0, 0, 0, 1), it.dtype)


def _window(options: Options, sizes: Sizes) -> tuple[int | None, int | None]:
    """How far before and behind its position a query sees; ``None`` if no query feels a bound."""
    window, name = options.window, SAID[options.words].get("window", "window")
    if window is not None and (not isinstance(window, tuple) or len(window) != 2):
        raise InvalidArgumentError(f"{name}: expected a pair (left, right), got {window!r:.100}.")
    left, right = (
        None if bound is None or (size := integer(name, bound)) == -1 else size
        for bound in window or (None, None)
    )
    if min(left or 0, right or 0) < 0:
        raise InvalidArgumentError(
            f"{name}: expected 0 or more, or None or -1 for no bound, got {window}."
        )
    right = 0 if flag("causal", options.causal) else right
    before, behind = sizes.seq_kv - 1, sizes.seq_q - 1
    if options.alignment == "top_left":
        before, behind = behind, before
    return (
        None if left is None or left >= before else left,
        None if right is None or right >= behind else right,
    )


# What a call is before its tensors are looked at ----------------------------------------------


def pair(given: Any) -> tuple[Any, Any]:
    """Of q, and of k and v."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, given)


def shared(lengths: Any, cu_seqlens: Any) -> tuple[bool, bool]:
    """Whether one tensor of each is of q, k and v alike."""
    return (
        lengths is not None and not isinstance(lengths, tuple),
        cu_seqlens is not None and not isinstance(cu_seqlens, tuple),
    )


def whole(name: str, given: Any) -> Any:
    """A pair of numbers as integers, as equal ones are one key, and tensors one for each; what is
    no pair is refused later.

    Raises:
        InvalidArgumentError: one is no integer.
    """
    if not isinstance(given, (tuple, list)):
        return given
    return tuple([x if type(x) is int or x is None else integer(name, x) for x in given])


def _dropout(given: Any) -> tuple[float, Any, Any]:
    if given is None:
        return 0.0, None, None
    if not isinstance(given, tuple) or len(given) != 3:
        raise InvalidArgumentError(f"dropout: expected (p, seed, offset), got {given!r:.100}.")
    p = number("dropout's p", given[0])
    if not 0 <= p <= 1:
        raise InvalidArgumentError(f"dropout: expected p of at least 0 and at most 1, got {p}.")
    if p == 0:
        return 0.0, None, None
    seed, offset = (operator.index(x) if isinstance(x, np.integer) else x for x in given[1:])
    if seed is None or offset is None:
        raise InvalidArgumentError("dropout: expected a seed and an offset, got None.")
    return p, seed, offset
