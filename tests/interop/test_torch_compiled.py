"""Functions and graphs that are no operators, in what ``torch.compile`` compiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn import flash  # noqa: E402
from dlattn.torch import attention  # noqa: E402

B, S, H, D = 2, 40, 4, 16


def random(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(dtype: Any) -> list[Any]:
    return [random(B, S, H, D, dtype=dtype, seed=seed) for seed in range(3)]


SLOPES, BIAS, LENGTHS = torch.ones(H), torch.ones(S, S), torch.tensor([3, S])
STARTS = torch.tensor([0, S, B * S], dtype=torch.int32)


def packed(q: Any, k: Any, v: Any) -> Any:
    tokens = (x.flatten(0, 1) for x in (q, k, v))
    return flash.mha_varlen_fwd(*tokens, None, STARTS, STARTS, None, None, SLOPES, S, S)[0]


def cached(q: Any, k: Any, v: Any) -> Any:
    caches, new = (k.clone(), v.clone()), q[:, :1] * 1
    return flash.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=LENGTHS - 1)


def differentiated(q: Any, k: Any, v: Any) -> Any:
    out, lse = dlattn.attention(q, k, v, return_lse=True)
    return dlattn.attention_backward(q, q, k, v, out, lse)[0]


def merged(q: Any, k: Any, v: Any) -> Any:
    states = [dlattn.attention(q, x, v, return_lse=True) for x in (k, v)]
    return dlattn.merge_states(*states[0], *states[1])[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "plain": dlattn.attention,
    "softcap": partial(dlattn.attention, softcap=3.0),
    "bias": partial(dlattn.attention, bias=BIAS),
    "mask": partial(dlattn.attention, bias=BIAS.tril().bool()),
    "slopes": partial(dlattn.attention, alibi_slopes=SLOPES),
    "lengths": partial(dlattn.attention, lengths=LENGTHS),
    "backward": differentiated,
    "merged": merged,
}
FLASH: dict[str, Callable[..., Any]] = {
    "mha_fwd": lambda *x: flash.mha_fwd(*x, softcap=3.0)[0],
    "mha_varlen_fwd": packed,
    "flash_attn_with_kvcache": cached,
}
CASES = [
    *(
        (function, dtype)
        for function in FUNCTIONS.values()
        for dtype in (torch.float32, torch.half)
    ),
    *((function, torch.bfloat16) for function in FLASH.values()),
]
NAMES = [*(f"{name}-{bits}" for name in FUNCTIONS for bits in (32, 16)), *FLASH]


def check(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    """The graphs of a compiled program around a function, which gives what it gives eagerly."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(q: Any, k: Any, v: Any) -> Any:
        return function(q * 2, k, v) + 1

    torch._dynamo.reset()
    compiled, wanted = torch.compile(program, backend=backend), program(*inputs)
    for _ in range(3):
        torch.testing.assert_close(compiled(*inputs), wanted, rtol=0, atol=0)
    return graphs


@pytest.mark.parametrize(("function", "dtype"), CASES, ids=NAMES)
def test_functions(function: Callable[..., Any], dtype: Any) -> None:
    """The numbers are those of the same program uncompiled, in every call."""
    graphs = check(function, rows(dtype))
    if isinstance(function, partial) or function is dlattn.attention:
        assert len(graphs) == 2  # what is before it, and what is behind


def test_graphs() -> None:
    """A ``Graph``, and a ``pygraph`` that is executed, end a graph of PyTorch's once."""
    half, types = dlattn.data_type.HALF, dlattn.data_type.FLOAT
    q, k, v = (x.transpose(1, 2) for x in rows(torch.half))
    with dlattn.Graph(
        io_data_type=half, intermediate_data_type=types, compute_data_type=types,
        inputs=["sdpa::q", "sdpa::k", "sdpa::v"], outputs=["sdpa::O"],
    ) as graph:  # fmt: skip
        o, _ = graph.sdpa(q=q, k=k, v=v, is_inference=True, attn_scale=0.25, name="sdpa")
        o.set_output(True)
    assert len(check(graph, [q, k, v])) == 2

    declared = dlattn.pygraph(
        io_data_type=half, intermediate_data_type=types, compute_data_type=types
    )
    tensors = [declared.tensor_like(x) for x in (q, k, v)]
    o, _ = declared.sdpa(*tensors, is_inference=True, attn_scale=0.25)
    o.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
    declared.build()
    workspace = torch.empty(declared.get_workspace_size(), dtype=torch.uint8)

    def execute(*given: Any) -> Any:
        out = torch.empty_like(given[0])
        declared.execute({**dict(zip(tensors, given, strict=True)), o: out}, workspace)
        return out

    check(execute, [q, k, v])


def test_operators_stay_in_one_graph() -> None:
    """What is marked is none of what ``dlattn.torch`` calls while PyTorch traces."""
    assert len(check(attention, rows(torch.float32))) == 1


def test_whole_graphs_name_the_way_out() -> None:
    """Where a break is an error, the error names the operators."""
    torch._dynamo.reset()
    whole = torch.compile(lambda *x: dlattn.attention(*x), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"those of dlattn\.torch are"):
        whole(*rows(torch.float32))


@pytest.mark.parametrize("first", ["dlattn", "torch"])
def test_first_calls_that_are_compiled(first: str) -> None:
    """In a fresh process, whichever library was there first, and again after a reset."""
    program = f"""
import {first}
from dlattn import attention
import torch
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 40, 4, 16)
slopes = torch.ones(4)
def run(q, k, v):
    return attention(q * 2, k, v, alibi_slopes=slopes) + 1
compiled = torch.compile(run, backend="eager")
found = [compiled(q, k, v) for _ in range(3)]
torch._dynamo.reset()
found += [compiled(q, k, v) for _ in range(3)]
assert all(torch.equal(x, run(q, k, v)) for x in found)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
