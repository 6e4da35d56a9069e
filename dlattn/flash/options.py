"""What the four functions' other arguments mean, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlattn.calls.arguments import Argument, integer, number, same_type
from dlattn.calls.request import CPU_TYPES, KERNEL_TYPES
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.flash.layouts import Layout
from dlattn.problem import TensorSpec

#: Head sizes that kernels take are multiples of it.
HEAD_UNIT = 8


def element_type(arguments: Mapping[str, Argument], *names: str) -> data_type:
    """The one type of these tensors, those that are there: fp16 or bf16, and on the CPU fp32 and
    fp64, too."""
    there = [arguments[name] for name in names if name in arguments]
    on_cpu = there[0].seen.device[0] == "cpu"
    return same_type(there, CPU_TYPES if on_cpu else KERNEL_TYPES)


def dense_layout(q: Argument, k: Argument) -> Layout:
    """The sizes of (batch, seqlen, heads, head_size)."""
    q.expect_shape((None,) * 4, "(batch_size, seqlen_q, num_heads, head_size)")
    k.expect_shape((q.shape[0], None, None, q.shape[3]), _OF_KEYS)
    batch, seqlen_q, heads, _ = q.shape
    layout = Layout(batch, heads, k.shape[2], seqlen_q, k.shape[1])
    check_heads(q, k, layout)
    return layout


_OF_KEYS = "(batch_size, seqlen_k, num_heads_k, head_size)"


def check_heads(q: Argument, k: Argument, layout: Layout) -> None:
    """Refuse heads of k that do not divide those of q, and heads of no size.

    Raises:
        InvalidArgumentError: they are.
    """
    if layout.heads and (layout.heads_k == 0 or layout.heads % layout.heads_k):
        raise InvalidArgumentError(
            f"{k.name}: expected a number of heads that divides the {layout.heads} of {q.name}, "
            f"got {layout.heads_k}."
        )
    if q.shape[-1] == 0:
        raise InvalidArgumentError(f"{q.name}: expected a head_size of at least 1, got {q.shape}.")


def scale_of(softmax_scale: Any, head_size: int) -> float:
    """As given, else ``1 / sqrt(head_size)``."""
    if softmax_scale is None:
        return head_size**-0.5
    return number("softmax_scale", softmax_scale)


def softcap_of(softcap: Any) -> float | None:
    """The bound, or ``None`` for 0.

    Raises:
        InvalidArgumentError: it is negative.
    """
    bound = number("softcap", softcap)
    if bound < 0:
        raise InvalidArgumentError(f"softcap: expected 0, for none, or more, got {bound}.")
    return bound or None


def window_of(
    layout: Layout, is_causal: Any, left: Any, right: Any
) -> tuple[int | None, int | None]:
    """See :meth:`Layout.window`."""
    sizes = integer("window_size_left", left), integer("window_size_right", right)
    return layout.window(bool(is_causal), *sizes)


def row_options(arguments: Mapping[str, Argument], layout: Layout) -> dict[str, TensorSpec]:
    """Slopes, sinks and used lengths, by role.

    Raises:
        InvalidArgumentError: one has another shape or type.
    """
    specs = {}
    batch, heads = layout.batch, layout.heads
    slopes = arguments.get("alibi_slopes_")
    if slopes is not None:
        slopes.expect_type(data_type.FLOAT)
        shape = (heads,) if len(slopes.shape) == 1 else (batch, heads)
        slopes.expect_shape(shape, "(num_heads,) or (batch_size, num_heads)")
        slopes.expect_rows()
        specs["alibi_slopes"] = slopes.vector()
    sinks = arguments.get("sinks")
    if sinks is not None:
        sinks.expect_type(data_type.FLOAT)
        sinks.expect_shape((heads,), "(num_heads,)")
        stride = (0, sinks.stride[0] if heads > 1 else 0, 0, 1)
        specs["sink_token"] = TensorSpec("sinks", (1, heads, 1, 1), stride, sinks.dtype)
    for name, role in (("seqused_q", "seq_len_q"), ("seqused_k", "seq_len_kv")):
        used = arguments.get(name)
        if used is not None:
            used.expect_type(data_type.INT32)
            used.expect_shape((batch,), "(batch_size,)")
            specs[role] = used.vector()
    return specs


#: Arguments of those roles, by role.
ROW_OPTIONS = {
    "alibi_slopes": "alibi_slopes_",
    "sink_token": "sinks",
    "seq_len_q": "seqused_q",
    "seq_len_kv": "seqused_k",
}


def check_chunk(attention_chunk: Any) -> None:
    """Refuse FlashAttention-3's chunks of keys.

    Raises:
        cudnnGraphNotSupportedError: they are asked for.
    """
    if integer("attention_chunk", attention_chunk) != 0:
        raise cudnnGraphNotSupportedError(
            f"attention_chunk={attention_chunk}: dlattn has no chunks of keys; pass 0, and a "
            "window_size_left if that serves."
        )


def check_output(output: Argument | None, shape: tuple[int, ...], meaning: str) -> None:
    """Refuse memory for a result that does not fit it.

    Raises:
        InvalidArgumentError: it does not.
    """
    if output is not None:
        output.expect_shape(shape, meaning)
        output.expect_rows()
        output.expect_output()
