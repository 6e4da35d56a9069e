"""What a geometry says of the argument of every kernel, and where addresses go in it."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from dlattn.dtypes import data_type
from dlattn.plans.argument import (
    BIAS_ROLES,
    CU_SEQLENS_ROLES,
    LENGTH_ROLES,
    TENSOR_ROLES,
    BiasRef,
    BlockMaskRef,
    Divisor,
    FloatRef,
    IntegerRef,
    ItemsRef,
    LengthRef,
    PageTableRef,
    Params,
    SlopeRef,
    SoftCapSeries,
    TensorRef,
)
from dlattn.problem import (
    PAGE_TABLES,
    SCORE_GRADIENT_ROLES,
    SCORE_MOD_ROLES,
    Geometry,
    Read,
    TensorSpec,
    offset_role,
)
from dlattn.problem.lines import Kind
from dlattn.problem.problem import SCALAR_ROLES

#: ``tanh(x) / x`` as a polynomial of ``x**2``, by Remez exchange: up to ``abs(x) = _TANH_REACH``
#: its relative error is 2**-23.2.
_TANH = (0.9999999019010428, -0.3333136245997891, 0.13270976773930643, -0.047553604158444555)
_TANH_REACH = 0.4
#: Up to there a term fewer has an error of 2**-20.6.
_TANH_FEW_REACH = 0.27

#: More than a tile has queries, or keys.
_FARTHER_THAN_TILES = 2**12


def params_for(geometry: Geometry) -> Params:
    """A ``Params`` with every size, stride and scalar set, and every address null."""
    params = Params(
        batch=geometry.batch,
        heads_q=geometry.heads_q,
        seq_q=geometry.seq_q,
        seq_kv=geometry.seq_kv,
        paged_rows=geometry.rows_kv,
        heads_per_k=Divisor.of(geometry.heads_q // geometry.heads_k),
        heads_per_v=Divisor.of(geometry.heads_q // geometry.heads_v),
        heads_per_block=Divisor.of(1),
        items=ItemsRef(pairs=Divisor.of(1)),
        **_band(geometry),
        bottom_right=geometry.bottom_right,
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
    for role in (*BIAS_ROLES, *SCORE_MOD_ROLES, *SCORE_GRADIENT_ROLES):
        if role in geometry.tensors:
            setattr(params, role, BiasRef(0, *_broadcast_strides(geometry.tensors[role])))
    if "block_mask" in geometry.tensors:
        params.block_mask = BlockMaskRef(0, *_broadcast_strides(geometry.tensors["block_mask"]))
    params.k_pages, params.v_pages = (_page_table_ref(geometry, role) for role in PAGE_TABLES)
    return params


def _band(geometry: Geometry) -> dict[str, int]:
    """Bounds of the diagonal band. Where no query has a key, no tile of queries sees one, and no
    tile of keys a query: by the bounds as they are, ends of large tiles would, and those of small
    ones not, so that who counts additions to dQ would wait for another number than items make."""
    left, right = geometry.band_left, geometry.band_right
    if left is not None and right is not None and left + right <= 0:
        left = right = -_FARTHER_THAN_TILES
    return {"band_left": left or 0, "band_right": right or 0}


def address_slot(params: Params, geometry: Geometry, role: str) -> ctypes.c_uint64:
    """A view of the field that holds the address of ``role``; assign its ``value``."""
    return _slot(*_field(params, geometry, role))


#: A view of a field that holds an address, and how far that is from where scratch memory begins.
Place = tuple[ctypes.c_uint64, int]


def drawn_mark() -> int:
    """What memory that nobody clears does not hold by chance: 64 bits, not all of them 0."""
    return int.from_bytes(os.urandom(8), "little") | 1


def places_of(arrays: Iterable[tuple[ctypes.Structure, str, int]]) -> list[Place]:
    """Of arrays in scratch memory, one behind the other.

    Args:
        arrays: of each the struct and its field that hold the address, and the bytes.
    """
    places, begin = [], 0
    for holder, field, nbytes in arrays:
        places.append((_slot(holder, field), begin))
        begin += nbytes
    return places


def _slot(holder: ctypes.Structure, field: str) -> ctypes.c_uint64:
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
    few, below = few_terms(slope)
    return SoftCapSeries(
        (ctypes.c_float * 4)(*terms),
        _TANH_REACH / abs(slope),
        (ctypes.c_float * 3)(*(c * unit * slope for c in few)),
        below,
        **bounds,
    )


def few_terms(slope: float) -> tuple[list[float], float]:
    """``tanh(x * slope) / (x * slope)`` as a polynomial of ``x**2 + below``, for ``x**2`` below
    that power of two, which is as great as ``_TANH_FEW_REACH`` lets it be: a fit at Chebyshev's
    nodes, after which relative errors are nearly as small as can be."""
    below = 2.0 ** math.floor(2 * math.log2(_TANH_FEW_REACH / abs(slope)))
    squares = below * (1 - np.cos(np.pi * (np.arange(12) + 0.5) / 12)) / 2
    angles = np.sqrt(squares) * abs(slope)
    columns = [(1 + squares / below) ** k * angles / np.tanh(angles) for k in range(3)]
    terms, *_ = np.linalg.lstsq(np.stack(columns, 1), np.ones(12), rcond=None)
    return [float(term) / below**k for k, term in enumerate(terms)], below


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


def number_slot(params: Params, geometry: Geometry, role: str) -> ctypes.c_float | ctypes.c_int64:
    """A view of the field that holds a number in place of an address; assign its ``value``."""
    if role == "attn_scale":
        return ctypes.c_float.from_buffer(params, Params.attn_scale.offset)
    if role in SCORE_MOD_ROLES:
        whole = Read(geometry.tensors[role].dtype).kind is not Kind.FLOAT
        place = ctypes.c_int64 if whole else ctypes.c_float
        return place.from_buffer(params, getattr(Params, role).offset)
    ref = type(getattr(params, role))
    kind = ctypes.c_float if ref is FloatRef else ctypes.c_int64
    return kind.from_buffer(params, getattr(Params, role).offset + ref.number.offset)


def number_at(address: int, dtype: np.dtype[Any]) -> Any:
    """A number in host memory."""
    return np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0].item()


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
