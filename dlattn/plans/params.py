"""The one argument of every kernel, mirrored from ``cuda_src/attn/params.cuh``."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, ClassVar

from dlattn.dtypes import data_type
from dlattn.problem import Geometry, TensorSpec

if TYPE_CHECKING:
    from typing import Self

#: Roles that are (batch, head, row, column) tensors, in the order of the struct.
TENSOR_ROLES = (
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    *("score_max", "score_sum_exp", "sink_token", "dSink_token"),
)
LENGTH_ROLES = ("seq_len_q", "seq_len_kv")
BIAS_ROLES = ("bias", "dBias")

#: ``tanh(x) / x`` as a polynomial of ``x**2`` with a relative error of 2**-23.2 for ``abs(x)`` up to
#: ``_TANH_REACH``, the least that this degree allows (Remez exchange).
_TANH = (0.9999999019010428, -0.3333136245997891, 0.13270976773930643, -0.047553604158444555)
_TANH_REACH = 0.4


class TensorRef(ctypes.Structure):
    """Address and strides (in elements) of a tensor whose columns are contiguous."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]


class LengthRef(ctypes.Structure):
    """Address of one length per batch entry; null when every sequence is full."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        ("is_int64", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class SlopeRef(ctypes.Structure):
    """Address of one number per head, or per batch entry and head; strides in elements."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
    ]


class BiasRef(ctypes.Structure):
    """Address and strides (in elements) of a tensor that broadcasts to (B, H, S_q, S_kv)."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
    ]


class SoftCapSeries(ctypes.Structure):
    """Coefficients of the odd powers of a raw product, and up to where they hold."""

    _fields_ = [("of", 4 * ctypes.c_float), ("most", ctypes.c_float)]


class Params(ctypes.Structure):
    """What every kernel is given, by value."""

    _fields_ = [
        *((role, TensorRef) for role in TENSOR_ROLES),
        *((role, LengthRef) for role in LENGTH_ROLES),
        ("alibi_slopes", SlopeRef),
        *((role, BiasRef) for role in BIAS_ROLES),
        ("attn_scale_device", ctypes.c_uint64),
        ("schedule", ctypes.c_uint64),
        ("items_taken", ctypes.c_uint64),
        ("dq_accum", ctypes.c_uint64),
        ("dq_arrivals", ctypes.c_uint64),
        ("dq_stored", ctypes.c_uint64),
        ("shares_taken", ctypes.c_uint64),
        ("row_stats", ctypes.c_uint64),
        ("sink_parts", ctypes.c_uint64),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("seq_q", ctypes.c_int32),
        ("seq_kv", ctypes.c_int32),
        ("heads_per_k", ctypes.c_int32),
        ("heads_per_v", ctypes.c_int32),
        ("band_left", ctypes.c_int32),
        ("band_right", ctypes.c_int32),
        ("bottom_right", ctypes.c_int32),
        ("heads_per_wave", ctypes.c_int32),
        ("heads_per_block", ctypes.c_int32),
        ("dq_places", ctypes.c_int32),
        ("dq_lag", ctypes.c_int32),
        ("attn_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("softcap_inverse", ctypes.c_float),
        ("softcap_series", SoftCapSeries),
    ]


class MappedParams(ctypes.Structure):
    """``Params``, and the tensor maps that the copy engine needs beside them; 64-byte aligned.

    Attributes:
        required: roles that have a map.
        optional: roles that have one if their tensor is there and fit for it.
    """

    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ("bias",)
    p: Params

    @classmethod
    def aligned(cls) -> Self:
        """A zeroed instance at an address that the driver accepts for tensor maps."""
        memory = ctypes.create_string_buffer(ctypes.sizeof(cls) + 63)
        return cls.from_buffer(memory, -ctypes.addressof(memory) % 64)


def _mapped_fields(required: tuple[str, ...]) -> list[tuple[str, type]]:
    return [
        *((role, ctypes.c_uint8 * 128) for role in (*required, *MappedParams.optional)),
        ("p", Params),
        ("unused", ctypes.c_uint8 * (-ctypes.sizeof(Params) % 64)),
    ]


class MappedFwdParams(MappedParams):
    """Of the Hopper forward."""

    required = ("q", "k", "v", "o")
    _fields_ = _mapped_fields(required)


class MappedBwdParams(MappedParams):
    """Of the Hopper backward."""

    required = ("q", "k", "v", "dO", "dK", "dV")
    _fields_ = _mapped_fields(required)


def params_for(geometry: Geometry) -> Params:
    """A ``Params`` with every size, stride and scalar set, and every address null."""
    params = Params(
        batch=geometry.batch,
        heads_q=geometry.heads_q,
        seq_q=geometry.seq_q,
        seq_kv=geometry.seq_kv,
        heads_per_k=geometry.heads_q // geometry.heads_k,
        heads_per_v=geometry.heads_q // geometry.heads_v,
        band_left=geometry.band_left or 0,
        band_right=geometry.band_right or 0,
        bottom_right=geometry.bottom_right,
        heads_per_wave=1,
        heads_per_block=1,
        attn_scale=geometry.attn_scale,
        softcap=geometry.softcap or 0.0,
        softcap_inverse=1 / geometry.softcap if geometry.softcap else 0.0,
        softcap_series=_softcap_series(geometry),
    )
    for role in TENSOR_ROLES:
        if role in geometry.tensors:
            batch, head, row, _ = geometry.tensors[role].stride
            setattr(params, role, TensorRef(0, batch, head, row))
    for role in LENGTH_ROLES:
        if role in geometry.tensors:
            setattr(params, role, _length_ref(geometry.tensors[role]))
    if "alibi_slopes" in geometry.tensors:
        params.alibi_slopes = _slope_ref(geometry.tensors["alibi_slopes"])
    for role in BIAS_ROLES:
        if role in geometry.tensors:
            spec = geometry.tensors[role]
            steps = [s if d > 1 else 0 for d, s in zip(spec.dim, spec.stride, strict=True)]
            setattr(params, role, BiasRef(0, *steps))
    return params


def address_slot(params: Params, role: str) -> ctypes.c_uint64:
    """A view of the field that holds the address of ``role``; assign its ``value``."""
    field = getattr(Params, "attn_scale_device" if role == "attn_scale" else role)
    return ctypes.c_uint64.from_buffer(params, field.offset)


def _softcap_series(geometry: Geometry) -> SoftCapSeries:
    """``cap * tanh(x * scale / cap) * log2(e)`` as ``x * (c0 + c1 x^2 + c2 x^4 + c3 x^6)``; without
    a cap, or with a scale on the device or out of float32's reach, of no number."""
    if geometry.softcap is None or "attn_scale" in geometry.tensors or not geometry.attn_scale:
        return SoftCapSeries(most=-1.0)
    slope = geometry.attn_scale / geometry.softcap
    unit = geometry.softcap * math.log2(math.e)
    terms = [c * unit * slope ** (2 * k + 1) for k, c in enumerate(_TANH)]
    if not all(2.0**-120 < abs(term) < 2.0**120 for term in terms):
        return SoftCapSeries(most=-1.0)
    return SoftCapSeries((ctypes.c_float * 4)(*terms), _TANH_REACH / abs(slope))


def _slope_ref(spec: TensorSpec) -> SlopeRef:
    """Of (H), (B, H) or (B or 1, H, 1, 1), whose strides are 0 where the size is 1 but last."""
    if len(spec.dim) == 1:
        return SlopeRef(0, 0, spec.stride[0])
    return SlopeRef(0, spec.stride[0], spec.stride[1])


def _length_ref(spec: TensorSpec) -> LengthRef:
    return LengthRef(0, spec.stride[0], spec.dtype is data_type.INT64, 0)
