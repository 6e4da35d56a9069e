"""``attention``: the forward as one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from dlattn.calls.arguments import Argument, flag
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output
from dlattn.calls.keyless import own_rows, past_lengths
from dlattn.one_call import arguments
from dlattn.one_call.arguments import (
    TENSORS,
    Described,
    Options,
    Wanted,
    call_of,
    check_outputs,
    describe,
    sorted_out,
)
from dlattn.opaque import opaque
from dlattn.problem import Direction


@opaque
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    lengths: Any = None,
    cu_seqlens: Any = None,
    max_seqlens: int | tuple[int, int] | None = None,
    block_table: Any = None,
    dropout: tuple[float, Any, Any] | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """``softmax(scale * q k^T + bias) v``, on tensors of any framework.

    Its gradients: :func:`dlattn.attention_backward`. Autograd does not see it: where PyTorch would
    want a gradient of an input, it warns; :func:`dlattn.torch.attention` learns.

    Heads of k and of v divide those of q, each on its own: query head h reads head
    ``h // (H / Hk)`` of k. The first call of a kind compiles a kernel, unless the cache on disk has
    it; calls whose tensors look like those of an earlier one look up its plan.

    Args:
        q, k, v: fp16 or bf16, on the CPU also fp32 and fp64, of any strides but negative
            ones, with 1 for the last dimension. The head dimensions D of q and k, and of v, may
            differ.
        layout: the order of dimensions of q, k, v and the output: ``"bshd"`` (batch, sequence,
            head, D), ``"bhsd"``, ``"sbhd"``; or ``"thd"``, (tokens, head, D) of sequences that are
            packed one behind the other, which ``cu_seqlens`` divides.
        causal: queries attend to no key behind their own position.
        window: how many keys to the left and to the right of its position a query attends to;
            ``None`` (or -1) is any number.
        alignment: where the positions of queries and keys meet: the last ones of a sequence at
            ``"bottom_right"``, as in FlashAttention, or the first ones at ``"top_left"``, as in
            PyTorch's ``is_causal`` and cuDNN. The same if there are as many queries as keys.
        scale: ``1 / sqrt(D)`` unless given.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before anything is added.
        bias: added to scores; broadcasts to (B, H, S_q, S_kv). Of booleans or uint8: a mask, true
            where a query attends.
        alibi_slopes: (H) or (B, H), fp32; of slope m, ``m * distance`` is subtracted, as if
            positions met at the bottom right, whatever the alignment.
        sinks: (H), fp32: one more score of each row, without a value; finite, or -inf, which is
            none.
        lengths: how much of each sequence is used: (B), int32 or int64, of q, k and v alike, or a
            pair of such tensors, of q and of k and v, where ``None`` is all. Greater lengths than
            there are rows count as that many, and negative ones as 0; of ``"thd"`` in host memory,
            greater ones are refused.
        cu_seqlens: of ``"thd"``, where sequences begin and end: (B + 1), int32, of q, k and v
            alike, or a pair of such tensors.
        max_seqlens: of ``"thd"``, a bound of the lengths, or a pair of them, of queries and of
            keys: the number of tokens unless given, which costs some speed.
        block_table: (B, pages of a sequence), int32: k and v lie in pages, in the place of a batch
            of sequences, with the layout's order of dimensions, and of ``"thd"`` (pages, rows of a
            page, head, D). A page has a power of two of rows; each sequence's pages, in order, are
            a row of the table, and ``lengths`` (or, of ``"thd"``, differences of ``cu_seqlens``)
            say how far they are filled. As one call, it has no backward.
        dropout: ``(p, seed, offset)``, the mask of :func:`dlattn.philox_dropout_mask`; seed and
            offset are integers, or int32 or int64 tensors of one element.
        return_lse: return the log-sum-exp, too.
        out: memory for the output, of which no input is a part.

    Returns:
        The output, in the layout, type, framework and order in memory of q, or ``out``; with
        ``return_lse`` a pair of it and the natural logarithm of each row's sum of exponentials,
        fp32 (of fp64 tensors fp64), (B, H, S_q), or (H, tokens) of ``"thd"``: what
        :func:`dlattn.merge_states` takes. Rows that attend to nothing are 0, and -inf. What lies
        past the lengths is 0 and -inf; of ``"thd"`` it is not written.

    Raises:
        InvalidArgumentError: tensors or arguments contradict each other (a ``RuntimeError``).
        InvalidVariantPackError: in host memory, a page that there is not (a ``ValueError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    tensors, options, hosts = sorted_out(
        (q, k, v, bias, alibi_slopes, sinks),
        (layout, causal, window, alignment, scale, softcap),
        lengths, cu_seqlens, max_seqlens, block_table, dropout,
    )  # fmt: skip
    results = run((*tensors, out), (*options, return_lse), hosts)
    return tuple(results) if return_lse else results[0]


def run(tensors: tuple[Any, ...], options: tuple[Any, ...], hosts: Sequence[Any] = ()) -> list[Any]:
    """The results.

    Args:
        tensors: as :data:`NAMES`, or q, k and v alone.
        options: as :class:`dlattn.one_call.arguments.Options`, and whether the log-sum-exp is
            wanted; hashable.
        hosts: arrays of one number in host memory.
    """
    return arguments.run(_CALLS, tensors, options, hosts)


#: Its tensors, in order.
NAMES = (*TENSORS, "out")


def wanted(
    there: Mapping[str, Argument], values: tuple[Any, ...], options: Options, return_lse: bool
) -> Wanted:
    """What a call of the forward comes down to; see :func:`describe`."""
    it = describe(there, values, options)
    layout, sizes = it.options.layout, it.sizes
    shape = sizes.shape(layout, sizes.columns_v)
    outputs = [Output("o", shape, it.dtype, it.there.get("out"), order=it.there["q"])]
    check_outputs(outputs)
    if flag("return_lse", return_lse):
        outputs.append(Output("stats", sizes.lse(layout), it.lse_type))
    # Which reads every option, also where there is nothing to do.
    request = it.request(
        Direction.FORWARD, {str(out.role): it.spec(str(out.role), out) for out in outputs}
    )
    if sizes.is_empty:
        return Wanted(it.values, it.positions, _filled(outputs, it), request, idle=True)
    return Wanted(it.values, it.positions, outputs, request)


def prepare(*given: Any) -> Call:
    """What a call does, of its tensors as of :func:`run`, and then its options in a tuple."""
    return call_of(NAMES, NAMES[:3], wanted, given)


#: Of q, k, v, the bias and the sinks.
_LEARNED = (0, 1, 2, 3, 5)
_CALLS = CallCache(prepare, drops=_LEARNED)


def _filled(outputs: list[Output], it: Described) -> list[Output]:
    """Results of no key, or of no query."""
    sinks = it.there.get("sinks")
    out, *more = (replace(output, role=None) for output in outputs)
    own = own_rows(out.given, it.there, "q")
    out = replace(out, fill=0.0 if own is None else None, finish=own)
    if sinks is None:
        return [out, *(replace(lse, fill=-inf) for lse in more)]
    # Of packed sequences, nothing is said of rows past the lengths.
    lengths = None if it.options.layout == "thd" else it.there.get("lengths of q")
    finish = past_lengths(it.sizes.seq_q, lengths, -inf)
    return [out, *(replace(lse, fill=sinks, finish=finish) for lse in more)]
