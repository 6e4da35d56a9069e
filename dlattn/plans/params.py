"""The one argument of every kernel, mirrored from ``cuda_src/attn/params.cuh``."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from dlattn.dtypes import data_type
from dlattn.problem import PAGE_TABLES, Geometry, TensorSpec

if TYPE_CHECKING:
    from typing import Self

#: Roles that are (batch, head, row, column) tensors, in the order of the struct.
TENSOR_ROLES = (
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    *("score_max", "score_sum_exp", "sink_token", "dSink_token"),
)
LENGTH_ROLES = ("seq_len_q", "seq_len_kv")


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


class PageTableRef(ctypes.Structure):
    """Address and strides (in elements) of a page table, and what its pages are."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("offsets", ctypes.c_uint64),
        ("offsets_are_int64", ctypes.c_int32),
        ("log2_rows", ctypes.c_int32),
        ("pages", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class Params(ctypes.Structure):
    """What every kernel is given, by value."""

    _fields_ = [
        *((role, TensorRef) for role in TENSOR_ROLES),
        *((role, LengthRef) for role in LENGTH_ROLES),
        ("alibi_slopes", SlopeRef),
        ("bias", BiasRef),
        ("k_pages", PageTableRef),
        ("v_pages", PageTableRef),
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
    ]


#: Where the addresses of roles are that do not begin a field of their own name.
_FIELDS = {
    "attn_scale": ("attn_scale_device", 0),
    **{table: (f"{role}_pages", 0) for role, table in PAGE_TABLES.items()},
    **{
        f"{table}_offset": (f"{role}_pages", PageTableRef.offsets.offset)
        for role, table in PAGE_TABLES.items()
    },
}


class MappedParams(ctypes.Structure):
    """``Params``, and the tensor maps that the copy engine needs beside them; 64-byte aligned."""

    roles: ClassVar[tuple[str, ...]]
    p: Params

    @classmethod
    def aligned(cls) -> Self:
        """A zeroed instance at an address that the driver accepts for tensor maps."""
        memory = ctypes.create_string_buffer(ctypes.sizeof(cls) + 63)
        return cls.from_buffer(memory, -ctypes.addressof(memory) % 64)


def _mapped_fields(roles: tuple[str, ...]) -> list[tuple[str, type]]:
    return [
        *((role, ctypes.c_uint8 * 128) for role in roles),
        ("p", Params),
        ("unused", ctypes.c_uint8 * (-ctypes.sizeof(Params) % 64)),
    ]


class MappedFwdParams(MappedParams):
    """Of the Hopper forward."""

    roles = ("q", "k", "v", "o")
    _fields_ = _mapped_fields(roles)


class MappedBwdParams(MappedParams):
    """Of the Hopper backward."""

    roles = ("q", "k", "v", "dO", "dK", "dV")
    _fields_ = _mapped_fields(roles)


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
    if "bias" in geometry.tensors:
        bias = geometry.tensors["bias"]
        steps = [s if d > 1 else 0 for d, s in zip(bias.dim, bias.stride, strict=True)]
        params.bias = BiasRef(0, *steps)
    params.k_pages, params.v_pages = (_page_table_ref(geometry, role) for role in PAGE_TABLES)
    return params


def address_slot(params: Params, role: str) -> ctypes.c_uint64:
    """A view of the field that holds the address of ``role``; assign its ``value``."""
    name, within = _FIELDS.get(role, (role, 0))
    return ctypes.c_uint64.from_buffer(params, getattr(Params, name).offset + within)


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
    offsets = geometry.tensors.get(f"{table}_offset")
    return PageTableRef(
        batch=batch,
        page=step if offsets is None else 1,
        offsets_are_int64=offsets is not None and offsets.dtype is data_type.INT64,
        log2_rows=page.bit_length() - 1,
        pages=geometry.tensors[role].dim[0],
    )


def _length_ref(spec: TensorSpec) -> LengthRef:
    return LengthRef(0, spec.stride[0], spec.dtype is data_type.INT64, 0)
