"""Lengths and page tables whose numbers are known before a program runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dlattn.calls.call import cu_seqlens_check
from dlattn.jax.traced import looks_of, traced_call
from dlattn.one_call import forward
from dlattn.one_call.arguments import Options
from dlattn.plans.host import HostSequences, host_array
from dlattn.plans.pages import pages_of
from dlattn.problem import PAGE_TABLES

#: What is refused, and what else of that depends on no shape.
_REFUSED = {"cu_seqlens of q", "cu_seqlens of k and v", "block_table"}
_READ = {*_REFUSED, "lengths of q", "lengths of k and v"}


def check_known(arrays: Mapping[str, Any], options: Options, return_lse: bool) -> None:
    """Refuse what the reference engine would refuse when it runs, inside of a callback whose errors
    XLA turns into one of its own: lengths and page tables in host memory that nothing traces.

    Raises:
        InvalidArgumentError: cumulative lengths leave the tensors, or lengths their sequences.
        InvalidVariantPackError: within a length, a table has a page that there is not.
    """
    numbers = {name: x for name, x in arrays.items() if name in _READ}
    if not numbers.keys() & _REFUSED or not all(map(_is_known, numbers.values())):
        return
    looks = looks_of(forward.NAMES, arrays)
    found = traced_call("forward", looks, options, (return_lse,), "cpu").found
    if found.idle:
        return
    memory = {name: np.ascontiguousarray(x) for name, x in numbers.items()}
    pointers = {
        role: memory[name].ctypes.data
        for role, at in found.positions.items()
        if (name := forward.NAMES[at]) in memory
    }
    geometry = found.request.geometry
    check = cu_seqlens_check(geometry)
    if check is not None:
        check(pointers)
    lengths = HostSequences(geometry, pointers).len_kv
    tables = {
        role: host_array(pointers[role], geometry.tensors[role])
        for role in PAGE_TABLES.values()
        if role in pointers
    }
    for role in PAGE_TABLES:
        pages_of(role, geometry, tables, lengths)


def _is_known(x: jax.Array) -> bool:
    return (
        not isinstance(x, jax.core.Tracer)
        and x.is_fully_addressable
        and all(device.platform == "cpu" for device in x.devices())
    )
