"""What functions of JAX are given: arrays, and options that are known while JAX traces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlattn.calls.arguments import SAID, flag, number
from dlattn.errors import InvalidArgumentError
from dlattn.one_call.arguments import Options, check_words, pair, shared, whole
from dlattn.runtime.tensors import framework


def as_array(name: str, value: Any) -> Any:
    """An argument as ``jax.numpy`` takes it.

    Raises:
        InvalidArgumentError: it is a tensor of PyTorch's, whose gradients would end here, an array
            of random keys, no array, or nothing that JAX makes one of.
    """
    if framework(value).name == "torch":
        kind = type(value)
        raise InvalidArgumentError(
            f"{name}: expected an array of JAX or NumPy, got a {kind.__module__}."
            f"{kind.__qualname__}; convert it, such as by jax.numpy.from_dlpack(x.detach()), or "
            "call dlattn.torch."
        )
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"{name}: expected an array, got {value!r:.100}: {error}"
        ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise InvalidArgumentError(
            f"{name}: expected an array of numbers, got random keys, {_kind(array)}."
        )
    return array


def expect_known(**given: Any) -> None:
    """Refuse arrays of JAX in the place of what chooses a plan.

    Raises:
        InvalidArgumentError: one is such an array, or has one in it.
    """
    for name, value in given.items():
        for it in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(it, jax.Array):
                is_traced = isinstance(it, jax.core.Tracer)
                raise InvalidArgumentError(
                    f"{name}: expected a value that is known while JAX traces, got a "
                    f"{'traced' if is_traced else 'jax.Array'} {_kind(it)}; give one of "
                    f"Python's own, by jit's static_argnames if need be{_INSTEAD.get(name, '')}."
                )


def _kind(array: Any) -> str:
    return f"{array.dtype}{[*array.shape]}"


#: What else serves in the place of a traced option.
_INSTEAD = {"scale": ", or call dlattn.jax.dot_product_attention, whose scale may be traced"}


def options_of(
    layout: str,
    causal: Any,
    window: Any,
    alignment: str,
    scale: Any,
    softcap: Any,
    max_seqlens: Any,
    dropout_rate: float,
    lengths: Any,
    cu_seqlens: Any,
    words: str,
) -> Options:
    """What :func:`dlattn.jax.attention` is told in numbers, each of the one type that it has: JAX
    and its caches take what is equal for the same.

    Args:
        words: see :data:`dlattn.calls.arguments.SAID`.

    Raises:
        InvalidArgumentError: an option is of another type, or a word that means nothing.
    """
    check_words(layout, alignment)
    if window is not None and not isinstance(window, (tuple, list)):
        raise InvalidArgumentError(
            f"window: expected a pair (left, right), or None, got {window!r:.100}."
        )
    return Options(
        layout,
        flag("causal", causal),
        whole(SAID[words].get("window", "window"), window),
        alignment,
        None if scale is None else number("scale", scale),
        None if softcap is None else number("softcap", softcap),
        whole("max_seqlens", pair(max_seqlens)),
        dropout_rate,
        shared(lengths, cu_seqlens),
        words,
    )
