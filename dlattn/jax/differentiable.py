"""``attention``: :func:`dlattn.attention` as a function of JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from dlattn.calls.arguments import SAID, flag, number
from dlattn.errors import InvalidArgumentError
from dlattn.jax.arguments import as_array, expect_known, options_of
from dlattn.jax.batching import batched
from dlattn.jax.known import check_known
from dlattn.jax.traced import varying
from dlattn.one_call.arguments import Options, pair
from dlattn.runtime.gradients import warn_of_slopes


class _Static(NamedTuple):
    """What of a call is no array."""

    options: Options
    return_lse: bool
    deterministic: bool


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
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """:func:`dlattn.attention` of JAX arrays, under ``jit``, ``grad``, ``vmap`` and ``scan``.

    The workspace is XLA's, kernels run in its stream, and may be recorded into its command buffers.
    Gradients are those of q, k, v, the bias and the sinks; what else there is counts as constant.

    Arguments that are not listed are those of :func:`dlattn.attention`.

    Args:
        dropout_rate, dropout_key: the probability to drop, and a key of ``jax.random``.
        deterministic: gradients have the same bits in every run; on Hopper, and on the CPU always.

    Returns:
        The output, or with ``return_lse`` a pair of it and the log-sum-exp, both differentiable.
        Of ``"thd"``, rows of no sequence, or past the lengths, are 0, and their log-sum-exp is not
        written.

    Raises:
        InvalidArgumentError: arrays or arguments contradict each other, an option is traced, or an
            array is a tensor of PyTorch's (a ``RuntimeError``).
        InvalidVariantPackError: in host memory, a page that there is not (a ``ValueError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
        JaxRuntimeError: in host memory, numbers of a ``block_table``, of ``cu_seqlens``
            or ``lengths`` are wrong that JAX traced, and so are read when the program runs; the
            message ends in the error that it is else (a ``RuntimeError``).
    """
    return attend_in(
        "dlattn", q, k, v, bias, sinks, alibi_slopes, lengths, cu_seqlens, block_table,
        layout, causal, window, alignment, scale, softcap, max_seqlens, dropout_rate, dropout_key,
        deterministic, return_lse,
    )  # fmt: skip


def attend_in(
    words: str, q: Any, k: Any, v: Any, bias: Any, sinks: Any, alibi_slopes: Any, lengths: Any,
    cu_seqlens: Any, block_table: Any, layout: str, causal: Any, window: Any, alignment: str,
    scale: Any, softcap: Any, max_seqlens: Any, dropout_rate: Any, dropout_key: Any,
    deterministic: Any, return_lse: Any,
) -> Any:  # fmt: skip
    """:func:`attention` whose errors name arguments in these words
    (:data:`dlattn.calls.arguments.SAID`)."""
    expect_known(
        layout=layout, causal=causal, window=window, alignment=alignment, scale=scale,
        softcap=softcap, max_seqlens=max_seqlens, dropout_rate=dropout_rate,
        deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip
    (lengths_q, lengths_kv), (cu_q, cu_kv) = pair(lengths), pair(cu_seqlens)
    seed = offset = None
    dropout_rate = number("dropout_rate", dropout_rate)
    if not 0 <= dropout_rate <= 1:
        raise InvalidArgumentError(
            f"dropout_rate: expected at least 0 and at most 1, got {dropout_rate}."
        )
    if dropout_rate:
        if dropout_key is None:
            raise InvalidArgumentError("dropout_key: expected a key of jax.random, got None.")
        try:
            bits = jax.random.bits(dropout_key, (2,), jnp.uint32)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"dropout_key: expected a key of jax.random, got {dropout_key!r:.100}: {error}"
            ) from error
        seed, offset = jax.lax.bitcast_convert_type(bits, jnp.int32).reshape(2, 1)
    arrays = {
        "q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "lengths of q": lengths_q, "lengths of k and v": lengths_kv,
        "cu_seqlens of q": cu_q, "cu_seqlens of k and v": cu_kv,
        "block_table": block_table,
        "dropout's seed": seed, "dropout's offset": offset,
    }  # fmt: skip
    for name in "qkv":
        if arrays[name] is None:
            raise InvalidArgumentError(f"{name}: expected an array, got None.")
    options = options_of(
        layout, causal, window, alignment, scale, softcap, max_seqlens, dropout_rate,
        lengths, cu_seqlens, words,
    )  # fmt: skip
    static = _Static(options, flag("return_lse", return_lse), flag("deterministic", deterministic))
    said = SAID[words]
    there = {n: as_array(said.get(n, n), x) for n, x in arrays.items() if x is not None}
    check_known(there, options, static.return_lse)
    there = dict(zip(there, varying(there.values(), there.values()), strict=True))
    run = _compiled if _is_shard() else _attention
    return run(static, there)


def _is_shard() -> bool:
    """Whether this is inside of ``shard_map``, as JAX since 0.7 says."""
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    return bool(getattr(mesh, "manual_axes", ()))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, arrays: dict[str, Any]) -> Any:
    results = batched("forward", arrays, static.options, (static.return_lse,))
    return tuple(results) if static.return_lse else results[0]


def _forward(static: _Static, primals: dict[str, Any]) -> tuple[Any, Any]:
    arrays = {name: x.value for name, x in primals.items()}
    if "alibi_slopes" in primals and primals["alibi_slopes"].perturbed:
        warn_of_slopes("jax.lax.stop_gradient(alibi_slopes)")
    out, lse = _once("forward", static.options, (True,), arrays)
    # As keys, since what is kept is made of arrays.
    learned = dict.fromkeys(x for x in ("bias", "sinks") if x in primals and primals[x].perturbed)
    return (out, lse) if static.return_lse else out, (arrays, out, lse, learned)


def _backward(static: _Static, kept: Any, gradient: Any) -> tuple[dict[str, Any]]:
    arrays, out, lse, learned = kept
    dout, dlse = gradient if static.return_lse else (gradient, None)
    given = {**arrays, "dout": dout, "out": out, "lse": lse}
    if isinstance(dout, SymbolicZero):
        given["dout"] = jnp.zeros_like(out)
    if dlse is not None and not isinstance(dlse, SymbolicZero):
        given["dlse"] = dlse
    asked = "bias" in learned, "sinks" in learned, static.deterministic
    found = _once("backward", static.options, asked, given)
    wanted = ["q", "k", "v", *learned]
    constant = {name: _nothing(x) for name, x in arrays.items()}
    return ({**constant, **dict(zip(wanted, found, strict=True))},)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _once(
    direction: str, options: Options, asked: tuple[bool, ...], given: dict[str, Any]
) -> list[Any]:
    """What has no derivative of its own."""
    return batched(direction, given, options, asked)


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "dlattn's attention has first derivatives alone. For gradients of gradients, and for "
        "jax.hessian, use jax.nn.dot_product_attention."
    )


def _nothing(x: Any) -> Any:
    """The gradient of a constant."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, float0)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
#: For ``shard_map``, which outside of ``jit`` takes no such rules.
_compiled = jax.jit(_attention, static_argnums=0)
_once.defjvp(_refuse)
