"""A graph as JSON values: for people, and for keys of caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlattn.dtypes import data_type
from dlattn.graph.dropout import DropoutArgument
from dlattn.graph.nodes import AttentionNode
from dlattn.graph.tensor import Tensor, described

if TYPE_CHECKING:
    from dlattn.graph.declarations import Node


def describe(node: Node) -> dict[str, Any]:
    """A node, its arguments and its tensors."""
    if not isinstance(node, AttentionNode):
        return {
            "operation": node.operation,
            "name": node.name,
            **node.numbers,
            "compute_data_type": node.compute_data_type.name,
            "tensors": {operand: described(t) for operand, t in node.tensors.items()},
        }
    return {
        "operation": node.operation,
        "name": node.name,
        "attn_scale": node.attn_scale,
        "softcap": node.softcap,
        "use_alibi_mask": node.alibi,
        "use_padding_mask": node.padding,
        "paged_attention_max_seq_len_kv": node.max_seq_kv,
        "diagonal": vars(node.diagonal),
        "compute_data_type": node.compute_data_type.name,
        "max_total": dict(node.max_total),
        "dropout": None if node.dropout is None else _described_dropout(node.dropout),
        "use_deterministic_algorithm": node.deterministic,
        "score_mod": None if node.score_mod is None else node.score_mod.described(),
        "tensors": {role: described(t) for role, t in node.tensors.items()},
    }


def key_of(nodes: Sequence[Node], types: Mapping[str, data_type], place: str) -> int:
    """A hash of everything that execution depends on, the same in every process.

    Names do not count. Of the uids only those count that the user set, because only those are the
    same in two graphs whatever else they hold.
    """
    numbers: dict[Tensor, int] = {}
    told = []
    for node in nodes:
        it = describe(node)
        it.pop("name")
        it["tensors"] = {role: _nameless(t) for role, t in node.tensors.items()}
        # Which tensors of several nodes are the same ones.
        places = [numbers.setdefault(t, len(numbers)) for t in node.tensors.values()]
        told.append([it, places])
    types_by_name = {name: dtype.name for name, dtype in types.items()}
    text = json.dumps([told, types_by_name, place], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _described_dropout(asked: DropoutArgument) -> dict[str, Any]:
    form = None if asked.form is None else type(asked.form).__name__
    return {"p": asked.p, "form": form, **asked.numbers}


def _nameless(t: Tensor) -> dict[str, Any]:
    it = described(t)
    del it["name"], it["uid_assigned"]
    if not t.attributes.uid_from_user:
        del it["uid"]
    return it
