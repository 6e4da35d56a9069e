"""Tensors for a case, in memory that shows every stray write.

Each tensor lies in a buffer of its own that is filled with one NaN bit pattern: before and after
the tensor, in the gaps that its strides leave, and, for outputs, in the tensor itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from dlattn.dtypes import data_type, from_any
from dlattn.problem import TensorSpec
from tests.strategies import Case

#: Bytes before and after each tensor; keeps the alignment that allocators give.
_MARGIN = 512

#: A quiet NaN in each float type, with a payload that no arithmetic makes.
_POISON = {1: 0x7F, 2: 0x7FFA, 4: 0x7FFA5A5A, 8: 0x7FFA5A5A5A5A5A5A}

_TAILS = {"nan": float("nan"), "inf": float("inf"), "huge": 3e4}

#: What a dimension of size 1 may say its stride is.
_WILD = 3331333


class Library:
    """The few operations that builders need, for NumPy, CuPy, or PyTorch on one device.

    Attributes:
        xp: the library's module.
        device: torch's device name; unused by the others.
    """

    def __init__(self, xp: Any = np, device: str = "cpu") -> None:
        self.xp = xp
        self.device = device
        self.is_torch = xp.__name__ == "torch"

    def dtype(self, name: str) -> Any:
        if self.is_torch:
            return getattr(self.xp, name)
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def full(self, size: int, value: int, dtype: str) -> Any:
        device = {"device": self.device} if self.is_torch else {}
        return self.xp.full((size,), value, dtype=self.dtype(dtype), **device)

    def strided(self, flat: Any, dim: Sequence[int], stride: Sequence[int], offset: int) -> Any:
        if self.is_torch:
            return flat.as_strided(dim, stride, offset)
        strides = [s * flat.itemsize for s in stride]
        return self.xp.lib.stride_tricks.as_strided(flat[offset:], dim, strides)

    def normal(self, dim: Sequence[int], seed: int) -> Any:
        """Standard normal values, float32; each library draws its own."""
        if self.is_torch:
            generator = self.xp.Generator(self.device).manual_seed(seed)
            return self.xp.randn(*dim, generator=generator, device=self.device)
        return self.xp.random.default_rng(seed).standard_normal(dim, dtype=np.float32)

    def values(self, numbers: Sequence[float], dtype: str) -> Any:
        if self.is_torch:
            return self.xp.tensor(numbers, dtype=self.dtype(dtype), device=self.device)
        return self.xp.asarray(numbers, dtype=self.dtype(dtype))

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(self.dtype(dtype)) if self.is_torch else x.astype(self.dtype(dtype))

    def copy(self, x: Any) -> Any:
        return x.clone() if self.is_torch else x.copy()

    def host(self) -> Library:
        """The same library in host memory."""
        return Library(self.xp) if self.is_torch else Library(np)


@dataclass(frozen=True)
class Guarded:
    """A tensor inside its poisoned buffer.

    Attributes:
        spec: shape, strides and type, as a graph would declare them.
        start: the tensor's first element in the buffer.
        bits: the whole buffer, as integers.
        tensor: the tensor.
        written: the engine may write the tensor's elements.
    """

    library: Library
    spec: TensorSpec
    start: int
    bits: Any
    tensor: Any
    written: bool
    before: Any = field(repr=False)

    def stray_writes(self) -> int:
        """How many elements were changed that should not have been."""
        now = self.library.copy(self.bits)
        if self.written:
            own, was = (self._elements(bits) for bits in (now, self.before))
            own[...] = was
        return int((now != self.before).sum())

    def _elements(self, flat: Any) -> Any:
        return self.library.strided(flat, self.spec.dim, self.spec.stride, self.start)


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


def make_tensors(case: Case, library: Library) -> dict[str, Guarded]:
    """Every tensor that a forward and a backward of the case need, by role.

    Inputs hold random data and, past the lengths, what ``case.tails`` says; outputs hold poison.
    What the case does without is absent: ``stats``, other statistics, the sinks and their gradient;
    ``attn_scale``, bias, slopes and lengths where the case gives none as tensors.
    """
    made = dict(_data(case, library))
    dims = case.dims()
    types = {"stats": case.stats} if case.stats else {}
    types |= dict.fromkeys(case.row_outputs, "float32")
    types |= {"dSink_token": "float32"} if case.sink is not None else {}
    types |= {"dBias": case.d_bias} if case.d_bias else {}
    for role, dtype in (dict.fromkeys(("o", "dQ", "dK", "dV"), case.dtype) | types).items():
        spec = _spec(case, role, dims[role], dtype)
        made[role] = _guard(library, spec, dtype, None, case.layout(role) == "odd")
    return made


def check_poison_intact(tensors: Mapping[str, Guarded]) -> None:
    """Fails when an input, or anything around or between an output's elements, was written."""
    strays = {role: strays for role, t in tensors.items() if (strays := t.stray_writes())}
    assert not strays, f"elements written outside the outputs: {strays}"


def _data(case: Case, library: Library) -> Iterator[tuple[str, Guarded]]:
    rows = {"q": case.lengths_q(), "dO": case.lengths_q()}
    for nth, role in enumerate(("q", "k", "v", "dO")):
        dim = case.dims()[role]
        data = library.normal(dim, 4 * case.seed + nth)
        if role in "qk":
            data = data * _score_factor(case)
            if case.offset and case.scale_value:
                data[..., 0] = 1.0 if role == "q" else case.offset / case.scale_value
        for entry, length in enumerate(rows.get(role, case.lengths_kv())):
            data[entry, :, length:] = _TAILS[case.tails]
        shifted = case.layout(role) == "odd"
        yield role, _guard(library, _spec(case, role, dim, case.dtype), case.dtype, data, shifted)
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
    slopes_dim = case.slopes_dim()
    if slopes_dim is not None:
        data = 0.2 * library.normal(slopes_dim, 4 * case.seed + 5)
        spec = TensorSpec("alibi_slopes", slopes_dim, _packed(slopes_dim), data_type.FLOAT)
        yield "alibi_slopes", _guard(library, spec, "float32", data, False)
    for role, given, dtype in zip(
        ("seq_len_q", "seq_len_kv"), (case.len_q, case.len_kv), case.len_dtypes, strict=True
    ):
        if given is not None:
            dim = (case.batch, 1, 1, 1)
            data = library.values(given, dtype).reshape(dim)
            yield role, _guard(library, _spec(case, role, dim, dtype), dtype, data, False)


def _score_factor(case: Case) -> float:
    """What q and k are multiplied by so that scaled scores have the case's magnitude."""
    scale = abs(case.scale_value) or 1.0
    return min(100.0, (case.logits / (scale * case.head_dim_qk**0.5)) ** 0.5)


def _spec(
    case: Case, role: str, dim: tuple[int, ...], dtype: str, by_value: bool = False
) -> TensorSpec:
    transposed = role == "dBias" and case.bias_layout == "queries"
    stride = case.bias_stride() if transposed else strides(case.layout(role), dim)
    if case.wild_strides:
        stride = tuple(_WILD if d == 1 else s for d, s in zip(dim, stride, strict=True))
    return TensorSpec(role, dim, stride, from_any(Library().dtype(dtype)), by_value)


def _bias(case: Case, library: Library) -> Any:
    """Numbers, some of them -inf, or nonzero where a mask keeps; tails past the lengths."""
    data = library.normal(case.bias_dim(), 4 * case.seed + 6)
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


def _packed(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))


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
