"""The one argument of every kernel, mirrored from ``cuda_src/attn/params.cuh``."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dlattn.dtypes import data_type
from dlattn.problem import PAGE_TABLES, Geometry, TensorSpec, offset_role
from dlattn.problem.problem import SCALAR_ROLES

if TYPE_CHECKING:
    from typing import Self

#: Roles that are (batch, head, row, column) tensors, in the order of the struct.
TENSOR_ROLES = (
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    *("score_max", "score_sum_exp", "sink_token", "dSink_token", "rng_dump", "delta"),
)
LENGTH_ROLES = ("seq_len_q", "seq_len_kv")
CU_SEQLENS_ROLES = ("cu_seqlens_q", "cu_seqlens_kv")
#: Roles that are a ``BiasRef``, in the order of the struct.
BIAS_ROLES = ("bias", "dBias", "dropout_mask")

#: ``tanh(x) / x`` as a polynomial of ``x**2``, by Remez exchange: up to ``abs(x) = _TANH_REACH``
#: its relative error is 2**-23.2.
_TANH = (0.9999999019010428, -0.3333136245997891, 0.13270976773930643, -0.047553604158444555)
_TANH_REACH = 0.4


class TensorRef(ctypes.Structure):
    """Address and strides (in elements) of a tensor whose columns are contiguous; of a ragged one,
    also the address of its offsets."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("offsets", ctypes.c_uint64),
        ("has_int64_offsets", ctypes.c_int32),
        ("unused", ctypes.c_int32),
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


class IntegerRef(ctypes.Structure):
    """Address of a number on the device, or null, and then the number."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("number", ctypes.c_int64),
        ("is_int64", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class FloatRef(ctypes.Structure):
    """Address of an fp32 number on the device, or null, and then the number."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("number", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class PageTableRef(ctypes.Structure):
    """Address and strides (in elements) of a page table, and what its pages are."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("offsets", ctypes.c_uint64),
        ("has_int64_offsets", ctypes.c_int32),
        ("log2_rows", ctypes.c_int32),
        ("pages", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class SoftCapSeries(ctypes.Structure):
    """Coefficients of the odd powers of a raw product, and up to where they hold."""

    _fields_ = [
        ("of", 4 * ctypes.c_float),
        ("most", ctypes.c_float),
        ("bound", ctypes.c_float),
        ("inverse_bound", ctypes.c_float),
        ("zero", ctypes.c_uint32),
    ]


class RaggedRef(ctypes.Structure):
    """What the first kernel of a ragged problem reads, and where it writes."""

    _fields_ = [
        ("given_q", LengthRef),
        ("given_kv", LengthRef),
        *((role, ctypes.c_uint64) for role in CU_SEQLENS_ROLES),
        ("entries", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("items", ctypes.c_uint64),
        ("mapped", ctypes.c_uint64),
        ("tile_q", ctypes.c_int32),
        ("row_tiles", ctypes.c_int32),
        ("item_rows", ctypes.c_int32),
        ("items_of_keys", ctypes.c_int32),
        ("last_first", ctypes.c_int32),
        ("tokens_q", ctypes.c_int32),
        ("tokens_kv", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class PartsRef(ctypes.Structure):
    """Where blocks of a decode leave parts for each other, and how they say so."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("marks", ctypes.c_uint64),
        ("mark", ctypes.c_uint64),
    ]


class BlockMaskRef(BiasRef):
    """The same of one byte for each eight blocks of keys: (B, H, blocks of queries, bytes)."""


class Params(ctypes.Structure):
    """What every kernel is given, by value."""

    _fields_ = [
        *((role, TensorRef) for role in TENSOR_ROLES),
        *((role, LengthRef) for role in LENGTH_ROLES),
        ("alibi_slopes", SlopeRef),
        *((role, BiasRef) for role in BIAS_ROLES),
        ("dropout_seed", IntegerRef),
        ("dropout_offset", IntegerRef),
        ("dropout_scale", FloatRef),
        ("dropout_scale_inv", FloatRef),
        ("k_pages", PageTableRef),
        ("v_pages", PageTableRef),
        ("ragged", RaggedRef),
        ("block_mask", BlockMaskRef),
        ("parts", PartsRef),
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
        ("paged_rows", ctypes.c_int32),
        ("dq_lag", ctypes.c_int32),
        ("attn_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("softcap_inverse", ctypes.c_float),
        ("dropout_addend", ctypes.c_uint32),
        ("softcap_series", SoftCapSeries),
        ("debug_softmax", TensorRef),
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
        paged_rows=geometry.rows_kv,
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
        dropout_seed=_integer_ref(geometry, "dropout_seed"),
        dropout_offset=_integer_ref(geometry, "dropout_offset"),
        dropout_scale=FloatRef(0, geometry.dropout_scale, 0),
        dropout_scale_inv=FloatRef(0, geometry.dropout_scale_inv, 0),
        softcap_series=_softcap_series(geometry),
    )
    for role in (*TENSOR_ROLES, "debug_softmax"):
        if role in geometry.tensors:
            batch, head, row, _ = geometry.tensors[role].stride
            setattr(params, role, TensorRef(0, batch, head, row))
        if geometry.is_ragged(role):
            offsets = geometry.tensors.get(offset_role(role))
            # The first kernel writes those that nobody gave.
            is_int64 = offsets is None or offsets.dtype is data_type.INT64
            getattr(params, role).has_int64_offsets = is_int64
    # Cumulative lengths, of 32 bits, reach no further.
    params.ragged.tokens_q = min(geometry.most_tokens_q or 0, 2**31 - 1)
    params.ragged.tokens_kv = min(geometry.most_tokens_kv or 0, 2**31 - 1)
    for role in LENGTH_ROLES:
        if role in geometry.tensors:
            holder, field = _length_field(params, geometry, role)
            setattr(holder, field, _length_ref(geometry.tensors[role]))
    if "alibi_slopes" in geometry.tensors:
        params.alibi_slopes = _slope_ref(geometry.tensors["alibi_slopes"])
    for role in BIAS_ROLES:
        if role in geometry.tensors:
            setattr(params, role, BiasRef(0, *_broadcast_strides(geometry.tensors[role])))
    if "block_mask" in geometry.tensors:
        params.block_mask = BlockMaskRef(0, *_broadcast_strides(geometry.tensors["block_mask"]))
    params.k_pages, params.v_pages = (_page_table_ref(geometry, role) for role in PAGE_TABLES)
    return params


def address_slot(params: Params, geometry: Geometry, role: str) -> ctypes.c_uint64:
    """A view of the field that holds the address of ``role``; assign its ``value``."""
    holder, field = _field(params, geometry, role)
    return ctypes.c_uint64.from_buffer(holder, getattr(type(holder), field).offset)


def _field(params: Params, geometry: Geometry, role: str) -> tuple[ctypes.Structure, str]:
    # Dropout's offset is a number, and no tensor's.
    owner = role if role in SCALAR_ROLES else role.removesuffix(offset_role(""))
    address = "data" if owner == role else "offsets"
    if owner in PAGE_TABLES.values():
        return _page_tables(params)[owner], address
    if owner != role:
        return getattr(params, owner), address
    if role in LENGTH_ROLES:
        return _length_field(params, geometry, role)
    if role in CU_SEQLENS_ROLES:
        return params.ragged, role
    return params, "attn_scale_device" if role == "attn_scale" else role


def _page_tables(params: Params) -> dict[str, PageTableRef]:
    return {table: getattr(params, f"{role}_pages") for role, table in PAGE_TABLES.items()}


def _length_field(params: Params, geometry: Geometry, role: str) -> tuple[ctypes.Structure, str]:
    """Where lengths that the user gave are: in ragged problems, kernels read copies of them."""
    if geometry.has_ragged:
        return params.ragged, role.replace("seq_len", "given")
    return params, role


def _softcap_series(geometry: Geometry) -> SoftCapSeries:
    """``cap * tanh(x * scale / cap) * log2(e)`` as ``x * (c0 + c1 x^2 + c2 x^4 + c3 x^6)``; without
    a cap, or with a scale on the device or out of float32's reach, of no number."""
    if geometry.softcap is None:
        return SoftCapSeries()
    unit = geometry.softcap * math.log2(math.e)
    bounds = dict(zip(("bound", "inverse_bound"), _reciprocals(unit), strict=True))
    if "attn_scale" in geometry.tensors or not geometry.attn_scale:
        return SoftCapSeries(most=-1.0, **bounds)
    slope = geometry.attn_scale / geometry.softcap
    terms = [c * unit * slope ** (2 * k + 1) for k, c in enumerate(_TANH)]
    if not all(2.0**-120 < abs(term) < 2.0**120 for term in terms):
        return SoftCapSeries(most=-1.0, **bounds)
    return SoftCapSeries((ctypes.c_float * 4)(*terms), _TANH_REACH / abs(slope), **bounds)


def _reciprocals(value: float) -> tuple[np.float32, np.float32]:
    """float32 numbers next to a value and its reciprocal whose rounded product is 1."""
    near = np.float32(value)
    for number in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
        inverse = np.float32(1) / number
        for other in (inverse, np.nextafter(inverse, np.float32(np.inf))):
            if number * other == 1:
                return number, other
    return near, np.float32(1) / near


def _broadcast_strides(spec: TensorSpec) -> list[int]:
    return [step if size > 1 else 0 for size, step in zip(spec.dim, spec.stride, strict=True)]


def number_slot(params: Params, role: str) -> ctypes.c_float | ctypes.c_int64:
    """A view of the field that holds a number in place of an address; assign its ``value``."""
    if role == "attn_scale":
        return ctypes.c_float.from_buffer(params, Params.attn_scale.offset)
    ref = type(getattr(params, role))
    kind = ctypes.c_float if ref is FloatRef else ctypes.c_int64
    return kind.from_buffer(params, getattr(Params, role).offset + ref.number.offset)


def _integer_ref(geometry: Geometry, role: str) -> IntegerRef:
    spec = geometry.tensors.get(role)
    is_int64 = spec is not None and spec.dtype is data_type.INT64
    return IntegerRef(0, getattr(geometry, role), is_int64, 0)


def _slope_ref(spec: TensorSpec) -> SlopeRef:
    """Of (H), (B, H) or (B or 1, H, 1, 1), whose strides are 0 where the size is 1 but last."""
    if len(spec.dim) == 1:
        return SlopeRef(0, 0, spec.stride[0])
    return SlopeRef(0, spec.stride[0], spec.stride[1])


def _page_table_ref(geometry: Geometry, role: str) -> PageTableRef:
    page, table = geometry.page_size(role), PAGE_TABLES[role]
    if page is None:
        return PageTableRef()
    batch, _, step, _ = geometry.tensors[table].stride
    offsets = geometry.tensors.get(offset_role(table))
    return PageTableRef(
        batch=batch,
        page=step if offsets is None else 1,
        has_int64_offsets=offsets is not None and offsets.dtype is data_type.INT64,
        log2_rows=page.bit_length() - 1,
        pages=geometry.tensors[role].dim[0],
    )


def _length_ref(spec: TensorSpec) -> LengthRef:
    return LengthRef(0, spec.stride[0], spec.dtype is data_type.INT64, 0)
