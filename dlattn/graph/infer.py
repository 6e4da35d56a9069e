"""Completing a node: what the user left unset, and whether what was set makes sense."""

from __future__ import annotations

from dlattn.dtypes import data_type
from dlattn.errors import InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.nodes import AttentionNode
from dlattn.graph.pages import check_pages, max_seq_kv
from dlattn.graph.ragged import check_offset, check_ragged
from dlattn.graph.tensor import check_number, packed_strides
from dlattn.graph.vocabulary import tensor_reordering
from dlattn.problem import BLOCK, PAGE_TABLES, SCORE_GRADIENT_ROLES, SCORE_MOD_ROLES
from dlattn.problem.layout import overlaps
from dlattn.problem.problem import BROADCAST_ROLES, SCALAR_ROLES

_DEFAULT_TYPES = {
    "stats": data_type.FLOAT,
    "score_max": data_type.FLOAT,
    "score_sum_exp": data_type.FLOAT,
    "sink_token": data_type.FLOAT,
    "dSink_token": data_type.FLOAT,
    "attn_scale": data_type.FLOAT,
    "alibi_slopes": data_type.FLOAT,
    "block_mask": data_type.UINT8,
    "seq_len_q": data_type.INT32,
    "seq_len_kv": data_type.INT32,
    "dropout_seed": data_type.INT64,
    "dropout_offset": data_type.INT64,
    "dropout_scale": data_type.FLOAT,
    "dropout_scale_inv": data_type.FLOAT,
    "rng_dump": data_type.FLOAT,
    "paged_attention_k_table": data_type.INT32,
    "paged_attention_v_table": data_type.INT32,
}
#: Gradients of what broadcasts -> what they are of.
_BROADCAST_GRADIENTS = {
    "dBias": "bias",
    **dict(zip(SCORE_GRADIENT_ROLES, SCORE_MOD_ROLES, strict=True)),
}
_LAYOUT_FROM = {"o": "q", "dQ": "q", "dK": "k", "dV": "v", **_BROADCAST_GRADIENTS}
#: Roles whose last stride need not be 1.
_ANY_STRIDE = (*BROADCAST_ROLES, *_BROADCAST_GRADIENTS, "alibi_slopes", "block_mask")
_AXES = "(batch, heads, sequence, head dim)"
_AXES_OF = {
    "seq_len_q": "(batch, 1, 1, 1)",
    "seq_len_kv": "(batch, 1, 1, 1)",
    "sink_token": "(1, heads, 1, 1)",
    "paged_attention_k_table": "(batch, 1, pages, 1)",
    "paged_attention_v_table": "(batch, 1, pages, 1)",
}


def complete(node: AttentionNode, io_data_type: data_type) -> None:
    """Set the types, shapes and strides that the user left out, and check the others.

    Raises:
        InvalidGraphError: a shape is missing or wrong, an output has no memory, lengths without
            ``use_padding_mask``, or the reverse, or a probability of dropout outside [0, 1).
        cudnnGraphNotSupportedError: a valid wish that no plan grants: a last stride other than 1,
            heads that do not divide, reordered storage.
    """
    for t in node.tensors.values():
        t.attributes.forget_inferred()
    _refuse_storage(node)
    check_ragged(node)
    _check_lengths_are_wanted(node)
    if node.dropout is not None:
        node.dropout.check()
    for role in node.inputs:
        _check_declared(node, role)
    for role in node.offsets:
        check_offset(node, role)
    check_pages(node)
    _check_heads(node)
    for role, dim in _expected_dims(node).items():
        _settle_dim(node, role, dim)
    for role in node.outputs:
        _settle_stride(node, role)
    for role in node.tensors:
        _settle_type(node, role, io_data_type)
        _check_strides(node, role)
    for role in node.outputs:
        _check_output(node, role)


def _may_overlap(node: AttentionNode, role: str) -> bool:
    """:func:`overlaps`, within a batch entry of a ragged tensor."""
    it = node.tensors[role].attributes
    first = int(node.is_ragged(role))
    return overlaps(it.dim[first:], it.stride[first:])


def _refuse_storage(node: AttentionNode) -> None:
    for role, t in node.tensors.items():
        it = t.attributes
        if it.reordering_type is not tensor_reordering.NONE or it.vector_count != 1:
            raise cudnnGraphNotSupportedError(
                f"{node.label(role)} has reordering {it.reordering_type} and vector count "
                f"{it.vector_count}; plans read plain strided tensors only."
            )


def _check_lengths_are_wanted(node: AttentionNode) -> None:
    lengths = [role for role in ("seq_len_q", "seq_len_kv") if role in node.inputs]
    if node.padding and not lengths and not any(map(node.is_ragged, "qkv")):
        raise InvalidGraphError(
            f"{node.operation} {node.name!r} has use_padding_mask=True without seq_len_q or "
            "seq_len_kv; give at least one of them."
        )
    if lengths and not node.padding and node.score_mod is None:
        raise InvalidGraphError(
            f"{node.operation} {node.name!r} has {' and '.join(lengths)} without "
            "use_padding_mask=True, so the lengths would do nothing; set the flag or leave them "
            "out."
        )


def _check_declared(node: AttentionNode, role: str) -> None:
    it = node.inputs[role].attributes
    label = node.label(role)
    if it.is_virtual:
        raise InvalidGraphError(
            f"{label} is virtual, but no node of the graph computes it; declare it with "
            "is_virtual=False and put its memory into the variant pack."
        )
    if not it.dim or len(it.dim) != len(it.stride):
        raise InvalidGraphError(
            f"{label} needs a dim and a stride of one length; got dim {it.dim} and stride "
            f"{it.stride}."
        )
    if min(it.dim) < 1:
        raise InvalidGraphError(f"{label} has dim {it.dim}; every size must be at least 1.")
    check_number(label, it)
    if role in SCALAR_ROLES:
        if it.elements != 1:
            raise InvalidGraphError(f"{label} must have one element; got dim {it.dim}.")
    elif role == "alibi_slopes":
        _check_slopes(node, it.dim)
    elif role in BROADCAST_ROLES:
        _check_broadcasts(node, role, it.dim)
    elif role == "block_mask":
        _check_block_mask(node, it.dim)
    elif len(it.dim) != 4:
        raise InvalidGraphError(
            f"{label} must have four dimensions, {_AXES_OF.get(role, _AXES)}; got dim {it.dim}. "
            "Reshape it."
        )


def _check_slopes(node: AttentionNode, dim: tuple[int, ...]) -> None:
    batch, heads, *_ = node.inputs["q"].attributes.dim
    if dim not in {(heads,), *((b, heads, *ones) for b in (1, batch) for ones in ((), (1, 1)))}:
        raise InvalidGraphError(
            f"{node.label('alibi_slopes')} has dim {dim}; expected ({heads},), {(batch, heads)} or "
            f"{(batch, heads, 1, 1)}, where the batch may be 1, from {node.label('q')}."
        )


def _check_broadcasts(node: AttentionNode, role: str, dim: tuple[int, ...]) -> None:
    full = _scores_dim(node)
    if len(dim) != 4 or any(size not in (1, whole) for size, whole in zip(dim, full, strict=True)):
        raise InvalidGraphError(
            f"{node.label(role)} has dim {dim}; expected {full}, with 1 for any size, from "
            f"{node.label('q')} and {node.label('k')}."
        )


def _scores_dim(node: AttentionNode) -> tuple[int, ...]:
    return (*node.inputs["q"].attributes.dim[:3], max_seq_kv(node))


def _check_block_mask(node: AttentionNode, dim: tuple[int, ...]) -> None:
    batch, heads, seq_q, _ = node.inputs["q"].attributes.dim
    queries, keys = (-(-seq // BLOCK) for seq in (seq_q, max_seq_kv(node)))
    full = (batch, heads, queries, -(-keys // 8))
    if len(dim) != 4 or dim[0] not in (1, batch) or dim[1] not in (1, heads) or dim[2:] != full[2:]:
        raise InvalidGraphError(
            f"{node.label('block_mask')} has dim {dim}; expected {full}, a bit for each block of "
            f"{BLOCK} queries and {BLOCK} keys, with 1 for batch or heads, from {node.label('q')} "
            f"and {node.label('k')}."
        )


def _check_heads(node: AttentionNode) -> None:
    heads = {role: node.inputs[role].attributes.dim[1] for role in ("q", "k", "v")}
    for role in ("k", "v"):
        if heads["q"] % heads[role]:
            raise cudnnGraphNotSupportedError(
                f"{node.label(role)} has {heads[role]} heads, which do not divide the "
                f"{heads['q']} heads of {node.label('q')}; repeat or drop heads until they do."
            )


def _expected_dims(node: AttentionNode) -> dict[str, tuple[int, ...]]:
    q, k, v = (node.inputs[role].attributes.dim for role in ("q", "k", "v"))
    batch, heads, seq_q, head_dim_qk = q
    seq_kv, head_dim_v = max_seq_kv(node), v[3]
    paged_k, paged_v = (PAGE_TABLES[role] in node.inputs for role in "kv")
    dims = {
        "k": (*k[:3], head_dim_qk) if paged_k else (batch, k[1], seq_kv, head_dim_qk),
        "v": v if paged_v else (batch, v[1], seq_kv, head_dim_v),
        "o": (batch, heads, seq_q, head_dim_v),
        "dO": (batch, heads, seq_q, head_dim_v),
        "stats": (batch, heads, seq_q, 1),
        "score_max": (batch, heads, seq_q, 1),
        "score_sum_exp": (batch, heads, seq_q, 1),
        "sink_token": (1, heads, 1, 1),
        "dSink_token": (1, heads, 1, 1),
        "rng_dump": (batch, heads, seq_q, seq_kv),
        "debug_softmax": (batch, heads, -(-seq_q // 128) * 128, -(-seq_kv // 128) * 128),
        "seq_len_q": (batch, 1, 1, 1),
        "seq_len_kv": (batch, 1, 1, 1),
        "dQ": q,
        "dK": k,
        "dV": v,
    }
    if "stats" in node.inputs:
        for gradient, of in _BROADCAST_GRADIENTS.items():
            if gradient in node.outputs:
                dims[gradient] = node.inputs[of].attributes.dim
    if "debug_softmax" in node.outputs:
        exact = (batch, heads, seq_q, seq_kv)
        if node.outputs["debug_softmax"].attributes.dim == exact:
            dims["debug_softmax"] = exact
    return {role: dim for role, dim in dims.items() if role in node.tensors}


def _settle_dim(node: AttentionNode, role: str, dim: tuple[int, ...]) -> None:
    it = node.tensors[role].attributes
    if not it.dim:
        it.infer("dim", dim)
    if it.dim != dim:
        source = _BROADCAST_GRADIENTS.get(role)
        sources = ("q", "k", "v") if source is None else (source,)
        *most, last = (f"{node.label(r)} {node.inputs[r].attributes.dim}" for r in sources)
        stated = f"{', '.join(most)} and {last}" if most else last
        raise InvalidGraphError(
            f"{node.label(role)} has dim {it.dim}; expected {dim}, from {stated}."
        )


def _settle_stride(node: AttentionNode, role: str) -> None:
    it = node.outputs[role].attributes
    if it.stride:
        if len(it.stride) != len(it.dim):
            raise InvalidGraphError(
                f"{node.label(role)} has stride {it.stride} for dim {it.dim}; expected one stride "
                "per dimension."
            )
        return
    source = _LAYOUT_FROM.get(role)
    if source is None:
        # A token of a ragged tensor has its heads side by side.
        tokens = (3, 1, 2, 0) if node.is_ragged(role) else None
        it.infer("stride", packed_strides(it.dim, like=tokens))
        return
    model = node.inputs[source].attributes
    same = model.dim == it.dim and not _may_overlap(node, source)
    gradient = role != "o"
    order = model.stride
    if node.is_ragged(source):
        # Its batch stride says nothing; where the gradient is not ragged, its own does.
        order = (max(order) + 1, *order[1:])
        same = same and node.is_ragged(role)
    packed = packed_strides(it.dim, like=order)
    it.infer("stride", model.stride if gradient and same else packed)


def _settle_type(node: AttentionNode, role: str, io_data_type: data_type) -> None:
    it = node.tensors[role].attributes
    if it.dtype is not data_type.NOT_SET:
        return
    inferred = _DEFAULT_TYPES.get(role, io_data_type)
    if role in SCORE_GRADIENT_ROLES:
        inferred = node.inputs[_BROADCAST_GRADIENTS[role]].attributes.dtype
    if role in node.offsets:
        inferred = data_type.INT32
    if inferred is data_type.NOT_SET and role in node.outputs:
        inferred = node.inputs["q"].attributes.dtype
    if inferred is data_type.NOT_SET:
        raise InvalidGraphError(
            f"{node.label(role)} has no data type; set it on the tensor, or set the graph's "
            "io_data_type."
        )
    it.infer("dtype", inferred)


def _check_strides(node: AttentionNode, role: str) -> None:
    it = node.tensors[role].attributes
    first = int(node.is_ragged(role))
    sizes, steps = it.dim[first:], it.stride[first:]
    used = [step for size, step in zip(sizes, steps, strict=True) if size > 1]
    if used and min(used) < 0:
        raise InvalidGraphError(
            f"{node.label(role)} has the negative stride {min(used)}; plans read forwards only, so "
            "flip the tensor into new memory."
        )
    if role not in _ANY_STRIDE and it.dim[-1] > 1 and it.stride[-1] != 1:
        raise cudnnGraphNotSupportedError(
            f"{node.label(role)} has stride {it.stride}; its last stride must be 1, so that heads "
            "are contiguous. Make the tensor contiguous along its head dim."
        )
    if role.startswith("seq_len") and it.dim[0] > 1 and it.stride[0] != 1:
        raise cudnnGraphNotSupportedError(
            f"{node.label(role)} has stride {it.stride}; lengths must be contiguous over the batch."
        )


def _check_output(node: AttentionNode, role: str) -> None:
    it = node.outputs[role].attributes
    if it.is_virtual:
        if role == "stats":
            return
        raise InvalidGraphError(
            f"{node.label(role)} is virtual, but {node.operation} writes it to memory; call "
            "set_output(True) on it."
        )
    if _may_overlap(node, role):
        raise InvalidGraphError(
            f"{node.label(role)} is an output with dim {it.dim} and stride {it.stride}, in which "
            "elements may share an address; give it strides without overlap."
        )
