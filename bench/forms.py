"""One function in two forms: ``python -m bench.forms``.

Causal attention of 4 x 16 heads of 128 and 4096 rows in bf16, as primitives and as ``sdpa``,
forward and backward; and a document mask over 16 documents in 16384 tokens, as a function of scores
and as packed sequences. Prints milliseconds of each, interleaved in one process, and their ratio;
results are compared first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dlattn
from bench.machine import require_gpu
from bench.timing import interleaved

BATCH, HEADS, ROWS, HEAD_DIM = 4, 16, 4096, 128
TOKENS, DOCUMENTS = 16384, 16
#: What the largest difference may be, of the largest element.
TOLERANCE = 0.03
FLOAT, BFLOAT16 = dlattn.data_type.FLOAT, dlattn.data_type.BFLOAT16

Pass = Callable[[], list[Any]]


class Form:
    """A graph, and what its pack holds."""

    def __init__(self) -> None:
        self.graph = dlattn.pygraph(
            io_data_type=BFLOAT16, intermediate_data_type=FLOAT, compute_data_type=FLOAT
        )
        self.pack: dict[Any, Any] = {}

    def of(self, x: Any) -> Any:
        """An input."""
        declared = self.graph.tensor_like(x)
        self.pack[declared] = x
        return declared

    def ready(self, outputs: Mapping[Any, Any]) -> Pass:
        """What runs the built graph into these, and gives them."""
        import torch

        for declared, x in outputs.items():
            declared.set_output(True).set_dim(x.shape).set_stride(x.stride())
            declared.set_data_type(FLOAT if x.dtype == torch.float32 else BFLOAT16)
        self.graph.build()
        pack, made = {**self.pack, **outputs}, [*outputs.values()]
        size = self.graph.get_workspace_size()
        workspace = torch.empty(size, device=made[0].device, dtype=torch.uint8)

        def run() -> list[Any]:
            self.graph.execute(pack, workspace)
            return made

        return run


# Primitive operations -----------------------------------------------------------------------------


def whole_forward(tensors: list[Any], results: list[Any], scale: float) -> Pass:
    """``sdpa`` of q, k and v into o and the statistics."""
    form = Form()
    made = form.graph.sdpa(
        *map(form.of, tensors), attn_scale=scale, use_causal_mask=True, generate_stats=True
    )
    return form.ready(dict(zip(made, results, strict=True)))


def whole_backward(tensors: list[Any], results: list[Any], scale: float) -> Pass:
    """``sdpa_backward`` of q, k, v, o, dO and the statistics into dQ, dK and dV."""
    form = Form()
    made = form.graph.sdpa_backward(*map(form.of, tensors), attn_scale=scale, use_causal_mask=True)
    return form.ready(dict(zip(made, results, strict=True)))


def masked_scores(form: Form, q: Any, k: Any, scale: float) -> Any:
    """Scaled products of q and the transposed k, where queries see no key that follows."""
    g = form.graph
    scores = g.mul(g.matmul(q, k), g.tensor_scalar(scale))
    query, key = (g.gen_index(scores, axis=axis) for axis in (2, 3))
    return g.binary_select(scores, g.tensor_scalar(-1e20), g.cmp_ge(query, key))


def parted_forward(tensors: list[Any], results: list[Any], scale: float) -> Pass:
    """The same of matrix products, a mask and a softmax."""
    form = Form()
    g = form.graph
    q, k, v = tensors
    scores = masked_scores(form, form.of(q), form.of(k.transpose(2, 3)), scale)
    top = g.reduction(scores, mode=dlattn.reduction_mode.MAX)
    top.set_dim((*q.shape[:3], 1))
    exponentials = g.exp(g.sub(scores, top))
    total = g.reduction(exponentials, mode=dlattn.reduction_mode.ADD)
    total.set_dim((*q.shape[:3], 1))
    o = g.matmul(g.div(exponentials, total), form.of(v))
    return form.ready({o: results[0], g.add(g.log(total), top): results[1]})


def parted_backward(tensors: list[Any], results: list[Any], scale: float) -> Pass:
    """The same of matrix products, and the probabilities from statistics."""
    form = Form()
    g = form.graph
    q, k, v, o, d_o, stats = map(form.of, tensors)
    kt, vt = (g.transpose(x, permutation=[0, 1, 3, 2]) for x in (k, v))
    p = g.exp(g.sub(masked_scores(form, q, kt, scale), stats))
    d_v = g.matmul(g.transpose(p, permutation=[0, 1, 3, 2]), d_o)
    delta = g.reduction(g.mul(d_o, o), mode=dlattn.reduction_mode.ADD)
    delta.set_dim((*tensors[0].shape[:3], 1))
    d_s = g.mul(g.mul(g.sub(g.matmul(d_o, vt), delta), p), g.tensor_scalar(scale))
    d_q = g.matmul(d_s, k)
    d_k = g.matmul(g.transpose(d_s, permutation=[0, 1, 3, 2]), q)
    return form.ready(dict(zip((d_q, d_k, d_v), results, strict=True)))


def primitives(
    device: str, dims: tuple[int, int, int, int] = (BATCH, HEADS, ROWS, HEAD_DIM)
) -> dict[str, dict[str, Pass]]:
    """Pass -> form -> what runs it."""
    import torch

    q, k, v, d_o = torch.randn(4, *dims, device=device, dtype=torch.bfloat16)
    o, stats = torch.empty_like(q), torch.empty(*dims[:3], 1, device=device)
    scale = dims[3] ** -0.5
    whole_forward([q, k, v], [o, stats], scale)()
    forward, backward = [q, k, v], [q, k, v, o, d_o, stats]

    def results() -> list[Any]:
        return [torch.empty_like(o), torch.empty_like(stats)]

    def gradients() -> list[Any]:
        return [torch.empty_like(q) for _ in range(3)]

    return {
        "primitives, forward": {
            "primitives": parted_forward(forward, results(), scale),
            "sdpa": whole_forward(forward, results(), scale),
        },
        "primitives, backward": {
            "primitives": parted_backward(backward, gradients(), scale),
            "sdpa_backward": whole_backward(backward, gradients(), scale),
        },
    }


# Documents ----------------------------------------------------------------------------------------


def of_documents(
    tensors: list[Any], results: list[Any], ids: Any, operation: str, scale: float
) -> Pass:
    """Attention within documents, by a function of scores that reads whose each token is."""
    form = Form()
    g = form.graph
    given = [*map(form.of, tensors)]
    of_query, of_key = form.of(ids.view(1, 1, -1, 1)), form.of(ids.view(1, 1, 1, -1))

    def same_document(sub: Any, score: Any) -> Any:
        same = sub.cmp_eq(of_query, of_key)
        return sub.binary_select(score, sub.tensor_scalar(-float("inf")), same)

    more = {"generate_stats": True} if operation == "sdpa" else {}
    outputs = getattr(g, operation)(*given, attn_scale=scale, score_mod=same_document, **more)
    return form.ready(dict(zip(outputs, results, strict=True)))


def documents(
    device: str, heads: int = HEADS, tokens: int = TOKENS, head_dim: int = HEAD_DIM
) -> dict[str, dict[str, Pass]]:
    """Pass -> form -> what runs it."""
    import torch

    dims, scale = (1, heads, tokens, head_dim), head_dim**-0.5
    q, k, v, d_o = torch.randn(4, *dims, device=device, dtype=torch.bfloat16)
    # Of different lengths, so that few of them end where a tile does.
    cuts = torch.randperm(tokens - 1, device=device)[: DOCUMENTS - 1].sort().values + 1
    bounds = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), tokens)]).int()
    ids = torch.bucketize(torch.arange(tokens, device=device), cuts, right=True, out_int32=True)
    longest = int((bounds[1:] - bounds[:-1]).max())

    flat = [x[0].transpose(0, 1).contiguous() for x in (q, k, v, d_o)]
    said = {"layout": "thd", "cu_seqlens": bounds, "max_seqlens": longest}
    out, lse = dlattn.attention(*flat[:3], **said, return_lse=True)
    o, stats = torch.empty_like(q), torch.empty(*dims[:3], 1, device=device)
    forward = of_documents([q, k, v], [o, stats], ids, "sdpa", scale)
    gradients = [torch.empty_like(q) for _ in range(3)]
    backward = of_documents([q, k, v, o, d_o, stats], gradients, ids, "sdpa_backward", scale)

    def as_given(x: Any) -> Any:
        return x.transpose(0, 1)[None]

    def packed_forward() -> list[Any]:
        return [as_given(dlattn.attention(*flat[:3], **said, out=out))]

    def packed_backward() -> list[Any]:
        made = dlattn.attention_backward(flat[3], *flat[:3], out, lse, **said)
        return [as_given(x) for x in made[:3]]

    forward()
    return {
        "documents, forward": {"score_mod": lambda: forward()[:1], "packed": packed_forward},
        "documents, backward": {"score_mod": backward, "packed": packed_backward},
    }


def main() -> None:
    import torch

    require_gpu("bench.forms")
    torch.manual_seed(0)
    for name, (first, second) in (
        (name, forms.items()) for name, forms in (primitives("cuda") | documents("cuda")).items()
    ):
        for x, y in zip(first[1](), second[1](), strict=True):
            assert (x - y).abs().max() <= TOLERANCE * y.abs().max(), f"{name}: results differ"
        times = interleaved(dict((first, second)))
        said = ", ".join(f"{form} {time:.3f} ms" for form, time in times.items())
        print(f"{name}: {said}, {times[second[0]] / times[first[0]]:.3f}x as fast")


if __name__ == "__main__":
    main()
