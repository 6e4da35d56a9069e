"""What a measured shape is: ``Case``, and the names that cases have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

FORWARD, BACKWARD = "forward", "backward"
PASSES = (FORWARD, BACKWARD)
MASKS = ("full", "causal", "window")
#: What a case may have beside its mask; see :class:`Case`.
EXTRAS = ("alibi", "softcap", "sink", "dropout", "bias", "dbias", "ragged")
SOFTCAP, DROPOUT = 30.0, 0.1
_BYTES = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Case:
    """One attention: q (B, Sq, Hq, Dqk), k (B, Skv, Hkv, Dqk), v (B, Skv, Hkv, Dv).

    Attributes:
        name: unique in a preset; :func:`case` makes it.
        mask: ``full``, ``causal`` or ``window``; the diagonal ends in the bottom right corner.
        dtype: ``bf16`` or ``fp16``.
        window: keys that a query of a ``window`` mask attends to, its own position included.
        lengths: actual length of each batch entry, of queries and keys alike; ``None`` when all
            are full. Tensors stay padded to ``seq_q`` and ``seq_kv``.
        deterministic: a backward's results are asked to be the same bits in every run.
        page: keys and values lie in pages of so many rows, in any order; it divides ``seq_kv``.
        extra: one of :data:`EXTRAS`, or nothing: slopes of ALiBi, a soft cap of ``SOFTCAP``, a sink
            for each head, dropout with the probability ``DROPOUT``, a bias (1, Hq, Sq, Skv), the
            same and its gradient, or the entries of ``lengths`` packed one behind the other.
    """

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim_qk: int
    head_dim_v: int
    mask: str = "full"
    dtype: str = "bf16"
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    deterministic: bool = False
    page: int | None = None
    extra: str = ""

    def __post_init__(self) -> None:
        if self.mask not in MASKS or (self.mask == "window") != (self.window is not None):
            raise ValueError(f"{self.name}: mask {self.mask!r} with window {self.window}")
        if self.lengths is not None and len(self.lengths) != self.batch:
            raise ValueError(f"{self.name}: {len(self.lengths)} lengths for batch {self.batch}")
        if self.page is not None and (self.lengths is None or self.seq_kv % self.page):
            raise ValueError(f"{self.name}: pages of {self.page} need lengths, and whole pages")
        if self.extra and self.extra not in EXTRAS:
            raise ValueError(f"{self.name}: expected one of {EXTRAS}, got {self.extra!r}")
        if self.extra == "ragged" and (self.lengths is None or self.page is not None):
            raise ValueError(f"{self.name}: ragged tensors need lengths, and have no pages")

    @property
    def scale(self) -> float:
        """What the scores are multiplied with."""
        return float(self.head_dim_qk) ** -0.5

    @cached_property
    def area(self) -> int:
        """Attended (query, key) pairs of all batch entries and query heads."""
        sizes = [(self.seq_q, self.seq_kv)] * self.batch
        if self.lengths is not None:
            sizes = [(length, length) for length in self.lengths]
        left = self.window if self.mask == "window" else None
        return self.heads_q * sum(
            q * kv if self.mask == "full" else _band_area(q, kv, left) for q, kv in sizes
        )

    def flops(self, direction: str) -> int:
        """Of the attended area only: forward S and O; backward S, dP, dV, dQ and dK."""
        d_qk, d_v = self.head_dim_qk, self.head_dim_v
        per_pair = d_qk + d_v if direction == FORWARD else 3 * d_qk + 2 * d_v
        return 2 * self.area * per_pair

    @property
    def kv_bytes(self) -> int:
        """Bytes of k and v, which any forward pass reads at least once."""
        keys = self.batch * self.seq_kv if self.lengths is None else sum(self.lengths)
        return keys * self.heads_kv * (self.head_dim_qk + self.head_dim_v) * _BYTES[self.dtype]

    def tflops(self, direction: str, ms: float) -> float:
        """TFLOP/s of a call that took ``ms`` milliseconds."""
        return self.flops(direction) / ms * 1e-9


def _band_area(seq_q: int, seq_kv: int, window: int | None) -> int:
    """Pairs with ``key <= query + seq_kv - seq_q`` and, of those, the last ``window`` keys."""
    total = 0
    for query in range(seq_q):
        last = query + seq_kv - seq_q
        first = 0 if window is None else max(0, last - window + 1)
        total += max(0, last - first + 1)
    return total


def case(
    batch: int,
    heads: tuple[int, int],
    seq: int,
    head_dims: tuple[int, int],
    mask: str = "full",
    *,
    keys: int | None = None,
    dtype: str = "bf16",
    window: int | None = None,
    lengths: tuple[int, ...] | None = None,
    deterministic: bool = False,
    page: int | None = None,
    extra: str = "",
) -> Case:
    """An attention, named like ``b4 h16/16 s4096 d128 causal``.

    Args:
        heads: of q, and of k and v.
        seq: queries, and unless ``keys`` are others, keys.
        head_dims: of q and k, and of v.
    """
    d_qk, d_v = head_dims
    d = f"{d_qk}" if d_qk == d_v else f"{d_qk}/{d_v}"
    s = f"{seq}" if keys is None else f"{seq}/{keys}"
    words = [f"b{batch}", f"h{heads[0]}/{heads[1]}", f"s{s}", f"d{d}", mask]
    if window is not None:
        words[-1] += str(window)
    if lengths is not None and extra != "ragged":
        words.append("padded")
    if dtype != "bf16":
        words.append(dtype)
    if deterministic:
        words.append("deterministic")
    if page is not None:
        words.append(f"page{page}")
    if extra:
        words.append(extra)
    return Case(
        " ".join(words), batch, *heads, seq, keys or seq, d_qk, d_v, mask, dtype, window, lengths,
        deterministic, page, extra,
    )  # fmt: skip
