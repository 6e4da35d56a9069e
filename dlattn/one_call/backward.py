"""``attention_backward``: the gradients of :func:`dlattn.attention` as one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlattn.calls.arguments import Argument, flag, plain_spec
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output
from dlattn.calls.keyless import SinkGradient, own_rows
from dlattn.dtypes import BOOLEANS, data_type
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.one_call import arguments
from dlattn.one_call.arguments import (
    TENSORS,
    Described,
    Options,
    Wanted,
    broadcast_spec,
    call_of,
    check_outputs,
    describe,
    sorted_out,
)
from dlattn.opaque import opaque
from dlattn.problem import Direction, TensorSpec


class Gradients(NamedTuple):
    """What :func:`attention_backward` gives; ``None`` where nothing was asked for."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


@opaque
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    dropout: tuple[float, Any, Any] | None = None,
    dlse: Any = None,
    bias_gradient: bool = False,
    sinks_gradient: bool = False,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
) -> Gradients:
    """The gradients of :func:`dlattn.attention` (FlashAttention-2: Dao 2023, algorithm 2).

    Arguments that are not listed are those of the forward, and must be as they were there.

    Args:
        dout: the gradient of the output, in its shape and type.
        out, lse: what the forward returned with ``return_lse``.
        dlse: the gradient of the log-sum-exp, in its shape and type, if it was used for more than
            its own backward, as by :func:`dlattn.merge_states`; that of rows that attend to nothing
            does not matter.
        bias_gradient: give the gradient of the bias, too: of its shape and type, summed where it
            broadcasts.
        sinks_gradient: give the gradient of the sinks, too: (H), fp32.
        deterministic: the same bits in every run; on Hopper alone, and always on the CPU.
        dq, dk, dv: memory for the gradients, each its own, of which no input is a part.

    Returns:
        The gradients of q, k and v, in their shapes and types, and of what was asked for. Rows past
        the lengths are 0. Of ``"thd"`` rows that belong to no sequence are 0 too, but in memory
        that the caller gives neither are written.

    Raises:
        InvalidArgumentError: tensors or arguments contradict each other (a ``RuntimeError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    tensors, options, hosts = sorted_out(
        (q, k, v, bias, alibi_slopes, sinks),
        (layout, causal, window, alignment, scale, softcap),
        lengths, cu_seqlens, max_seqlens, None, dropout,
    )  # fmt: skip
    return run(
        (*tensors[:3], out, lse, dout, *tensors[3:], dlse, dq, dk, dv),
        (*options, bias_gradient, sinks_gradient, deterministic),
        hosts,
    )


def run(tensors: tuple[Any, ...], options: tuple[Any, ...], hosts: Sequence[Any] = ()) -> Gradients:
    """The gradients.

    Args:
        tensors: as :data:`NAMES`, or the first six.
        options: as :class:`dlattn.one_call.arguments.Options`, and what follows them in
            :func:`wanted`; hashable.
        hosts: arrays of one number in host memory.
    """
    dq, dk, dv, *more = arguments.run(_CALLS, tensors, options, hosts)
    bias_gradient, sinks_gradient, _ = options[-3:]
    return Gradients(
        dq, dk, dv, more[0] if bias_gradient else None, more[-1] if sinks_gradient else None
    )


#: Its tensors, in order: first those of every call.
NAMES = (*TENSORS[:3], "out", "lse", "dout", *TENSORS[3:], "dlse", "dq", "dk", "dv")


def wanted(
    there: Mapping[str, Argument],
    values: tuple[Any, ...],
    options: Options,
    bias_gradient: bool,
    sinks_gradient: bool,
    deterministic: bool,
) -> Wanted:
    """What a call of the backward comes down to; see :func:`describe`."""
    if "block_table" in there:
        raise cudnnGraphNotSupportedError(
            "block_table: attention of keys and values in pages has no backward as one call; "
            "gather them into tensors of their own to train, or use pygraph.sdpa_backward."
        )
    it = describe(there, values, options)
    sizes, layout = it.sizes, it.options.layout
    for name in ("dout", "out"):
        there[name].expect_shape(sizes.shape(layout, sizes.columns_v), "that of the output")
    for name in ("lse", "dlse"):
        if name in there:
            there[name].expect_type(it.lse_type)
            there[name].expect_shape(sizes.lse(layout), "that of the forward's")
    outputs = _outputs(it, bias_gradient, sinks_gradient)
    check_outputs(outputs)
    roles = {"dO": "dout", "o": "out", "stats": "lse", "dStats": "dlse"}
    inputs = {role: there[name] for role, name in roles.items() if name in there}
    specs = {role: it.spec(role, tensor) for role, tensor in inputs.items()}
    specs |= {str(out.role): _gradient_spec(it, out) for out in outputs}
    # Which reads every option, also where there is nothing to do.
    request = it.request(
        Direction.BACKWARD, specs, deterministic=flag("deterministic", deterministic)
    )
    positions = {**it.positions, **{role: tensor.position for role, tensor in inputs.items()}}
    return Wanted(it.values, positions, outputs, request, sizes.is_empty)


def prepare(*given: Any) -> Call:
    """What a call does, of its tensors as of :func:`run`, and then its options in a tuple."""
    return call_of(NAMES, NAMES[:6], wanted, given)


_CALLS = CallCache(prepare)


def _outputs(it: Described, bias_gradient: bool, sinks_gradient: bool) -> list[Output]:
    there, empty = it.there, it.sizes.is_empty
    outputs = []
    for role, name, side in (("dQ", "q", "q"), ("dK", "k", "k and v"), ("dV", "v", "k and v")):
        memory = there.get(f"d{name}")
        own = own_rows(memory, there, side) if empty else None
        zero = own is None and (empty or (it.options.layout == "thd" and memory is None))
        fill = 0.0 if zero else None
        like = there[name]
        outputs.append(Output(role, like.shape, it.dtype, memory, fill, order=like, finish=own))
    fill = 0.0 if empty else None
    if flag("bias_gradient", bias_gradient):
        bias = _asked(it, "bias")
        if bias.dtype in BOOLEANS:
            raise InvalidArgumentError(
                f"bias_gradient: the bias is a mask, of {bias.dtype.name}, which has no gradient; "
                "leave it out."
            )
        outputs.append(Output("dBias", bias.shape, bias.dtype, None, fill))
    if flag("sinks_gradient", sinks_gradient):
        sinks = _asked(it, "sinks")
        finish = _without_keys(it, sinks) if empty else None
        outputs.append(
            Output("dSink_token", sinks.shape, data_type.FLOAT, None, fill, finish=finish)
        )
    return outputs


def _without_keys(it: Described, sinks: Argument) -> SinkGradient | None:
    """What the gradient of sinks is, if not 0, where there is no key."""
    dlse = it.there.get("dlse")
    if dlse is None or 0 in dlse.shape:
        return None
    more = (it.there.get(name) for name in ("lengths of q", "cu_seqlens of q"))
    return SinkGradient(dlse.shape[-1], sinks, dlse, *more)


def _asked(it: Described, name: str) -> Any:
    if name not in it.there:
        raise InvalidArgumentError(
            f"{name}_gradient: expected {name}, whose gradient is asked for, got None."
        )
    return it.there[name]


def _gradient_spec(it: Described, out: Output) -> TensorSpec:
    if out.role == "dBias":
        return broadcast_spec(out)
    if out.role == "dSink_token":
        return plain_spec(out, "h")
    return it.spec(str(out.role), out)
