"""Tensors for a case, in memory that shows every stray write.

Each tensor lies in a buffer of its own that is filled with one NaN bit pattern: before and after
the tensor, in the gaps that its strides leave, and, for outputs, in the tensor itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dlattn.dtypes import data_type, from_any
from dlattn.problem import TensorSpec, offset_role
from tests.cases import RAGGED_Q, Case
from tests.libraries import Library
from tests.pages import in_memory, into_pages, page_numbers, table
from tests.score_mods import TENSORS, mod_data

#: Bytes before and after each tensor; keeps the alignment that allocators give.
_MARGIN = 512

#: A quiet NaN in each float type, with a payload that no arithmetic makes.
_POISON = {1: 0x7F, 2: 0x7FFA, 4: 0x7FFA5A5A, 8: 0x7FFA5A5A5A5A5A5A}

_TAILS = {"nan": float("nan"), "inf": float("inf"), "huge": 3e4}

#: What a dimension of size 1 may say its stride is.
_WILD = 3331333


@dataclass(frozen=True)
class Guarded:
    """A tensor inside its poisoned buffer.

    Attributes:
        spec: shape, strides and type, as a graph would declare them.
        start: the tensor's first element in the buffer.
        bits: the whole buffer, as integers.
        tensor: the tensor.
        written: the engine may write the tensor's elements.
        pages: of these alone, along the first axis; ``None`` is all.
        offsets, lengths: of a ragged tensor's entries; ``tensor`` is then (tokens, heads, columns).
    """

    library: Library
    spec: TensorSpec
    start: int
    bits: Any
    tensor: Any
    written: bool
    before: Any = field(repr=False)
    pages: list[int] | None = None
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    def padded(self) -> Any:
        """The tensor in its declared shape; of a ragged one a copy, with 0 past the lengths, or
        -inf in stats and maxima: what a padded tensor would hold."""
        if not self.spec.ragged:
            return self.tensor
        dead = -float("inf") if self.spec.name in ("stats", "score_max") else 0.0
        whole = self.library.filled(self.spec.dim, dead, self.tensor)
        flat = self.bits.view(self.tensor.dtype)
        for entry, rows in enumerate(self._entries(flat)):
            whole[entry, :, : rows.shape[1]] = rows
        return whole

    def stray_writes(self) -> int:
        """How many elements were changed that should not have been."""
        now = self.library.copy(self.bits)
        if self.written:
            for own, was in zip(self._entries(now), self._entries(self.before), strict=True):
                own[...] = was
        return int((now != self.before).sum())

    def _entries(self, flat: Any) -> list[Any]:
        """The elements, of a ragged tensor those of each entry, of a paged one those of its
        pages."""
        stride = self.spec.stride
        if not self.spec.ragged:
            whole = self.library.strided(flat, self.spec.dim, stride, self.start)
            return [whole] if self.pages is None else [whole[page] for page in self.pages]
        _, heads, _, columns = self.spec.dim
        return [
            self.library.strided(flat, (heads, length, columns), stride[1:], self.start + offset)
            for offset, length in zip(self.offsets, self.lengths, strict=False)
        ]


def strides(layout: str, dim: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements for a (B, H, S, D) tensor.

    ``bshd``, ``bhsd`` and ``sbhd`` are dense in that order; ``packed`` is a bshd slice of a fused
    q, k, v projection; ``padded`` leaves gaps of a multiple of 8 elements after rows, heads and
    batch entries; ``odd`` leaves gaps that break every 16-byte alignment, and :func:`make_tensors`
    starts it at an address that does.
    """
    b, h, s, d = dim
    if layout == "bshd":
        return (s * h * d, d, h * d, 1)
    if layout == "bhsd":
        return (h * s * d, s * d, d, 1)
    if layout == "sbhd":
        return (h * d, d, b * h * d, 1)
    if layout == "packed":
        return (3 * s * h * d, d, 3 * h * d, 1)
    gap = {"padded": 8, "odd": 1}[layout]
    row, head = d + gap, s * (d + gap) + 2 * gap
    return (h * head + 3 * gap, head, row, 1)


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a ragged tensor lie.

    Attributes:
        stride: for (B, H, S, D); that of the batch means nothing.
        offsets: of each batch entry, and where the last one ends.
        lengths: tokens of each batch entry.
        tokens: how many of ``stride[2]`` elements hold all.
    """

    stride: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int


def packing(case: Case, role: str) -> Packing:
    """As the role's layout would be of a single sequence of all tokens: ``bshd`` and ``sbhd`` are
    cuDNN's THD, ``packed`` is the fused q, k, v of it, the others have each head's tokens together.

    With gaps, sequences of the first two kinds begin wherever 8 elements begin.
    """
    lengths = case.lengths_q() if role in RAGGED_Q else case.lengths_kv()
    # Where offsets tell the lengths, nothing lies between the sequences.
    gaps = case.gaps and role not in (case.length_source("q"), case.length_source("kv"))
    spaces = [(entry % 3 if gaps else 0) for entry in range(len(lengths))]
    _, heads, longest, columns = case.dims()[role]
    layout = case.layout(role)
    dim = (1, heads, max(longest, sum(lengths) + sum(spaces)), columns)
    _, head, row, _ = strides(layout, dim)
    space = row if layout in ("bhsd", "padded", "odd") else 8
    offsets = [0]
    for length, count in zip(lengths, spaces, strict=True):
        offsets.append(offsets[-1] + length * row + count * space)
    batch = _WILD if case.wild_strides else longest * heads * columns
    stride = (batch, head if heads > 1 else batch, row, 1)
    return Packing(stride, tuple(offsets), lengths, max(1, -(-offsets[-1] // row)))


def make_tensors(case: Case, library: Library) -> dict[str, Guarded]:
    """Every tensor that a forward and a backward of the case need, by role.

    Inputs hold random data and, past the lengths, what ``case.tails`` says; outputs hold poison.
    What the case does without is absent: ``stats``, other statistics, the sinks and their gradient;
    ``attn_scale``, bias, slopes, lengths and what dropout reads or writes where the case gives none
    as tensors.
    """
    made = dict(_data(case, library))
    types = {"stats": case.stats} if case.stats else {}
    types |= dict.fromkeys(case.row_outputs, "float32")
    types |= {"dSink_token": "float32"} if case.sink is not None else {}
    types |= {"dBias": case.d_bias} if case.d_bias else {}
    types |= {f"d_mod_{name}": case.d_mods for name in case.mod_gradients()}
    for role, dtype in (dict.fromkeys(("o", "dQ", "dK", "dV"), case.dtype) | types).items():
        spec = _spec(case, role, in_memory(case, role), dtype)
        made[role] = _guarded(case, library, spec, dtype, None)
        if case.page(role):
            pages = [number for own in page_numbers(case, role) for number in own]
            made[role] = replace(made[role], pages=pages)
    if case.rng_dump:
        dim = case.scores_dim()
        stride = (*(2 * step for step in _packed(dim)[:-1]), 1)
        spec = TensorSpec("rng_dump", dim, stride, data_type.FLOAT)
        made["rng_dump"] = _guard(library, spec, "float32", None, False)
    if case.looks_inside:
        batch, heads, *sizes = case.scores_dim()
        dim = (batch, heads, *(-(-size // 128) * 128 for size in sizes))
        stride = (*(3 * step for step in _packed(dim)[:-1]), 1)
        spec = TensorSpec("debug_softmax", dim, stride, from_any(Library().dtype(case.dtype)))
        made["debug_softmax"] = _guard(library, spec, case.dtype, None, False)
    for role in case.ragged:
        if role in made:
            name, dim = offset_role(role), (case.batch + 1, 1, 1, 1)
            data = library.values(packing(case, role).offsets, case.offset_dtype).reshape(dim)
            spec = _spec(case, name, dim, case.offset_dtype)
            made[name] = _guard(library, spec, case.offset_dtype, data, False)
    return made


def check_poison_intact(tensors: Mapping[str, Guarded]) -> None:
    """Fails when an input, or anything around or between an output's elements, was written."""
    strays = {role: strays for role, t in tensors.items() if (strays := t.stray_writes())}
    assert not strays, f"elements written outside the outputs: {strays}"


def _data(case: Case, library: Library) -> Iterator[tuple[str, Guarded]]:
    rows = {"q": case.lengths_q(), "dO": case.lengths_q()}
    for nth, role in enumerate(("q", "k", "v", "dO")):
        dim = case.dims()[role]
        data = getattr(library, case.numbers)(dim, 4 * case.seed + nth)
        if role in "qk":
            data = data * _score_factor(case)
            if case.offset and case.scale_value:
                data[..., 0] = 1.0 if role == "q" else case.offset / case.scale_value
        for entry, length in enumerate(rows.get(role, case.lengths_kv())):
            data[entry, :, length:] = _TAILS[case.tails]
        if case.page(role):
            by_sequence, dim = data, in_memory(case, role)
            data = library.normal(dim, 0)
            data[...] = _TAILS[case.tails]
            into_pages(case, role, by_sequence, data)
            yield from _tables(case, library, role)
        yield role, _guarded(case, library, _spec(case, role, dim, case.dtype), case.dtype, data)
    if case.sink is not None:
        dim = case.dims()["sink_token"]
        data = case.sink + library.normal(dim, 4 * case.seed + 4)
        spec, shifted = (
            _spec(case, "sink_token", dim, "float32"),
            case.layout("sink_token") == "odd",
        )
        yield "sink_token", _guard(library, spec, "float32", data, shifted)
    one = (1, 1, 1, 1)
    if case.scale_as != "value":
        home = library.host() if case.scale_as == "host" else library
        spec = _spec(case, "attn_scale", one, "float32", by_value=case.scale_as == "host")
        data = home.values([case.scale_value], "float32").reshape(one)
        yield "attn_scale", _guard(home, spec, "float32", data, False)
    if case.bias:
        spec = TensorSpec(
            "bias", case.bias_dim(), case.bias_stride(), from_any(Library().dtype(case.bias))
        )
        yield "bias", _guard(library, spec, case.bias, _bias(case, library), False)
    yield from _dropout(case, library)
    if case.blocks is not None:
        dim, stride = case.blocks_dim(), case.blocks_stride()
        spec = TensorSpec("block_mask", dim, stride, data_type.UINT8)
        data = library.values(_blocks(case), "uint8").reshape(dim)
        yield "block_mask", _guard(library, spec, "uint8", data, False)
    slopes_dim = case.slopes_dim()
    if slopes_dim is not None:
        data = 0.2 * library.normal(slopes_dim, 4 * case.seed + 5)
        spec = TensorSpec("alibi_slopes", slopes_dim, _packed(slopes_dim), data_type.FLOAT)
        yield "alibi_slopes", _guard(library, spec, "float32", data, False)
    yield from _mod_tensors(case, library)
    dtypes = dict(zip(("seq_len_q", "seq_len_kv"), case.len_dtypes, strict=True))
    for role, lengths in case.length_tensors().items():
        dim, dtype = (case.batch, 1, 1, 1), dtypes[role]
        data = library.values(lengths, dtype).reshape(dim)
        yield role, _guard(library, _spec(case, role, dim, dtype), dtype, data, False)


def _mod_tensors(case: Case, library: Library) -> Iterator[tuple[str, Guarded]]:
    """What a function of scores reads."""
    for nth, (name, dim) in enumerate(case.mod_dims().items()):
        axes, dtype = TENSORS[name]
        home = library if axes else library.host()
        data = mod_data(case, home, name, 4 * case.seed + 8 + nth, _TAILS[case.tails])
        steps = 2 if axes.endswith("k") and case.wild_strides else 1
        stride = tuple(steps * step for step in _packed(dim))
        spec = TensorSpec(f"mod_{name}", dim, stride, from_any(Library().dtype(dtype)), not axes)
        yield spec.name, _guard(home, spec, dtype, data, False)


def _dropout(case: Case, library: Library) -> Iterator[tuple[str, Guarded]]:
    """The mask, and what is given as tensors of one number."""
    numbers: tuple[tuple[str, float, str], ...] = ()
    if case.is_random:
        roles = ("dropout_seed", "dropout_offset")
        numbers = tuple(zip(roles, case.philox(), case.dropout_dtypes, strict=True))
    elif case.dropout is not None:
        dtype = str(case.dropout)
        spec = TensorSpec(
            "dropout_mask", case.mask_dim(), case.mask_stride(), from_any(Library().dtype(dtype))
        )
        data = library.normal(case.mask_dim(), 4 * case.seed + 7) > -0.8
        data = library.cast(data, "float32")
        yield "dropout_mask", _guard(library, spec, dtype, data, False)
        scale = case.dropout_scale()
        scales = (("dropout_scale", scale), ("dropout_scale_inv", 1 / scale))
        numbers = tuple((role, value, "float32") for role, value in scales)
    if case.dropout_as == "value":
        return
    home = library.host() if case.dropout_as == "host" else library
    for role, number, dtype in numbers:
        spec = TensorSpec(
            role, (1,) * 4, (1,) * 4, from_any(Library().dtype(dtype)), home is not library
        )
        data = home.values([number], dtype).reshape((1,) * 4)
        yield role, _guard(home, spec, dtype, data, False)


def _tables(case: Case, library: Library, role: str) -> Iterator[tuple[str, Guarded]]:
    """The page table of k or v, and its offsets if it is packed."""
    name, numbers = f"paged_attention_{role}_table", table(case, role)
    if not case.packed_tables:
        dim = (case.batch, 1, len(numbers[0]), 1)
        spec = TensorSpec(name, dim, (dim[2] + 3, 1, 1, 1), data_type.INT32)
        data = library.values([n for own in numbers for n in own], "int32").reshape(dim)
        yield name, _guard(library, spec, "int32", data, False)
        return
    # One more, so that there is memory even if no sequence has a page.
    entries = library.values([*(n for own in numbers for n in own), -1], "int32")
    spec = TensorSpec(name, tuple(entries.shape), (1,), data_type.INT32)
    made = _guard(library, spec, "int32", entries, False)
    width = -(-case.seq_kv // (case.page(role) or 1))
    dim = (case.batch, 1, width, 1)
    spec = TensorSpec(name, dim, (width, 1, 1, 1), data_type.INT32, packed=True)
    yield name, replace(made, spec=spec)
    offsets = [sum(map(len, numbers[:entry])) for entry in range(case.batch + 1)]
    name, dtype = offset_role(name), case.len_dtypes[0]
    dim = (case.batch + 1, 1, 1, 1)
    data = library.values(offsets, dtype).reshape(dim)
    yield name, _guard(library, _spec(case, name, dim, dtype), dtype, data, False)


def _score_factor(case: Case) -> float:
    """What q and k are multiplied by so that scaled scores have the case's magnitude."""
    scale = abs(case.scale_value) or 1.0
    factor = min(100.0, (case.logits / (scale * case.head_dim_qk**0.5)) ** 0.5)
    return factor if case.numbers == "normal" else 2.0 ** round(math.log2(factor))


def _spec(
    case: Case, role: str, dim: tuple[int, ...], dtype: str, by_value: bool = False
) -> TensorSpec:
    element = from_any(Library().dtype(dtype))
    if role in case.ragged:
        return TensorSpec(role, dim, packing(case, role).stride, element, ragged=True)
    transposed = role == "dBias" and case.bias_layout == "queries"
    stride = case.bias_stride() if transposed else strides(case.layout(role), dim)
    if case.wild_strides:
        stride = tuple(_WILD if d == 1 else s for d, s in zip(dim, stride, strict=True))
    return TensorSpec(role, dim, stride, element, by_value)


def _bias(case: Case, library: Library) -> Any:
    """Numbers, some of them -inf, or nonzero where a mask keeps; tails past the lengths."""
    data = getattr(library, case.numbers)(case.bias_dim(), 4 * case.seed + 6)
    if case.bias in ("bool", "uint8"):
        return library.cast(data > -0.8, "float32")
    data[data > 1.5] = -float("inf")
    if case.batch == 1 or "b" in case.bias_axes:
        for entry, (m, n) in enumerate(zip(case.lengths_q(), case.lengths_kv(), strict=True)):
            if "q" in case.bias_axes:
                data[entry, :, m:] = _TAILS[case.tails]
            if "k" in case.bias_axes:
                data[entry, :, :, n:] = _TAILS[case.tails]
    return data


def _blocks(case: Case) -> list[int]:
    """Bytes of random bits; those beyond the last block, which mean nothing, are set."""
    dim = case.blocks_dim()
    bits = np.random.default_rng(4 * case.seed + 7).random((*dim[:3], 8 * dim[3])) < case.blocks
    bits[..., -(-case.seq_kv // 128) :] = True
    return [int(byte) for byte in np.packbits(bits, axis=-1, bitorder="little").ravel()]


def _packed(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))


def _guarded(case: Case, library: Library, spec: TensorSpec, dtype: str, data: Any) -> Guarded:
    """A tensor of the case; a ragged one gets the rows of ``data`` that its entries have."""
    shifted = case.layout(spec.name) == "odd"
    if not spec.ragged:
        return _guard(library, spec, dtype, data, shifted)
    packed, (_, heads, _, columns) = packing(case, spec.name), spec.dim
    dim, stride = (packed.tokens, heads, columns), (spec.stride[2], spec.stride[1], 1)
    view = TensorSpec(spec.name, dim, stride, spec.dtype)
    memory = _guard(library, view, dtype, None, shifted)
    flat = memory.bits.view(memory.tensor.dtype)
    made = replace(
        memory, spec=spec, written=data is None, offsets=packed.offsets, lengths=packed.lengths
    )
    if data is None:
        return made
    for entry, rows in enumerate(made._entries(flat)):
        rows[...] = library.cast(data[entry, :, : rows.shape[1]], dtype)
    return replace(made, before=library.copy(made.bits))


def _guard(library: Library, spec: TensorSpec, dtype: str, data: Any, shifted: bool) -> Guarded:
    size = library.dtype(dtype).itemsize
    margin, shift = _MARGIN // size, int(shifted)
    extent = 1 + sum((d - 1) * s for d, s in zip(spec.dim, spec.stride, strict=True) if d > 1)
    bits = library.full(margin + shift + extent + margin, _POISON[size], f"int{8 * size}")
    flat = bits.view(library.dtype(dtype))
    tensor = library.strided(flat, spec.dim, spec.stride, margin + shift)
    if data is not None:
        tensor[...] = library.cast(data, dtype)
    return Guarded(library, spec, margin + shift, bits, tensor, data is None, library.copy(bits))
