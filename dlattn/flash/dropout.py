"""FlashAttention's dropout: the random numbers that a call draws, and how a backward knows them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from dlattn.calls.arguments import Argument, flag, number
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.problem import Dropout, FlashDropout, TensorSpec
from dlattn.runtime.tensors import allocate, draw, framework, has_shape, on_device, to_caller

#: Offsets of Philox that a call takes for each head of each sequence.
OFFSETS_PER_HEAD = 32

_STATES = {(data_type.UINT64, 2), (data_type.INT64, 2), (data_type.INT32, 4)}
_INTEGERS = (data_type.UINT64, data_type.INT64, data_type.INT32)


def drops(p_dropout: Any) -> bool:
    """Whether anything is dropped.

    Raises:
        InvalidArgumentError: p is no number.
    """
    return bool(p_dropout if type(p_dropout) is float else number("p_dropout", p_dropout))


def dropout_of(
    p_dropout: Any, return_softmax: Any = False
) -> tuple[Dropout | None, dict[str, Any]]:
    """How probabilities are dropped, and the numbers that a geometry has of it.

    Raises:
        InvalidArgumentError: p is not a probability below 1 in float32, or nothing is dropped and
            ``return_softmax`` is asked for.
    """
    p = number("p_dropout", p_dropout)
    if not 0 <= p <= 1 or np.float32(p) == 1:  # which it may have become
        raise InvalidArgumentError(
            f"p_dropout: expected at least 0 and below 1, as a float32, got {p}."
        )
    if flag("return_softmax", return_softmax) and p == 0:
        raise InvalidArgumentError(
            "return_softmax: it shows what dropout dropped, and p_dropout is 0; pass False."
        )
    if p == 0:
        return None, {}
    form = FlashDropout()
    return form, form.numbers(p)


def drawn_state(generator: Any, like: Any, heads: int) -> Any:
    """A new philox state, two 64-bit numbers, seed and offset, on the device of ``like``.

    Args:
        generator: a ``torch.Generator``, which is advanced by :data:`OFFSETS_PER_HEAD` for each of
            ``heads``; ``None`` for the framework's own; a seed; a pair of seed and offset; or a
            state. Generators of the CPU, which have no offset, give a seed.
        heads: of all sequences.
    """
    if _is_whole(generator):  # before shapes, which NumPy's numbers have
        seed, offset = int(generator), 0
    elif has_shape(generator):
        return generator
    elif isinstance(generator, tuple) and len(generator) == 2 and all(map(_is_whole, generator)):
        seed, offset = map(int, generator)
    else:
        seed, offset = draw(like, generator, OFFSETS_PER_HEAD * heads)
    words = np.array([seed % 2**64, offset % 2**64], np.uint64)
    return on_device(_words(words, like), like)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral)


def no_state(like: Any) -> Any:
    """The state where nothing is dropped, of zeros."""
    return on_device(_words(np.zeros(2, np.uint64), like), like)


def unused(like: Any, dtype: data_type) -> tuple[Any, Any]:
    """What a forward returns behind the state: an offset that nobody uses, and a debug_softmax
    without elements."""
    offset = on_device(_words(np.zeros(1, np.uint64), like), like)
    return offset, to_caller(allocate(like, (0,), (1,), dtype), like)


def _words(words: Any, like: Any) -> Any:
    """As int32 for JAX, which by default has no integers of 64 bits."""
    return words.view(np.int32) if framework(like).name == "jax" else words


def state_roles(
    given: Mapping[str, Argument], said: str = "philox_seed, philox_offset"
) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, int]]:
    """The seed and the offset that a call reads: specs, positions, and bytes from the address.

    Both are in ``philox_seed`` if that has 128 bits (PyTorch's and FlashAttention's rng_state);
    else the offset is in ``philox_offset``.

    Args:
        said: the arguments in which the caller said so.

    Raises:
        InvalidArgumentError: one has another shape or type, or gaps.
    """
    seed, offset = given.get("philox_seed"), given.get("philox_offset")
    if seed is None:
        raise InvalidArgumentError(
            "philox_seed: expected the state that the forward returned, as p_dropout is not 0, got "
            "None."
        )
    elements = int(np.prod(seed.shape))
    if (seed.dtype, elements) in _STATES:
        offset, bytes_before = seed, 8
        if not seed.is_contiguous or seed.seen.ptr % 8:
            raise InvalidArgumentError(
                f"{said}: expected a contiguous state at a multiple of 8 bytes, got strides "
                f"{seed.stride}; pass a contiguous copy."
            )
    else:
        bytes_before = 0
    for it in (seed, offset):
        single = it is not None and int(np.prod(it.shape)) == 1 and it.dtype in _INTEGERS
        if it is None or not (single or bytes_before):
            apart = "" if said == "gen_" else ", as philox_seed, or one integer in each"
            raise InvalidArgumentError(
                f"{said}: expected the state that a forward returned, two 64-bit integers (of JAX "
                f"four of 32){apart}; got a tensor of shape {seed.shape} and {seed.dtype.name}."
            )
    assert offset is not None
    specs, positions = {}, {}
    for role, it in (("dropout_seed", seed), ("dropout_offset", offset)):
        # Two's complements: unsigned ones are the same bits.
        narrow = it.dtype is data_type.INT32 and not bytes_before
        dtype = data_type.INT32 if narrow else data_type.INT64
        specs[role] = TensorSpec(it.name, (1,), (1,), dtype)
        positions[role] = it.position
    return specs, positions, {"dropout_offset": bytes_before}
