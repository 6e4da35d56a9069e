"""Dropout: which probabilities of a softmax are kept, and by what the kept ones are multiplied.

A form of dropout is the C++ type that kernels compose (``cuda_src/attn/dropout.cuh``) and its
NumPy twin, which is its definition.
"""

from __future__ import annotations

import math
import numbers
import operator
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from dlattn.dtypes import BOOLEANS, data_type, to_cpp
from dlattn.errors import InvalidVariantPackError
from dlattn.opaque import opaque
from dlattn.problem.score import Array, Values, Where, read_at
from dlattn.records import dataclass

#: Rounds of Philox: the fewest that pass BigCrush (Salmon et al., table 2), and FlashAttention's.
ROUNDS = 7

#: One call of Philox serves a lane's part of a block of so many queries and keys.
BLOCK = 16

#: In FlashAttention, of so many keys.
_FLASH_KEYS = 32

_LOW = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

#: Probabilities are kept to 15 bits: sixteen of Philox's bits go to each element.
_ONE = 1 << 15


def signed(number: int) -> int:
    """A seed or an offset as the signed integer of 64 bits with the same low bits."""
    return (number + 2**63) % 2**64 - 2**63


class Dropout(ABC):
    """A predicate on (batch, head, query, key)."""

    @property
    @abstractmethod
    def cpp(self) -> str:
        """The C++ type in ``cuda_src/attn/dropout.cuh``."""

    @abstractmethod
    def keep(self, where: Where, values: Values) -> Array:
        """True where a probability is kept, for consecutive queries and keys; broadcasts to
        (B, H, S_q, S_kv)."""

    def addend(self, p: float) -> int:
        """``Params.dropout_addend`` of a probability p: what kernels add to random bits."""
        return 0

    def mark(self, probabilities: Array, values: Values) -> None:
        """Sets the signs of what is dropped, (B, H, S_q, S_kv), wherever it is."""
        kept = np.empty(probabilities.shape)
        self.dump(kept, values)
        np.copysign(probabilities, kept - 0.5, out=probabilities)

    def dump(self, kept: Array, values: Values) -> None:
        """Writes 1 or 0 for every position, (B, H, S_q, S_kv), whatever masks and lengths say."""
        batch, heads, seq_q, seq_kv = kept.shape
        head, key = np.arange(heads).reshape(1, -1, 1, 1), np.arange(seq_kv).reshape(1, 1, 1, -1)
        for entry in range(batch):
            for first in range(0, seq_q, BLOCK):
                query = np.arange(first, min(first + BLOCK, seq_q)).reshape(1, 1, -1, 1)
                where = Where(np.full((1, 1, 1, 1), entry), head, query, key)
                kept[entry, :, first : first + BLOCK] = self.keep(where, values)[0]


class RandomDropout(Dropout):
    """Keeps each probability at random, by seed, offset and position alone."""

    @abstractmethod
    def numbers(self, p: float) -> dict[str, float]:
        """What :class:`dlattn.problem.Geometry` holds of a probability p to drop: ``dropout_p``,
        ``dropout_scale`` and ``dropout_scale_inv``.

        Raises:
            ValueError: p is not a probability, or is 1 where that keeps some.
        """

    @abstractmethod
    def kept(
        self, p: float, seed: int, offset: int, numbers: Array, queries: slice, keys: slice
    ) -> Array:
        """Booleans, (len(numbers), queries, keys), of heads numbered across batch entries."""

    def keep(self, where: Where, values: Values) -> Array:
        number = (where.batch * values.heads_q + where.head).ravel()
        queries, keys = (slice(int(x.min()), int(x.max()) + 1) for x in (where.query, where.key))
        seed, offset = values.dropout_seed, values.dropout_offset
        kept = self.kept(values.dropout_p, seed, offset, number, queries, keys)
        return kept.reshape(where.batch.size, where.head.size, *kept.shape[1:])


@dataclass(frozen=True)
class Philox(RandomDropout):
    """dlattn's own, of 15 bits an element; see :func:`philox_dropout_mask`."""

    @property
    def cpp(self) -> str:
        return "PhiloxDropout"

    def addend(self, p: float) -> int:
        return (_ONE - philox_threshold(p)) * 0x10001

    def numbers(self, p: float) -> dict[str, float]:
        if p == 1:
            # Nothing is kept that a scale could be of; gradients of statistics have both factors.
            return {"dropout_p": 1.0, "dropout_scale": 1.0, "dropout_scale_inv": 1.0}
        _check(p)
        return {"dropout_p": p, "dropout_scale": 1 / (1 - p), "dropout_scale_inv": 1 - p}

    def kept(
        self, p: float, seed: int, offset: int, numbers: Array, queries: slice, keys: slice
    ) -> Array:
        kept: Array = _draw(seed, offset, numbers, queries, keys) < philox_threshold(p)
        return kept


@dataclass(frozen=True)
class FlashDropout(RandomDropout):
    """FlashAttention-2's, bit for bit (``csrc/flash_attn/src/dropout.h`` and ``philox.cuh``), so
    that a mask drawn there can be drawn again here.

    Philox 4x32 of seven rounds under the seed as its key, as in :func:`philox_dropout_mask`. A tile
    of 16 queries by 32 keys takes 32 calls, one for each lane of a warp, with the counter::

        64 bits, low word first: offset + 32 * (b * H + h) + query % 8 * 4 + key % 8 // 2
        query // 16
        key // 32

    Of the 16 bytes that a call gives, lowest first, element (query, key) has number
    ``key % 32 // 8 * 4 + query % 16 // 8 * 2 + key % 2``. It is kept if its byte is at most
    ``floor(255 * keep)``, where ``keep`` is ``1 - p`` in float32; kept probabilities are multiplied
    by ``1 / keep``. The chance to be dropped is thus within 2^-8 of p. Queries and
    keys count within a sequence, and b is the batch entry, where sequences are packed, too.

    A call uses up ``32 * B * H`` offsets: others with the same seed must begin beyond them.
    """

    @property
    def cpp(self) -> str:
        return "FlashDropout"

    def addend(self, p: float) -> int:
        return (_ONE - 1 - _flash_threshold(p)) * 0x10001

    def numbers(self, p: float) -> dict[str, float]:
        _check(p)
        p = float(np.float32(p))
        _check(p)  # which may have become 1
        keep = float(_flash_keep(p))
        return {"dropout_p": p, "dropout_scale": 1 / keep, "dropout_scale_inv": keep}

    def kept(
        self, p: float, seed: int, offset: int, numbers: Array, queries: slice, keys: slice
    ) -> Array:
        kept: Array = _draw_bytes(seed, offset, numbers, queries, keys) <= _flash_threshold(p)
        return kept


@dataclass(frozen=True)
class GivenMask(Dropout):
    """Keeps probabilities where a tensor of the user's is not 0.

    Attributes:
        dtype: of the elements.
        contiguous: neighbouring keys are neighbours in memory.
    """

    dtype: data_type
    contiguous: bool

    @property
    def cpp(self) -> str:
        element = "bool" if self.dtype in BOOLEANS else to_cpp(self.dtype)
        return f"GivenMask<{element}, {str(self.contiguous).lower()}>"

    def keep(self, where: Where, values: Values) -> Array:
        assert values.dropout_mask is not None
        mask = read_at(values.dropout_mask, where)
        kept: Array = mask != 0
        # Past the lengths there may be anything, such as NaN.
        others: Any = [] if self.dtype in BOOLEANS else mask[kept & (mask != 1) & ~np.isnan(mask)]
        if len(others):
            raise InvalidVariantPackError(
                f"The mask of dropout: expected 0 where a probability is dropped and 1 where it is "
                f"kept, got {float(others[0]):g}; give what those that are kept are multiplied by "
                "as a scale of one number."
            )
        return kept


@dataclass(frozen=True)
class StoredSigns(GivenMask):
    """Keeps probabilities that a forward stored without a sign."""

    @property
    def cpp(self) -> str:
        return f"GivenMask<{to_cpp(self.dtype)}, {str(self.contiguous).lower()}, true>"

    def keep(self, where: Where, values: Values) -> Array:
        assert values.dropout_mask is not None
        return ~np.signbit(read_at(values.dropout_mask, where).astype(np.float64))


#: ``dropout_algorithm`` -> the form of dropout.
ALGORITHMS: dict[str, RandomDropout] = {"philox": Philox(), "flash": FlashDropout()}


@opaque
def philox_dropout_mask(
    p: float,
    seed: int,
    offset: int,
    shape: tuple[int, int, int, int],
    algorithm: str = "philox",
) -> Array:
    """The mask of ``dropout=(p, seed, offset)``, bit for bit, on every engine.

    A function of seed, offset and position alone: forward and backward, every tile size and every
    sequence length see the same mask. Philox 4x32 (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011), of seven rounds, turns a counter of four 32-bit words into four random
    words, under the seed as its key, low word first. A block of 16 queries by 16 keys takes 32
    calls. Element (query, key) of head h of H of batch entry b is served by the call with the
    counter::

        low word of the offset
        high word of the offset + 32 * (b * H + h) + query % 8 * 4 + key % 8 // 2, modulo 2^32
        query // 16
        key // 16

    from whose word ``query % 16 // 8 + 2 * (key % 16 // 8)`` it takes bits 0 to 14 if the key is
    even, and 16 to 30 if it is odd. It is kept if they are a number below ``2^15 (1 - p)``, rounded
    to an integer of at least 1: so p is exact to 2^-16. (With 8 bits, as in FlashAttention, it
    would be to 2^-9, which a mean over some thousand probabilities shows.) Such a call gives each
    lane of a warp just the elements of a 16 x 16 block that it holds after a tensor core product.

    Calls with one seed and different offsets below 2^32 have independent masks, and there is no
    need to leave gaps between offsets.

    Args:
        p: the probability to drop an element, 0 to 1; with ``"flash"`` below 1.
        seed, offset: as 64-bit integers; negative ones are their two's complements.
        shape: (B, Hq, Sq, Skv).
        algorithm: the ``dropout_algorithm`` of the call: ``"philox"``, which is told of here, or
            ``"flash"``, for :class:`dlattn.problem.FlashDropout`.

    Returns:
        Booleans of that shape: true where the probability is kept.

    Raises:
        ValueError: p is not a probability, or there is no such algorithm.
        TypeError: an argument has the wrong Python type.
    """
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}.")
    if not isinstance(p, numbers.Real):
        raise TypeError(f"p must be a number; got {p!r:.100}.")
    if p != 1:
        _check(p)
    form = ALGORITHMS[algorithm]
    p = form.numbers(float(p))["dropout_p"]
    seed, offset = _integer("seed", seed), _integer("offset", offset)
    batch, heads, queries, keys = shape = _four_sizes(shape)
    each = np.arange(batch * heads)
    kept = form.kept(p, seed, offset, each, slice(0, queries), slice(0, keys))
    return kept.reshape(shape)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r:.100}.") from None


def _four_sizes(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = ()
    if len(sizes) != 4 or min(sizes) < 0:
        raise TypeError(f"shape must be four integers, (B, Hq, Sq, Skv); got {shape!r:.100}.")
    return sizes


def philox_threshold(p: float) -> int:
    """Elements whose 15 bits are a number below it are kept: some, unless p is 1."""
    return 0 if p == 1 else max(1, round(_ONE * (1 - p)))


def _flash_keep(p: float) -> np.float32:
    return np.float32(1) - np.float32(p)


def _flash_threshold(p: float) -> int:
    """Elements whose byte is at most it are kept."""
    return int(float(_flash_keep(p)) * 255.0)


def _check(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"p must be at least 0 and at most 1 (below it with 'flash'); got {p}.")


def philox(counter: tuple[Array, ...], key: tuple[int, int], rounds: int = ROUNDS) -> list[Array]:
    """Philox 4x32: four random words for four counter words, arrays that broadcast."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) & _LOW for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(rounds):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (second >> _BITS) ^ c1 ^ k0, (first >> _BITS) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def _draw(seed: int, offset: int, numbers: Array, queries: slice, keys: slice) -> Array:
    """The 15 bits of each element of heads with these numbers, (len(numbers), rows, columns)."""
    number, row, column, lane = _calls(numbers, queries, keys, BLOCK)
    counter = (
        np.array(offset & 0xFFFFFFFF),
        (offset >> 32 & 0xFFFFFFFF) + 32 * number + lane,
        row,
        column,
    )
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    # (lower or upper queries, left or right keys, even or odd, head, block row, block column, 8, 4)
    halves = np.array(
        [[[words[a + 2 * b] >> np.uint64(16 * j) for j in (0, 1)] for b in (0, 1)] for a in (0, 1)]
    ).astype(np.uint16) & np.uint16(_ONE - 1)
    return _cropped(halves.transpose(3, 4, 0, 6, 5, 1, 7, 2), queries, keys, BLOCK)


def _draw_bytes(seed: int, offset: int, numbers: Array, queries: slice, keys: slice) -> Array:
    """The byte of each element of heads with these numbers, (len(numbers), rows, columns)."""
    number, row, column, lane = _calls(numbers, queries, keys, _FLASH_KEYS)
    low = np.array(offset & 0xFFFFFFFFFFFFFFFF, np.uint64) + (32 * number + lane).astype(np.uint64)
    words = philox((low, low >> _BITS, row, column), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    # (eight keys of 32, lower or upper queries, even or odd, head, tile row, tile column, 8, 4)
    octets = np.array(
        [[[word >> np.uint64(16 * a + 8 * j) for j in (0, 1)] for a in (0, 1)] for word in words]
    ).astype(np.uint8)
    return _cropped(octets.transpose(3, 4, 1, 6, 5, 0, 7, 2), queries, keys, _FLASH_KEYS)


def _calls(numbers: Array, queries: slice, keys: slice, width: int) -> tuple[Array, ...]:
    """Head, row and column of tiles of BLOCK queries by ``width`` keys, and lane: (heads, rows,
    columns, 8, 4)."""
    rows = np.arange(queries.start // BLOCK, -(-queries.stop // BLOCK)).reshape(-1, 1, 1, 1)
    columns = np.arange(keys.start // width, -(-keys.stop // width)).reshape(-1, 1, 1)
    return numbers.reshape(-1, 1, 1, 1, 1), rows, columns, np.arange(32).reshape(8, 4)


def _cropped(drawn: Array, queries: slice, keys: slice, width: int) -> Array:
    """What was drawn for tiles, (heads, rows, ..., columns, ..., ..., ...), of these elements."""
    heads, rows, upper, lanes = drawn.shape[:4]
    whole = drawn.reshape(heads, rows * upper * lanes, math.prod(drawn.shape[4:]))
    first_row, first_column = queries.start // BLOCK * BLOCK, keys.start // width * width
    cropped: Array = whole[
        :,
        queries.start - first_row : queries.stop - first_row,
        keys.start - first_column : keys.stop - first_column,
    ]
    return cropped
