"""Paged keys and values: what tables and containers say together."""

from __future__ import annotations

from dlattn.errors import InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.nodes import AttentionNode
from dlattn.problem import PAGE_TABLES, offset_role


def is_paged(node: AttentionNode) -> bool:
    """Whether k or v lies in pages."""
    return bool(_tables(node))


def max_seq_kv(node: AttentionNode) -> int:
    """The longest sequence of keys, Skv.

    Where k or v is paged, in cuDNN's order: as given; of the one that is not paged; of a bias; what
    the tables have pages for.
    """
    dims = {role: t.attributes.dim for role, t in node.inputs.items()}
    for role in PAGE_TABLES:
        if PAGE_TABLES[role] not in dims:
            return dims[role][2]
    if node.max_seq_kv is not None:
        return node.max_seq_kv
    bias = dims.get("bias", ())
    if len(bias) == 4 and bias[3] > 1:
        return bias[3]
    return min(dims[table][2] * dims[role][2] for role, table in PAGE_TABLES.items())


def check_pages(node: AttentionNode) -> None:
    """Check tables and containers against each other and the longest sequence.

    Raises:
        InvalidGraphError: a table has a wrong shape, what is paged is ragged,
            or ``paged_attention_max_seq_len_kv`` contradicts a tensor.
        cudnnGraphNotSupportedError: a page of some other size than a power of two.
    """
    tables = _tables(node)
    _check_max_seq_len(node, tables)
    for role, table in tables.items():
        _check_is_not_ragged(node, role, table)
        page = node.inputs[role].attributes.dim[2]
        if page & (page - 1):
            raise cudnnGraphNotSupportedError(
                f"{node.label(role)} has pages of {page} rows, from dim "
                f"{node.inputs[role].attributes.dim}; plans take pages of a power of two."
            )
        _check_table(node, table, page)


def _tables(node: AttentionNode) -> dict[str, str]:
    """What is paged -> the role of its table."""
    return {role: table for role, table in PAGE_TABLES.items() if table in node.inputs}


def _check_max_seq_len(node: AttentionNode, tables: dict[str, str]) -> None:
    given = node.max_seq_kv
    if given is None:
        return
    if not tables:
        raise InvalidGraphError(
            f"{node.operation} {node.name!r} has paged_attention_max_seq_len_kv={given} without "
            "paged_attention_k_table or paged_attention_v_table; leave it out."
        )
    if given != max_seq_kv(node):
        (dense,) = PAGE_TABLES.keys() - tables.keys()
        raise InvalidGraphError(
            f"{node.operation} {node.name!r} has paged_attention_max_seq_len_kv={given}, but "
            f"{node.label(dense)}, which is not paged, has {max_seq_kv(node)} rows; give that, or "
            "leave it out."
        )


def _check_is_not_ragged(node: AttentionNode, role: str, table: str) -> None:
    for paged in (role, f"d{role.upper()}"):
        if node.is_ragged(paged):
            raise InvalidGraphError(
                f"{node.label(paged)} has a ragged offset, and lies in pages, because there is "
                f"{node.label(table)}; a tensor is one or the other: leave out its ragged offset, "
                f"or {table}."
            )


def _check_table(node: AttentionNode, table: str, page: int) -> None:
    it, batch = node.inputs[table].attributes, node.inputs["q"].attributes.dim[0]
    dim = it.dim
    pages = -(-max_seq_kv(node) // page)
    if dim[:2] != (batch, 1) or dim[2] < pages or dim[3] != 1:
        raise InvalidGraphError(
            f"{node.label(table)} has dim {dim}; expected {(batch, 1, pages, 1)} or wider, for "
            f"{max_seq_kv(node)} rows in pages of {page}."
        )
    if offset_role(table) in node.offsets and dim[2] > 1 and it.stride[2] != 1:
        raise cudnnGraphNotSupportedError(
            f"{node.label(table)} is packed and has stride {it.stride}; its entries must be "
            "contiguous, with 1 as the stride of pages."
        )
