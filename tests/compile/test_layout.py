"""The kernels' argument has one layout in C++ and in Python."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import pytest

from dlattn.errors import CompileError
from dlattn.plans.argument import (
    MappedBwdParams,
    MappedDecodeParams,
    MappedFwdParams,
    MappedParams,
    Params,
)
from dlattn.runtime import jit


def member(field: str) -> str:
    """What a field is called in C++: numbered roles are an array's."""
    return re.sub(r"_(\d+)$", r"[\1]", field)


def structures(of: type[ctypes.Structure]) -> Iterator[type[ctypes.Structure]]:
    """A structure, and what it is made of."""
    yield of
    for _, kind in of._fields_:
        if issubclass(kind, ctypes.Structure):
            yield from structures(kind)


def asserted(of: type[ctypes.Structure]) -> Iterator[str]:
    """That a structure, and each member, is where Python has it, and as large."""
    name = of.__name__
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(of)}, "{name}");'
    for field in (named for base in reversed(of.__mro__) for named in _own_fields(base)):
        if field == "unused" and issubclass(of, MappedParams):
            continue  # what alignment leaves
        place, at = getattr(of, field), f"(({name}*)0)->{member(field)}"
        yield f'static_assert(__INTADDR__(&{at}) == {place.offset}, "{name}.{field}");'
        yield f'static_assert(sizeof({at}) == {place.size}, "size of {name}.{field}");'


def _own_fields(of: type) -> list[str]:
    return [field for field, *_ in vars(of).get("_fields_", ())]


@pytest.mark.parametrize(
    "argument, header",
    [
        (Params, "attn/params.cuh"),
        (MappedFwdParams, "kernels/fwd_sm90.cuh"),
        (MappedBwdParams, "kernels/bwd_sm90.cuh"),
        (MappedDecodeParams, "kernels/decode.cuh"),
    ],
)
def test_every_member_is_where_python_has_it(argument: type[ctypes.Structure], header: str) -> None:
    """A field more, or in another place, in one of the two would move all after it."""
    lines = [line for it in dict.fromkeys(structures(argument)) for line in asserted(it)]
    assert len(lines) > 2 * len(argument._fields_)
    compiled = "\n".join((f'#include "{header}"', "using namespace dlattn;", *lines))
    entry = 'extern "C" __global__ void dlattn_layout() {}'
    jit.compile_kernel(jit.KernelSource("dlattn_layout", f"{compiled}\n{entry}\n"), "sm_90a")


def test_a_layout_that_differs_does_not_compile() -> None:
    """The assertions can fail."""
    wrong = 'static_assert(__INTADDR__(&((Params*)0)->stats) == 8, "Params.stats");'
    text = f'#include "attn/params.cuh"\nusing namespace dlattn;\n{wrong}\n'
    with pytest.raises(CompileError, match="Params.stats"):
        jit.compile_kernel(jit.KernelSource("dlattn_layout", text), "sm_90a")
