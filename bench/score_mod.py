"""Functions of scores beside FlexAttention's: ``python -m bench.score_mod``.

A soft cap and slopes, causal, of 4 x 16 heads of 128 and 4096 rows in bf16, forward and backward.
Prints milliseconds of each contender, interleaved in one process, and how many times as fast dlattn
is; outputs and gradients are compared first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dlattn
from bench.timing import interleaved

BATCH, HEADS, ROWS, HEAD_DIM = 4, 16, 4096, 128
CAP = 30.0
#: What the largest difference may be, of the largest element.
TOLERANCE = 0.03

Pass = Callable[[], list[Any]]


def functions(slopes: Any) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Each function twice: as FlexAttention's, and as dlattn's, of the tensor of slopes."""
    import torch

    def soft_cap(graph: Any, score: Any, _: Any) -> Any:
        cap = graph.tensor_scalar(CAP)
        return graph.mul(graph.tanh(graph.div(score, cap)), cap)

    def alibi(graph: Any, score: Any, of_head: Any) -> Any:
        query, key = (graph.gen_index(score, axis=axis) for axis in (2, 3))
        return graph.add(score, graph.mul(graph.sub(key, query), of_head))

    return {
        "soft cap": (lambda score, b, h, q, k: CAP * torch.tanh(score / CAP), soft_cap),
        "slopes": (lambda score, b, h, q, k: score + slopes[h] * (k - q), alibi),
    }


def ours(
    function: Callable[..., Any], read: list[Any], tensors: list[Any], **arguments: Any
) -> tuple[Pass, Pass]:
    """The forward and the backward of (q, k, v, dO); their results are o, then dQ, dK and dV.

    Args:
        function: of a graph, the score, and the tensors that it reads.
        read: these.
        arguments: others of the attention.
    """
    import torch

    q, k, v, d_o = tensors
    o, stats = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device=q.device)
    passes = []
    for inputs, made, operation in (
        ([q, k, v], [o, stats], "sdpa"),
        ([q, k, v, o, d_o, stats], [torch.empty_like(q) for _ in range(3)], "sdpa_backward"),
    ):
        graph = dlattn.pygraph(
            io_data_type=dlattn.data_type.BFLOAT16,
            intermediate_data_type=dlattn.data_type.FLOAT,
            compute_data_type=dlattn.data_type.FLOAT,
        )
        given = [graph.tensor_like(x) for x in inputs]
        extra = [graph.tensor_like(x) for x in read]
        more = {"generate_stats": True} if operation == "sdpa" else {}
        outputs = getattr(graph, operation)(
            *given,
            attn_scale=q.shape[3] ** -0.5,
            score_mod=lambda sub, score, extra=extra: function(sub, score, *extra),
            **arguments,
            **more,
        )
        for t, x in zip(outputs, made, strict=True):
            t.set_output(True).set_dim(x.shape).set_stride(x.stride())
            if x is stats:
                t.set_data_type(dlattn.data_type.FLOAT)
        graph.build()
        pack = dict(zip((*given, *extra, *outputs), (*inputs, *read, *made), strict=True))
        workspace = torch.empty(graph.get_workspace_size(), device=q.device, dtype=torch.uint8)

        def run(
            graph: Any = graph, pack: Any = pack, workspace: Any = workspace, made: Any = made
        ) -> list[Any]:
            graph.execute(pack, workspace)
            return [x for x in made if x is not stats]

        run()
        passes.append(run)
    return passes[0], passes[1]


def flex(function: Callable[..., Any], tensors: list[Any]) -> tuple[Pass, Pass]:
    """The same by FlexAttention, compiled, with its block mask of the diagonal."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    *inputs, d_o = tensors
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, ROWS, ROWS, device="cuda")
    compiled = torch.compile(flex_attention)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = compiled(*leaves, score_mod=function, block_mask=blocks)
    return (
        lambda: [compiled(*inputs, score_mod=function, block_mask=blocks)],
        lambda: list(torch.autograd.grad(out, leaves, d_o, retain_graph=True)),
    )


def main() -> None:
    import torch

    torch.manual_seed(0)
    tensors = [
        torch.randn(BATCH, HEADS, ROWS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1, device="cuda") / HEADS)
    for name, (theirs, own) in functions(slopes).items():
        of_heads = slopes.view(1, HEADS, 1, 1)
        passes = ours(own, [of_heads], tensors, use_causal_mask=True)
        contenders = zip(passes, flex(theirs, tensors), strict=True)
        for direction, (mine, other) in zip(("forward", "backward"), contenders, strict=True):
            for x, y in zip(mine(), other(), strict=True):
                assert (x - y).abs().max() <= TOLERANCE * y.abs().max(), f"{name}: results differ"
            times = interleaved({"dlattn": mine, "FlexAttention": other})
            said = ", ".join(f"{who} {time:.3f} ms" for who, time in times.items())
            print(f"{name}, {direction}: {said}, {times['FlexAttention'] / times['dlattn']:.2f}x")


if __name__ == "__main__":
    main()
