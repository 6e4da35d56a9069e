"""Which probabilities ``dropout=(p, seed, offset)`` keeps, element by element from the words of
the docstrings of :func:`dlattn.philox_dropout_mask` and :class:`dlattn.problem.FlashDropout`.
Nothing here uses dlattn."""

from __future__ import annotations

from functools import cache

import numpy as np

_ROUNDS = 7


@cache
def kept(p: float, seed: int, offset: int, dim: tuple[int, int, int, int]) -> np.ndarray:
    """Booleans (B, H, S_q, S_kv)."""
    low = 0xFFFFFFFF
    batch, heads, seq_q, seq_kv = dim
    head = np.arange(batch * heads)[:, None, None, None]
    row = np.arange(-(-seq_q // 16))[:, None, None]
    column = np.arange(-(-seq_kv // 16))[:, None]
    words = _philox(
        [offset & low, (offset >> 32) + 32 * head + np.arange(32), row, column],
        [seed & low, seed >> 32 & low],
    )
    q, k = np.arange(seq_q)[:, None], np.arange(seq_kv)
    of_word = words[q % 16 // 8 + 2 * (k % 16 // 8), :, q // 16, k // 16, q % 8 * 4 + k % 8 // 2]
    bits = np.moveaxis(of_word, -1, 0) >> (16 * (k % 2)).astype(np.uint64)
    threshold = max(1, round(2**15 * (1 - p))) if p < 1 else 0
    return ((bits & np.uint64(2**15 - 1)) < threshold).reshape(dim)


@cache
def flash_kept(p: float, seed: int, offset: int, dim: tuple[int, int, int, int]) -> np.ndarray:
    """The same of FlashAttention-2."""
    low = 0xFFFFFFFF
    batch, heads, seq_q, seq_kv = dim
    # As Python's integers: the carry out of 64 bits is lost.
    first = [offset + 32 * head + lane for head in range(batch * heads) for lane in range(32)]
    counter = np.array([x & (2**64 - 1) for x in first], np.uint64)
    counter = counter.reshape(batch * heads, 32, 1, 1)
    row, column = np.arange(-(-seq_q // 16))[:, None], np.arange(-(-seq_kv // 32))
    words = _philox(
        [counter & np.uint64(low), counter >> np.uint64(32), row, column],
        [seed & low, seed >> 32 & low],
    )
    q, k = np.arange(seq_q)[:, None], np.arange(seq_kv)
    # Fragments of mma.m16n8k16: a lane has two neighbours in each of two rows of four tiles.
    lane, byte = q % 8 * 4 + k % 8 // 2, q // 8 % 2 * 2 + k % 2
    of_word = words[k // 8 % 4, :, lane, q // 16, k // 32]
    bits = np.moveaxis(of_word, -1, 0) >> (8 * byte).astype(np.uint64)
    threshold = np.floor(np.float64(np.float32(1) - np.float32(p)) * 255)
    return ((bits & np.uint64(255)) <= threshold).reshape(dim)


def _philox(counter: list, key: list[int]) -> np.ndarray:
    """The four words of each counter, first axis; as in the paper, a round on two pairs."""
    mask = np.uint64(0xFFFFFFFF)
    a, b, c, d = np.broadcast_arrays(*(np.asarray(x).astype(np.uint64) & mask for x in counter))
    for i in range(_ROUNDS):
        k0 = np.uint64((key[0] + i * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((key[1] + i * 0xBB67AE85) & 0xFFFFFFFF)
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a = (right >> np.uint64(32)) ^ b ^ k0
        b = right & mask
        c = (left >> np.uint64(32)) ^ d ^ k1
        d = left & mask
    return np.stack([a, b, c, d])
