"""Ragged tensors: packed sequences, each at an offset of its own (cuDNN's THD layouts)."""

from __future__ import annotations

from dlattn.errors import InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.nodes import AttentionNode
from dlattn.problem import PAGE_TABLES, QUERY_ROLES, RAGGED_ROLES

#: Which argument holds the lengths, and else which tensors' offsets tell them.
_SOURCES = {"seq_len_q": ("q",), "seq_len_kv": ("k", "v")}

#: Graphs do not give away delta.
_ROLES = tuple(role for role in RAGGED_ROLES if role not in ("delta", "dStats"))


def has_ragged(node: AttentionNode) -> bool:
    """Whether some tensor of the node is ragged."""
    return any(map(node.is_ragged, _ROLES))


def knows_lengths(node: AttentionNode, lengths: str) -> bool:
    """Whether ``"seq_len_q"`` or ``"seq_len_kv"`` is given, or offsets tell it. Lengths without
    ``use_padding_mask``, which are there for a function of scores to read, tell nothing."""
    given = node.padding and lengths in node.inputs
    return given or any(map(node.is_ragged, _SOURCES[lengths]))


def check_ragged(node: AttentionNode) -> None:
    """Check which tensors have ragged offsets, and that the lengths of their sequences are known.

    Raises:
        InvalidGraphError: nothing says how long the sequences of a ragged tensor are, or its
            tokens share memory.
        cudnnGraphNotSupportedError: a tensor that cannot be ragged, or ``max_total_seq_len_*``
            without ragged tensors.
    """
    for role, t in {**node.inputs, **node.outputs}.items():
        may_have_one = role in RAGGED_ROLES or role in PAGE_TABLES.values()
        if t.attributes.ragged_offset is not None and not may_have_one:
            raise cudnnGraphNotSupportedError(
                f"{node.label(role)} has a ragged offset; {', '.join(_ROLES)} and page tables may "
                "have one. Leave it out."
            )
    for argument in node.max_total:
        if not has_ragged(node):
            raise cudnnGraphNotSupportedError(
                f"{node.operation} {node.name!r} was given {argument} without a ragged tensor; "
                "leave it out, or call set_ragged_offset() on the packed tensors."
            )
    for role in _ROLES:
        if node.is_ragged(role):
            _check_tokens(node, role)


def _check_tokens(node: AttentionNode, role: str) -> None:
    it = node.tensors[role].attributes
    if len(it.dim) == 4 and it.dim[2] > 1 and it.stride and it.stride[2] == 0:
        raise InvalidGraphError(
            f"{node.label(role)} has a ragged offset and stride {it.stride}; the stride of its "
            "tokens must be at least 1."
        )
    lengths = "seq_len_q" if role in QUERY_ROLES else "seq_len_kv"
    if knows_lengths(node, lengths):
        return
    raise InvalidGraphError(
        f"{node.label(role)} has a ragged offset, but nothing says how long its sequences are; "
        f"give use_padding_mask=True and {lengths}, or {' or '.join(_SOURCES[lengths])} a ragged "
        "offset too."
    )


def check_offset(node: AttentionNode, role: str) -> None:
    """Check the declaration of a ragged offset.

    Raises:
        InvalidGraphError: it is virtual, passed by value, ragged itself, or of another shape than
            (B + 1, 1, 1, 1) without gaps.
    """
    t = node.offsets[role]
    it, label = t.attributes, node.label(role)
    dim = (node.inputs["q"].attributes.dim[0] + 1, 1, 1, 1)
    if it.is_virtual or it.is_pass_by_value or it.ragged_offset is not None:
        raise InvalidGraphError(
            f"{label} is a ragged offset; it must be a tensor in memory, neither virtual, nor "
            "passed by value, nor ragged itself."
        )
    if any(other is t for other in node.outputs.values()):
        raise InvalidGraphError(f"{label} is a ragged offset and an output; give each its own.")
    if it.dim != dim or len(it.stride) != len(dim) or it.stride[0] != 1:
        raise InvalidGraphError(
            f"{label} is a ragged offset with dim {it.dim} and stride {it.stride}; expected dim "
            f"{dim}, (batch + 1, 1, 1, 1), and a first stride of 1."
        )


def allocation_model(role: str) -> str:
    """The input whose buffer tells how many tokens a ragged output has room for."""
    return "q" if role in QUERY_ROLES else {"dK": "k"}.get(role, "v")
