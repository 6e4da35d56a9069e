"""What a server asks for, beside its peers: the preset ``serving`` of ``bench.run``.

A call of packed queries has prompts, the next queries of long prompts, and sequences of which each
decodes a token; keys and values are packed as well, or lie in pages. All know how many tokens there
are, and the longest sequence; lengths are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from bench.decode import TOLERANCE
from bench.jobs import Effort, Job, RowJob, prepared
from bench.measure import GRAPH, Measured, time_all
from bench.peers.flash import flash3_forward
from bench.reference import attended

#: Queries and keys of each sequence; bottom right causal masks.
Lengths = tuple[tuple[int, int], ...]


def _spread(least: int, most: int, count: int) -> list[int]:
    """Numbers between two, in no order."""
    return [least + (most - least) * (i * 37 % count) // (count - 1) for i in range(count)]


#: By name: a prompt beside decoded tokens; prompts alone; the next queries of long prompts.
BATCHES: dict[str, Lengths] = {
    "63x1/2048 + 1024": ((1, 2048),) * 63 + ((1024, 1024),),
    "31x1/8192 + 2048/8192": ((1, 8192),) * 31 + ((2048, 8192),),
    "127x1/100..4000 + 512": (*((1, n) for n in _spread(100, 4000, 127)), (512, 512)),
    "32x4/4096 + 1024": ((4, 4096),) * 32 + ((1024, 1024),),
    "8 of 100..2000": tuple((n, n) for n in _spread(100, 2000, 8)),
    "4000 + 12 of 50..500": ((4000, 4000), *((n, n) for n in _spread(50, 500, 12))),
    "512/16384": ((512, 16384),),
    "4x512/1k..16k": tuple((512, n) for n in (1024, 4096, 8192, 16384)),
}


@dataclass(frozen=True)
class Row:
    """One problem: ``heads`` of q, and of k and v; ``page`` rows of a page, or none."""

    batch: str
    heads: tuple[int, int]
    page: int | None = None
    head_dim: int = 128

    @property
    def lengths(self) -> Lengths:
        return BATCHES[self.batch]

    @property
    def name(self) -> str:
        page = "" if self.page is None else f" page{self.page}"
        return f"{self.batch} h{self.heads[0]}/{self.heads[1]} d{self.head_dim}{page}"

    def tflops(self, direction: str, ms: float) -> float:
        """TFLOP/s of a call that took ``ms`` milliseconds: two products."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in self.lengths)
        return 4 * self.heads[0] * pairs * self.head_dim / ms * 1e-9


_HEADS = ((32, 8), (64, 8), (16, 2), (16, 16))
ROWS = tuple(
    Row(batch, heads, page) for batch in BATCHES for heads in _HEADS for page in (None, 64, 16)
)


class Data:
    """Tensors of a row, bf16, and what functions of packed sequences are told of them."""

    def __init__(self, row: Row, device: str = "cuda") -> None:
        import torch

        (heads, heads_kv), dim = row.heads, row.head_dim
        queries, keys = ([of[i] for of in row.lengths] for i in range(2))

        def normal(*size: int) -> Any:
            return torch.empty(*size, device=device, dtype=torch.bfloat16).normal_()

        def int32(numbers: Iterable[int]) -> Any:
            return torch.tensor([*numbers], device=device, dtype=torch.int32)

        self.q = normal(sum(queries), heads, dim)
        self.o = torch.empty_like(self.q)
        self.first_q, self.first_k = (int32([0, *accumulate(n)]) for n in (queries, keys))
        self.used_k, self.longest = int32(keys), (max(queries), max(keys))
        self.table = None
        size: tuple[int, ...] = (sum(keys), heads_kv, dim)
        if row.page is not None:
            pages = [-(-n // row.page) for n in keys]
            size = (sum(pages), row.page, heads_kv, dim)
            order = torch.randperm(sum(pages), device=device, dtype=torch.int32).split(pages)
            self.table = torch.nn.utils.rnn.pad_sequence([*order], batch_first=True)
        self.k, self.v = normal(*size), normal(*size)

    def rows(self, kept: Any, entry: int) -> Any:
        """The keys, or values, of a sequence, (S, H, D)."""
        if self.table is None:
            first, last = self.first_k[entry : entry + 2].tolist()
            return kept[first:last]
        length = int(self.used_k[entry])
        pages = self.table[entry, : -(-length // kept.shape[1])].long()
        return kept[pages].flatten(0, 1)[:length]


def dlattn_call(row: Row, data: Data) -> Callable[[], Any]:
    """``mha_varlen_fwd``, into ``data.o``."""
    import dlattn

    used = None if data.table is None else data.used_k
    arguments = (data.first_q, data.first_k, used, data.table, None, *data.longest)
    return lambda: dlattn.flash.mha_varlen_fwd(
        data.q, data.k, data.v, data.o, *arguments, is_causal=True
    )[0]


def flash3_call(splits: int, row: Row, data: Data) -> Callable[[], Any]:
    """FlashAttention-3, which divides keys into so many parts; 0 leaves it the choice."""
    forward = flash3_forward()
    queries, keys = data.longest
    options: dict[str, Any] = {
        "softmax_scale": row.head_dim**-0.5,
        "is_causal": True,
        "cu_seqlens_q": data.first_q,
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
        "num_splits": splits,
    }
    if data.table is None:
        options["cu_seqlens_k"] = data.first_k
    else:
        options |= {"seqused_k": data.used_k, "page_table": data.table}
    return lambda: forward(data.q, data.k, data.v, out=data.o, **options)[0]


#: By contender: its call, which returns the output.
CONTENDERS: dict[str, Callable[[Row, Data], Callable[[], Any]]] = {
    "dlattn": dlattn_call,
    "fa3": partial(flash3_call, 1),
    "fa3_splits": partial(flash3_call, 0),
}


def reference(data: Data, entry: int) -> Any:
    """The output of the last 64 queries of a sequence, in fp32."""
    first, last = data.first_q[entry : entry + 2].tolist()
    q = data.q[max(first, last - 64) : last]
    return attended(q, data.rows(data.k, entry), data.rows(data.v, entry))


def complaint(row: Row, data: Data, call: Callable[[], Any]) -> str:
    """What is wrong with a second call's output of the first and the last sequence, or nothing."""
    call()
    data.o.fill_(float("nan"))
    output = call().float()
    for entry in {0, len(row.lengths) - 1}:
        expected, last = reference(data, entry), int(data.first_q[entry + 1])
        off = float((output[last - len(expected) : last] - expected).abs().max())
        if not off <= TOLERANCE * float(expected.abs().max()):
            return f"o of sequence {entry} is off by {off:.1e}"
    return "" if bool(output.isfinite().all()) else "o is not finite"


class ServingJob(RowJob[Row]):
    """A row beside its peers."""

    def times(self, measured: Measured, names: Sequence[str], effort: Effort) -> dict[str, float]:
        data = Data(self.row)

        def make(name: str) -> tuple[Callable[[], Any], str]:
            call = CONTENDERS[name](self.row, data)
            return call, complaint(self.row, data, call)

        calls = prepared(measured, {n: partial(make, n) for n in names if n in CONTENDERS})
        return time_all(measured, calls, GRAPH, effort.rounds, effort.seconds)


def jobs() -> list[Job]:
    """All rows, one batch after the other."""
    return [ServingJob(row) for row in ROWS]
