"""A graph as JSON values: for people, and for keys of caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dlattn.dtypes import data_type
from dlattn.graph.nodes import AttentionNode
from dlattn.graph.tensor import Tensor, described


def describe(node: AttentionNode) -> dict[str, Any]:
    """A node, its arguments and its tensors."""
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
        "not_supported": list(node.not_supported),
        "tensors": {role: described(t) for role, t in node.tensors.items()},
    }


def key_of(node: AttentionNode, types: Mapping[str, data_type], place: str) -> int:
    """A hash of everything that execution depends on, the same in every process.

    Names do not count. Of the uids only those count that the user set, because only those are the
    same in two graphs whatever else they hold.
    """
    it = describe(node)
    it.pop("name")
    it["tensors"] = {role: _nameless(t) for role, t in node.tensors.items()}
    types_by_name = {name: dtype.name for name, dtype in types.items()}
    text = json.dumps([it, types_by_name, place], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _nameless(t: Tensor) -> dict[str, Any]:
    it = described(t)
    del it["name"], it["uid_assigned"]
    if not t.attributes.uid_from_user:
        del it["uid"]
    return it
