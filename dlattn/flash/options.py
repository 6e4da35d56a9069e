"""What the four functions' arguments mean, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlattn.calls.arguments import (
    Argument,
    admit,
    check_page_size,
    flag,
    integer,
    number,
    page_tables,
    same_type,
)
from dlattn.calls.request import CPU_TYPES, KERNEL_TYPES
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.flash.layouts import Layout
from dlattn.problem import PAGE_TABLES, TensorSpec
from dlattn.problem.layout import LONGEST
from dlattn.runtime.protocols import compact_strides
from dlattn.runtime.tensors import allocate, assign, view

#: Head sizes that kernels take are multiples of it.
HEAD_UNIT = 8


class Options(NamedTuple):
    """The arguments that are no tensors, in the order of keys of kept calls."""

    p_dropout: Any
    softmax_scale: Any
    is_causal: Any
    window_size_left: Any
    window_size_right: Any
    softcap: Any
    return_softmax: Any = False
    attention_chunk: Any = 0
    max_seqlen_q: Any = 0
    max_seqlen_k: Any = 0
    zero_tensors: Any = False
    deterministic: Any = False


def named(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Argument]:
    """The tensors of a call, those that are there; see :func:`admit`. The last ones may be left
    out."""
    needed = (name for name in names if not name.endswith("_") and name not in _OPTIONAL)
    return admit(needed, dict.fromkeys(names) | dict(zip(names, tensors, strict=False)))


_OPTIONAL = ("seqused_q", "seqused_k", "sinks", "philox_seed", "philox_offset")


def padded_size(head_size: int) -> int:
    """The least head size that kernels take, not below this one."""
    return -(-head_size // HEAD_UNIT) * HEAD_UNIT


def roomy(given: Any) -> Any:
    """Memory for a result whose head size kernels take, of the caller's: that itself, or a wider
    copy, as rows that no sequence has keep what they hold; ``None`` of ``None``."""
    if given is None:
        return None
    seen = view(given)
    *rows, columns = seen.shape
    shape = (*rows, padded_size(columns))
    if shape[-1] == columns:
        return given
    room = allocate(given, shape, compact_strides(shape), seen.dtype)
    if 0 not in shape:
        assign(room[..., :columns], given)
    return room


def cut(result: Any, columns: int, given: Any) -> Any:
    """The first columns of a result, in the caller's memory if it has given some.

    Args:
        result: in what :func:`roomy` makes of that.
    """
    if result is given:
        return given
    result = result[..., :columns]
    if given is None:
        return result
    assign(given, result)
    return given


def element_type(arguments: Mapping[str, Argument], *names: str) -> data_type:
    """The one type of these tensors, those that are there: fp16 or bf16, and on the CPU fp32 and
    fp64, too. Each has a stride of 1 in its last dimension."""
    there = [arguments[name] for name in names if name in arguments]
    for it in there:
        it.expect_rows()
    on_cpu = there[0].seen.device[0] == "cpu"
    return same_type(there, CPU_TYPES if on_cpu else KERNEL_TYPES)


def dense_layout(given: Mapping[str, Argument]) -> Layout:
    """The sizes of (batch, seqlen, heads, head_size)."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    q.expect_shape((None,) * 4, "(batch_size, seqlen_q, num_heads, head_size)")
    meaning = "(batch_size, seqlen_k, num_heads_k, head_size)"
    k.expect_shape((q.shape[0], None, None, q.shape[3]), meaning)
    v.expect_shape((*k.shape[:3], None), meaning)
    batch, seqlen_q, heads, _ = q.shape
    _check_heads(q, k, v)
    return Layout(batch, heads, k.shape[2], seqlen_q, k.shape[1])


def packed_layout(given: Mapping[str, Argument], options: Options) -> Layout:
    """The sizes of (total, heads, head_size), keys maybe in pages."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    cu_seqlens = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    for it in cu_seqlens:
        it.expect_type(data_type.INT32)
        it.expect_shape((None,), "(batch_size + 1,)")
        it.expect_contiguous()
    if cu_seqlens[0].shape[0] == 0:
        raise InvalidArgumentError("cu_seqlens_q: expected batch_size + 1 numbers, got none.")
    cu_seqlens[1].expect_shape(cu_seqlens[0].shape, "that of cu_seqlens_q")
    batch = cu_seqlens[0].shape[0] - 1
    q.expect_shape((None,) * 3, "(total_q, num_heads, head_size)")
    longest_q, longest_k = (
        _longest(name, getattr(options, name)) for name in ("max_seqlen_q", "max_seqlen_k")
    )
    table = given.get("block_table_")
    if table is None:
        k.expect_shape((None, None, q.shape[2]), "(total_k, num_heads_k, head_size)")
    else:
        meaning = "(num_blocks, page_size, num_heads_k, head_size)"
        k.expect_shape((None, None, None, q.shape[2]), meaning)
        page = k.shape[1]
        check_page_size(k, page)
        if len(table.shape) == 2 and table.shape[1] * page < longest_k:
            raise InvalidArgumentError(
                f"block_table_: expected pages for max_seqlen_k = {longest_k} keys, got shape "
                f"{table.shape}, and pages of {page}; pass a wider table, or a smaller maximum."
            )
    v.expect_shape((*k.shape[:-1], None), "that of k, with any head_size")
    _check_heads(q, k, v)
    tokens, heads, _ = q.shape
    return Layout(
        batch,
        heads,
        k.shape[-2],
        min(longest_q, tokens),
        longest_k,
        tokens_q=tokens,
        tokens_k=k.shape[0] if table is None else None,
        packed=True,
        paged=table is not None,
    )


def _longest(name: str, value: Any) -> int:
    length = integer(name, value)
    if not 0 <= length <= LONGEST:
        raise InvalidArgumentError(f"{name}: expected 0 to {LONGEST}, got {length}.")
    return length


def _check_heads(q: Argument, k: Argument, v: Argument) -> None:
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads and (heads_k == 0 or heads % heads_k):
        raise InvalidArgumentError(
            f"{k.name}: expected a number of heads that divides the {heads} of {q.name}, got "
            f"{heads_k}."
        )
    for it in (q, v):
        if it.shape[-1] == 0:
            raise InvalidArgumentError(
                f"{it.name}: expected a head_size of at least 1, got shape {it.shape}."
            )


def scale_of(softmax_scale: Any, head_size: int) -> float:
    """As given, else ``1 / sqrt(head_size)``."""
    if softmax_scale is None:
        return head_size**-0.5
    return number("softmax_scale", softmax_scale)


def window_of(layout: Layout, options: Options) -> tuple[int | None, int | None]:
    """See :meth:`Layout.window`.

    Raises:
        InvalidArgumentError: a size is no integer.
        cudnnGraphNotSupportedError: there is an ``attention_chunk``.
    """
    if integer("attention_chunk", options.attention_chunk) != 0:
        raise cudnnGraphNotSupportedError(
            f"attention_chunk={options.attention_chunk}: dlattn has no chunks of keys; pass 0, and "
            "a window_size_left if that serves."
        )
    left = integer("window_size_left", options.window_size_left)
    right = integer("window_size_right", options.window_size_right)
    return layout.window(flag("is_causal", options.is_causal), left, right)


def role_options(
    given: Mapping[str, Argument], layout: Layout
) -> tuple[dict[str, TensorSpec], dict[str, int]]:
    """Slopes, sinks, lengths and tables: specs and positions by role.

    Raises:
        InvalidArgumentError: one has another shape or type.
    """
    specs: dict[str, TensorSpec] = {}
    positions: dict[str, int] = {}
    batch, heads = layout.batch, layout.heads

    def add(role: str, it: Argument, spec: TensorSpec) -> None:
        specs[role], positions[role] = spec, it.position

    slopes = given.get("alibi_slopes_")
    if slopes is not None:
        slopes.expect_type(data_type.FLOAT)
        shape = (heads,) if len(slopes.shape) == 1 else (batch, heads)
        slopes.expect_shape(shape, "(num_heads,) or (batch_size, num_heads)")
        slopes.expect_rows()
        add("alibi_slopes", slopes, slopes.vector())
    sinks = given.get("sinks")
    if sinks is not None:
        sinks.expect_type(data_type.FLOAT)
        sinks.expect_shape((heads,), "(num_heads,)")
        stride = (0, sinks.stride[0] if heads > 1 else 0, 0, 1)
        add("sink_token", sinks, TensorSpec("sinks", (1, heads, 1, 1), stride, sinks.dtype))
    for name, role in (("seqused_q", "seq_len_q"), ("seqused_k", "seq_len_kv")):
        used = given.get(name)
        if used is not None:
            used.expect_type(data_type.INT32)
            used.expect_shape((batch,), "(batch_size,)")
            add(role, used, used.vector())
    table = given.get("block_table_")
    if table is not None:
        for role in PAGE_TABLES.values():
            add(role, table, page_tables(table, batch)[role])
    if layout.packed:
        add("cu_seqlens_q", given["cu_seqlens_q"], given["cu_seqlens_q"].vector())
        # Of keys in pages, they tell nothing but lengths.
        if not layout.paged or "seq_len_kv" not in specs:
            add("cu_seqlens_kv", given["cu_seqlens_k"], given["cu_seqlens_k"].vector())
    return specs, positions


def check_output(output: Argument | None, shape: tuple[int, ...], meaning: str) -> None:
    """Refuse memory for a result that does not fit it.

    Raises:
        InvalidArgumentError: it does not.
    """
    if output is not None:
        output.expect_shape(shape, meaning)
        output.expect_rows()
        output.expect_output()
