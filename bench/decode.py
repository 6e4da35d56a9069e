"""Decoding beside its peers: the preset ``decode`` of ``bench.run``.

A call reads caches that no call before it has left in L2: contenders replay a CUDA graph of calls
over copies of them in turn. Rounds are interleaved; each contender's output is checked first. What
counts is bandwidth: keys and values, once.
"""

from __future__ import annotations

import importlib
import math
import random
import statistics
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from bench.jobs import Effort, Job, RowJob, prepared
from bench.measure import Measured
from bench.peers.flash import flash3_forward
from bench.peers.graph import Cudnn, Dlattn, GraphPeer, like
from bench.reference import attended
from bench.timing import time_once

#: Bytes of caches that calls take in turn: several times what L2 holds.
ROTATED = 3 * 10**8
#: Copies of a cache at most.
COPIES = 64
#: What the largest error of an output may be, of its largest element.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """One problem: ``heads`` of q, and of k and v; ``page`` rows of a page, or none. Lengths are
    on the device if ``lengths``, and of pages always; ``uneven``, they are spread evenly from
    ``keys / batch`` to ``keys``."""

    batch: int
    heads: tuple[int, int]
    keys: int
    queries: int = 1
    page: int | None = None
    head_dim: int = 128
    lengths: bool = False
    uneven: bool = False

    @property
    def reads_lengths(self) -> bool:
        return self.lengths or self.page is not None

    @property
    def keys_of_each(self) -> list[int]:
        """Of each batch entry, in an order that says nothing."""
        if not self.uneven:
            return [self.keys] * self.batch
        parts = random.Random(0).sample(range(1, self.batch + 1), self.batch)
        return [part * self.keys // self.batch for part in parts]

    @property
    def bytes(self) -> int:
        """Of keys and values, bf16."""
        return sum(self.keys_of_each) * self.heads[1] * self.head_dim * 4

    @property
    def name(self) -> str:
        heads = "/".join(map(str, self.heads))
        kinds = {"uneven": self.uneven, "lengths": self.lengths, f"page{self.page}": self.page}
        size = f"b{self.batch} h{heads} s{self.keys} q{self.queries} d{self.head_dim}"
        return " ".join([size, *(kind for kind, given in kinds.items() if given)])

    def tflops(self, direction: str, ms: float) -> float:
        """TFLOP/s of a call that took ``ms`` milliseconds: two products."""
        pairs = sum(keys - i for keys in self.keys_of_each for i in range(self.queries))
        return 4 * pairs * self.heads[0] * self.head_dim / ms * 1e-9


_SIZES = {
    (64, 8): ((1, 1024), (1, 8192), (1, 65536), (8, 1024), (8, 8192), (8, 65536), (64, 1024),
              (64, 8192)),
    (32, 32): ((1, 1024), (1, 8192), (1, 65536), (8, 1024), (8, 8192), (16, 4096), (64, 1024),
               (64, 8192)),
}  # fmt: skip
_KINDS: tuple[dict[str, Any], ...] = ({}, {"lengths": True}, {"page": 64})
_UNEVEN = (
    *product(((64, 8),), ((8, 8192), (16, 8192), (32, 1024), (64, 1024), (64, 8192))),
    *product(((32, 32),), ((8, 8192), (16, 4096), (64, 1024))),
)  # fmt: skip
#: Those of one query: plain, with lengths on the device, and with these in pages of 64; smaller
#: pages; several queries; uneven lengths; one head of keys, which is what a GPU of eight has, also
#: of several queries; narrow heads.
ROWS = (
    *(
        Row(batch, heads, keys, **kind)
        for heads, sizes in _SIZES.items()
        for (batch, keys), kind in product(sizes, _KINDS)
    ),
    *(Row(batch, (64, 8), keys, page=16) for batch, keys in ((8, 8192), (64, 1024))),
    *(Row(8, (64, 8), 8192, 8, **kind) for kind in _KINDS),
    Row(16, (32, 32), 4096, 8),
    *(
        Row(batch, heads, keys, uneven=True, **kind)
        for heads, (batch, keys) in _UNEVEN
        for kind in _KINDS[1:]
    ),
    *(Row(batch, (8, 1), keys, page=64) for batch, keys in ((1, 8192), (1, 65536), (16, 8192))),
    *(
        Row(batch, heads, keys, queries, page=64)
        for heads in ((64, 8), (8, 1))
        for batch, keys in ((1, 8192), (16, 8192), (64, 1024))
        for queries in (4, 16)
    ),
    *(
        Row(batch, heads, keys, page=page, head_dim=64)
        for batch, heads, keys in ((1, (64, 8), 16384), (1, (32, 32), 16384), (64, (64, 8), 2048))
        for page in (None, 64)
    ),
)


class Data:
    """Tensors of a row: as many copies of the caches as are taken in turn, bf16."""

    def __init__(self, row: Row, device: str = "cuda") -> None:
        import torch

        batch, (heads, heads_kv), dim = row.batch, row.heads, row.head_dim
        copies = max(1, min(COPIES, math.ceil(ROTATED / row.bytes)))
        shape = (batch, row.keys, heads_kv, dim)
        self.table = None
        if row.page is not None:
            pages = batch * row.keys // row.page
            shape = (pages, row.page, heads_kv, dim)
            self.table = torch.randperm(pages, device=device, dtype=torch.int32).view(batch, -1)

        def normal(*dim: int) -> Any:
            return torch.empty(*dim, device=device, dtype=torch.bfloat16).normal_()

        self.q = [normal(batch, row.queries, heads, dim) for _ in range(copies)]
        self.k, self.v = ([normal(*shape) for _ in range(copies)] for _ in range(2))
        self.o = [torch.empty_like(q) for q in self.q]
        self.lengths = torch.tensor(row.keys_of_each, device=device, dtype=torch.int32)

    def contiguous(self) -> Data:
        """The same queries, and the keys and values that lie in pages one behind the other."""
        made = copy(self)
        assert self.table is not None
        order, made.table = self.table.long(), None
        made.k, made.v = ([t[order].flatten(1, 2) for t in kept] for kept in (self.k, self.v))
        return made


Calls = list[Callable[[], Any]]


def graph_calls(peer: GraphPeer, row: Row, data: Data, **of_graph: Any) -> Calls:
    """``execute`` of one graph, on each copy.

    Args:
        of_graph: what ``pygraph`` is given besides.
    """
    import torch

    api = importlib.import_module(peer.module)
    handle = peer.make_handle(api)
    handles = {} if handle is None else {"handle": handle}
    graph = api.pygraph(
        io_data_type=api.data_type.BFLOAT16,
        intermediate_data_type=api.data_type.FLOAT,
        compute_data_type=api.data_type.FLOAT,
        **handles,
        **of_graph,
    )
    first = [t[0].transpose(1, 2) for t in (data.q, data.k, data.v)]
    inputs = [like(api, graph, t) for t in first]
    options: dict[str, Any] = {}
    # One query sees all keys; programs that decode ask for a causal mask all the same, and ours is
    # timed with it.
    if row.queries > 1 or isinstance(peer, Dlattn):
        options["diagonal_alignment"] = api.diagonal_alignment.BOTTOM_RIGHT
        options["diagonal_band_right_bound"] = 0
    given = {}
    if row.reads_lengths:
        options["use_padding_mask"] = True
        given["seq_len_q"] = torch.full_like(data.lengths, row.queries).view(-1, 1, 1, 1)
        given["seq_len_kv"] = data.lengths.view(-1, 1, 1, 1)
    if data.table is not None:
        options["paged_attention_max_seq_len_kv"] = row.keys
        for role in ("paged_attention_k_table", "paged_attention_v_table"):
            given[role] = data.table.view(row.batch, 1, -1, 1)
    declared = {role: like(api, graph, t) for role, t in given.items()}
    fixed = {declared[role]: t for role, t in given.items()}
    options |= declared
    q, k, v = inputs
    output, _ = graph.sdpa(
        q=q, k=k, v=v, attn_scale=row.head_dim**-0.5, generate_stats=False, **options
    )
    o = data.o[0].transpose(1, 2)
    output.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
    output.set_data_type(api.data_type.BFLOAT16)
    graph.build([api.heur_mode.A])
    workspace = torch.empty(
        max(1, graph.get_workspace_size()), device=data.q[0].device, dtype=torch.uint8
    )
    packs = [
        dict(zip((*inputs, output), (t.transpose(1, 2) for t in tensors), strict=True)) | fixed
        for tensors in zip(data.q, data.k, data.v, data.o, strict=True)
    ]
    return [lambda pack=pack: graph.execute(pack, workspace, **handles) for pack in packs]


def contiguous_calls(row: Row, data: Data) -> Calls:
    """The same of contiguous caches with lengths: what pages cost, in the same rounds."""
    if data.table is None:
        raise ValueError("The row has no pages.")
    return graph_calls(Dlattn(), replace(row, page=None, lengths=True), data.contiguous())


def flash3_calls(row: Row, data: Data) -> Calls:
    """FlashAttention-3, which chooses the number of splits."""
    forward = flash3_forward()
    options: dict[str, Any] = {
        "softmax_scale": row.head_dim**-0.5,
        "is_causal": row.queries > 1,
    }
    if row.reads_lengths:
        options["seqused_k"] = data.lengths
    if data.table is not None:
        options["page_table"] = data.table
    return [
        lambda q=q, k=k, v=v, o=o: forward(q, k, v, out=o, **options)[0]
        for q, k, v, o in zip(data.q, data.k, data.v, data.o, strict=True)
    ]


def flash2_calls(row: Row, data: Data) -> Calls:
    """FlashAttention-2 as torch ships it, into memory of its own; it knows no pages."""
    import torch

    if row.reads_lengths:
        raise ValueError("torch's operator takes neither pages nor lengths.")
    forward, sizes = torch.ops.aten._flash_attention_forward, (row.queries, row.keys)
    arguments = (None, None, *sizes, 0.0, row.queries > 1, False)
    return [
        lambda q=q, k=k, v=v: forward(q, k, v, *arguments, scale=row.head_dim**-0.5)[0]
        for q, k, v in zip(data.q, data.k, data.v, strict=True)
    ]


#: By contender: the calls, which return the output or write ``data.o``.
CONTENDERS = {
    "dlattn": partial(graph_calls, Dlattn()),
    "dlattn:contiguous": contiguous_calls,
    "cudnn": partial(graph_calls, Cudnn()),
    "fa3": flash3_calls,
    "fa2": flash2_calls,
}


def reference(row: Row, data: Data) -> Any:
    """The output for the first batch entry of the first copy, in fp32."""
    first = (data.k[0][:1], data.v[0][:1])
    if data.table is not None:
        first = tuple(t[data.table[0].long()] for t in (data.k[0], data.v[0]))
    return attended(data.q[0][0], *(t.flatten(0, 1)[: row.keys_of_each[0]] for t in first))


def complaint(data: Data, call: Callable[[], Any], expected: Any) -> str:
    """What is wrong with a second call's output on the first copy, or nothing."""
    call()
    data.o[0].fill_(math.nan)
    returned = call()
    output = data.o[0] if returned is None else returned
    error = float((output[0].float() - expected).abs().max() / expected.abs().max())
    return "" if error <= TOLERANCE else f"o is off by {error:.1e} of its largest element"


def milliseconds(contenders: dict[str, Calls], rounds: int) -> dict[str, float]:
    """Median time of a call in a replayed graph, by contender."""
    import torch

    replays = {}
    for name, calls in contenders.items():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph, count = torch.cuda.CUDAGraph(), max(4, min(2 * COPIES, 2 * len(calls)))
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        replays[name] = graph.replay, count
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3 * rounds):  # a replay is short beside the rounds of other cases
        for name, (replay, count) in replays.items():
            samples[name].append(time_once(replay, 1) / count)
    return {name: statistics.median(times) for name, times in samples.items()}


class DecodeJob(RowJob[Row]):
    """A row beside its peers."""

    def times(self, measured: Measured, names: Sequence[str], effort: Effort) -> dict[str, float]:
        data = Data(self.row)
        expected = reference(self.row, data)

        def make(name: str) -> tuple[Calls, str]:
            calls = CONTENDERS[name](self.row, data)
            return calls, complaint(data, calls[0], expected)

        makers = {name: partial(make, name) for name in names if name in CONTENDERS}
        return milliseconds(prepared(measured, makers), effort.rounds)

    def compile(self, direction: str, device: Any) -> None:
        graph_calls(Dlattn(), self.row, Data(self.row, "meta"), device_property=device)


def jobs() -> list[Job]:
    """All rows, those of 8192 keys first."""
    ordered = sorted(ROWS, key=lambda row: (row.keys != 8192, row.reads_lengths, row.keys))
    return [DecodeJob(row) for row in ordered]
