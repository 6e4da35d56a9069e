"""The one argument of every kernel, mirrored from ``cuda_src/attn/params.cuh``."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from dlattn.problem import SCORE_GRADIENT_ROLES, SCORE_MOD_ROLES

if TYPE_CHECKING:
    from typing import Self

#: Roles that are (batch, head, row, column) tensors, in the order of the struct.
TENSOR_ROLES = (
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    *("score_max", "score_sum_exp", "sink_token", "dSink_token", "rng_dump", "delta"),
    "dStats",
)
LENGTH_ROLES = ("seq_len_q", "seq_len_kv")
CU_SEQLENS_ROLES = ("cu_seqlens_q", "cu_seqlens_kv")
#: Roles that are a ``BiasRef``, in the order of the struct.
BIAS_ROLES = ("bias", "dBias", "dropout_mask")


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
        ("few", 3 * ctypes.c_float),
        ("few_below", ctypes.c_float),
        ("bound", ctypes.c_float),
        ("inverse_bound", ctypes.c_float),
        ("zero", ctypes.c_uint32),
    ]


class Divisor(ctypes.Structure):
    """What numbers below 2**31 are divided by: as a factor, and a shift of the product."""

    _fields_ = [
        ("number", ctypes.c_int32),
        ("factor", ctypes.c_uint32),
        ("shift", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, number: int) -> Self:
        """A positive number."""
        shift = 31 + (number - 1).bit_length()
        return cls(number, -(-(1 << shift) // number), shift)


class RaggedRef(ctypes.Structure):
    """What the first kernel of a ragged problem reads, and where it writes."""

    _fields_ = [
        ("given_q", LengthRef),
        ("given_kv", LengthRef),
        *((role, ctypes.c_uint64) for role in CU_SEQLENS_ROLES),
        ("entries", ctypes.c_uint64),
        ("bundles", ctypes.c_uint64),
        ("items", ctypes.c_uint64),
        ("mapped", ctypes.c_uint64),
        ("tile_q", Divisor),
        ("item_rows", Divisor),
        ("groups", Divisor),
        ("wave", Divisor),
        ("row_tiles", ctypes.c_int32),
        ("items_of_keys", ctypes.c_int32),
        ("last_first", ctypes.c_int32),
        ("tokens_q", ctypes.c_int32),
        ("tokens_kv", ctypes.c_int32),
        ("key_tiles", ctypes.c_int32),
    ]


class PartsRef(ctypes.Structure):
    """Where blocks leave parts for each other, or for a later kernel, and how they say so."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("marks", ctypes.c_uint64),
        ("mark", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
    ]


class ItemsRef(ctypes.Structure):
    """How items are numbered: of pairs of a batch entry and a head, or a group of heads, so many
    at a time."""

    _fields_ = [
        ("of_wave", Divisor),
        ("pairs", Divisor),
        ("last_pairs", Divisor),
        ("heads", Divisor),
        ("parts", Divisor),
    ]

    @classmethod
    def of(cls, *, tiles: int, heads: int, pairs: int, wave: int) -> Self:
        """Of each pair so many tiles.

        Args:
            heads: of a batch entry, or groups of them.
            wave: how many pairs are taken at a time; no more than there are.
        """
        numbers = tiles * wave, wave, pairs % wave or wave, heads, 1
        return cls(*map(Divisor.of, numbers))


class SharesRef(ctypes.Structure):
    """Where the sums of dQ of a backward are, and how those of a Hopper backward are shared out."""

    _fields_ = [
        ("places", Divisor),
        ("query_tiles", Divisor),
        ("tiles", ctypes.c_int32),
        ("lone_parts", Divisor),
    ]


class TileHeadsRef(ctypes.Structure):
    """Which heads share query tiles of a Hopper forward."""

    _fields_ = [
        ("tiles", Divisor),
        ("of_keys", Divisor),
        ("together", Divisor),
        ("beside", Divisor),
    ]


class BlockMaskRef(BiasRef):
    """The same of one byte for each eight blocks of keys: (B, H, blocks of queries, bytes)."""


class TileOrderRef(ctypes.Structure):
    """In which order query tiles are handed out: where an entry's begin, in elements."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int32),
        ("head", ctypes.c_int32),
    )


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
        ("tile_order", TileOrderRef),
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
        ("heads_per_k", Divisor),
        ("heads_per_v", Divisor),
        ("heads_per_block", Divisor),
        ("items", ItemsRef),
        ("band_left", ctypes.c_int32),
        ("band_right", ctypes.c_int32),
        ("bottom_right", ctypes.c_int32),
        ("dq_places", ctypes.c_int32),
        ("paged_rows", ctypes.c_int32),
        ("dq_lag", ctypes.c_int32),
        ("attn_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("softcap_inverse", ctypes.c_float),
        ("dropout_addend", ctypes.c_uint32),
        ("softcap_series", SoftCapSeries),
        ("debug_softmax", TensorRef),
        *((role, BiasRef) for role in SCORE_MOD_ROLES),
        ("given_block_mask", BlockMaskRef),
        ("whole_blocks", ctypes.c_uint64),
        *((role, BiasRef) for role in SCORE_GRADIENT_ROLES),
        ("dbias_parts", ctypes.c_uint64),
        ("dbias_arrivals", ctypes.c_uint64),
        ("key_sums", ctypes.c_uint64),
        ("whole_items", ctypes.c_int32),
        ("lone_shares", ctypes.c_int32),
        ("shares", SharesRef),
        ("log2_head_rows", ctypes.c_int32),
        ("parts_per_tile", ctypes.c_int32),
        ("tile_heads", TileHeadsRef),
        ("dq_additions", ctypes.c_uint64),
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


def _mapped_fields(
    required: tuple[str, ...], optional: tuple[str, ...] = MappedParams.optional
) -> list[tuple[str, type]]:
    return [
        *((role, ctypes.c_uint8 * 128) for role in (*required, *optional)),
        ("p", Params),
        ("unused", ctypes.c_uint8 * (-ctypes.sizeof(Params) % 64)),
    ]


class MappedFwdParams(MappedParams):
    """Of the Hopper forward."""

    required = ("q", "k", "v", "o")
    _fields_ = _mapped_fields(required)


class MappedBwdParams(MappedParams):
    """Of the Hopper backward."""

    required = ("q", "k", "v", "dO")
    _fields_ = _mapped_fields(required)


class MappedDecodeParams(MappedParams):
    """Of the decode, whose maps are used where the copy engine brings keys and values."""

    required = ("k", "v")
    optional = ()
    _fields_ = _mapped_fields(required, optional)
