"""Documents as a score_mod beside the ragged form: ``python -m bench.documents``.

16 documents in 16384 tokens, 16 heads of 128 in bf16, forward and backward; of one length, which
blocks of 128 divide, then of others. Prints milliseconds of each, interleaved in one process, and
how many times the ragged form's time the function takes; outputs and gradients are compared first.
"""

from __future__ import annotations

from typing import Any

from bench.score_mod import TOLERANCE, Pass, ours
from bench.timing import interleaved

TOKENS, DOCUMENTS, HEADS, HEAD_DIM = 16384, 16, 16, 128


def same_document(graph: Any, score: Any, of_query: Any, of_key: Any) -> Any:
    """Attention inside documents."""
    same = graph.cmp_eq(of_query, of_key)
    return graph.binary_select(score, graph.tensor_scalar(float("-inf")), same)


def ragged(tensors: list[Any], lengths: Any) -> tuple[Pass, Pass]:
    """The same as a ragged batch, by FlashAttention's functions."""
    import torch

    from dlattn.flash import mha_varlen_bwd, mha_varlen_fwd

    q, k, v, d_o = (x[0].transpose(0, 1) for x in tensors)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).cuda()
    longest, scale = int(lengths.max()), HEAD_DIM**-0.5
    out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))

    def attend() -> Any:
        return mha_varlen_fwd(
            q, k, v, out, ends, ends, None, None, None, longest, longest, softmax_scale=scale
        )[1]

    lse = attend()

    def forward() -> list[Any]:
        attend()
        return [out.transpose(0, 1)[None]]

    def backward() -> list[Any]:
        mha_varlen_bwd(
            d_o, q, k, v, out, lse, dq, dk, dv, ends, ends, None, longest, longest,
            softmax_scale=scale,
        )  # fmt: skip
        return [x.transpose(0, 1)[None] for x in (dq, dk, dv)]

    return forward, backward


def main() -> None:
    import torch

    torch.manual_seed(0)
    tensors = [
        torch.randn(1, TOKENS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    ]
    cuts = torch.randperm(TOKENS - 1)[: DOCUMENTS - 1].sort().values + 1
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([TOKENS])])
    for name, lengths in (
        ("one length", torch.full((DOCUMENTS,), TOKENS // DOCUMENTS)),
        ("any length", ends.diff()),
    ):
        ids = torch.arange(DOCUMENTS, dtype=torch.int32).repeat_interleave(lengths).cuda()
        read = [ids.view(1, 1, TOKENS, 1), ids.view(1, 1, 1, TOKENS)]
        contenders = zip(ours(same_document, read, tensors), ragged(tensors, lengths), strict=True)
        for direction, (mine, other) in zip(("forward", "backward"), contenders, strict=True):
            for x, y in zip(mine(), other(), strict=True):
                assert (x - y).abs().max() <= TOLERANCE * y.abs().max(), f"{name}: results differ"
            times = interleaved({"score_mod": mine, "ragged": other})
            said = ", ".join(f"{who} {time:.3f} ms" for who, time in times.items())
            part = times["score_mod"] / times["ragged"]
            print(f"{name}, {direction}: {said}, {part:.2f}x the ragged form's time")


if __name__ == "__main__":
    main()
