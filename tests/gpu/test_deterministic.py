"""The same bits in every run: of a forward, and of a backward that is to be deterministic."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import dlattn
from dlattn.flash import mha_varlen_bwd, mha_varlen_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

#: batch, heads of q, heads of k and v, length, head dimensions, mask.
CASES: dict[str, tuple[int, int, int, int, int, int, dict[str, Any]]] = {
    "causal": (2, 8, 8, 1024, 128, 128, {"use_causal_mask": True}),
    "full, more items than blocks": (6, 16, 16, 500, 64, 64, {}),
    "grouped heads, window": (
        2, 8, 2, 777, 128, 128,
        {"diagonal_band_left_bound": 200, "diagonal_band_right_bound": 0},
    ),
    "grouped heads, causal": (2, 28, 4, 1500, 128, 128, {"use_causal_mask": True}),
    "a narrow window of many heads": (
        4, 32, 8, 1500, 64, 64, {"diagonal_band_left_bound": 128, "diagonal_band_right_bound": 0},
    ),
    "by product": (4, 8, 8, 640, 256, 256, {"use_causal_mask": True}),
    "unequal head dimensions": (2, 8, 8, 512, 192, 128, {"use_causal_mask": True}),
    "lengths": (2, 4, 4, 600, 128, 128, {"use_padding_mask": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reruns(case: tuple[int, int, int, int, int, int, dict[str, Any]]) -> None:
    """A hundred runs leave the same bits in dQ, dK and dV, near the gradients in float64."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's backward has an order of additions")
    batch, heads, groups, seq, d_qk, d_v, masks = case

    def random(heads: int, dim: int) -> Any:
        return torch.randn(batch, heads, seq, dim, device="cuda", dtype=torch.bfloat16)

    q, k, v = random(heads, d_qk), random(groups, d_qk), random(groups, d_v)
    dO, scale = random(heads, d_v), d_qk**-0.5
    lengths = torch.tensor([seq, *[seq // 3] * (batch - 1)], dtype=torch.int32, device="cuda")
    keep = attended(torch, seq, masks, lengths)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    o, stats = attention(torch, *exact, keep, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autograd's thread has no CUDA context yet
        want = torch.autograd.grad(o, exact, dO.double())

    tensors = {"q": q, "k": k, "v": v, "o": o.detach().bfloat16(), "dO": dO}
    tensors["stats"] = stats.detach().float()
    if "use_padding_mask" in masks:
        tensors["seq_len_q"] = tensors["seq_len_kv"] = lengths.view(batch, 1, 1, 1)
    outputs = [torch.empty_like(t) for t in (q, k, v)]
    options = {**masks, "attn_scale": scale, "use_deterministic_algorithm": True}
    graph, pack, workspace = built(torch, "sdpa_backward", tensors, outputs, options)

    first = None
    for run in range(100):
        for output in outputs:
            output.fill_(float("nan"))
        workspace.fill_(run)
        graph.execute(pack, workspace)
        if first is None:
            first = [output.clone() for output in outputs]
        for output, before in zip(outputs, first, strict=True):
            assert torch.equal(output, before)
    for output, exact_gradient in zip(outputs, want, strict=True):
        error = (output.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < 0.01


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_reruns(case: tuple[int, int, int, int, int, int, dict[str, Any]]) -> None:
    """Two hundred runs leave the same bits in o and the log-sum-exps."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    batch, heads, groups, seq, d_qk, d_v, masks = case
    q, k, v = (
        torch.randn(batch, h, seq, dim, device="cuda", dtype=torch.bfloat16)
        for h, dim in ((heads, d_qk), (groups, d_qk), (groups, d_v))
    )
    outputs = [torch.empty(batch, heads, seq, d_v, device="cuda", dtype=torch.bfloat16)]
    outputs.append(torch.empty(batch, heads, seq, 1, device="cuda"))
    tensors = {"q": q, "k": k, "v": v}
    if "use_padding_mask" in masks:
        lengths = torch.tensor([seq, *[seq // 3] * (batch - 1)], dtype=torch.int32, device="cuda")
        tensors["seq_len_q"] = tensors["seq_len_kv"] = lengths.view(batch, 1, 1, 1)
    options = {**masks, "attn_scale": d_qk**-0.5, "generate_stats": True}
    graph, pack, workspace = built(torch, "sdpa", tensors, outputs, options)

    first = None
    for _ in range(200):
        for output in outputs:
            output.fill_(float("nan"))
        graph.execute(pack, workspace)
        if first is None:
            first = [output.clone() for output in outputs]
        for output, before in zip(outputs, first, strict=True):
            assert torch.equal(output, before) and not bool(output.isnan().any())


@pytest.mark.parametrize("causal", [False, True])
def test_packed_reruns(causal: bool) -> None:
    """A hundred runs of packed sequences leave the same bits, however heads share room for sums."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's backward has an order of additions")
    check_packed_reruns(torch, 9, 9, causal)


def check_packed_reruns(torch: Any, heads: int, heads_k: int, causal: bool) -> None:
    """A hundred deterministic backwards of packed sequences leave the same bits."""
    lengths = torch.tensor([0, *(1100, 20, 700, 0, 300, 64, 1000, 129) * 4], device="cuda")
    starts, longest = lengths.cumsum(0).int(), int(lengths.max())
    q, dout, k, v = (
        torch.randn(int(starts[-1]), n, 128, device="cuda", dtype=torch.bfloat16)
        for n in (heads, heads, heads_k, heads_k)
    )
    masks = {"softmax_scale": 128**-0.5, "is_causal": causal}
    sizes = (starts, starts, None, None, None, longest, longest)
    out, *_, lse = mha_varlen_fwd(q, k, v, None, *sizes, **masks)[:5]
    sizes = (starts, starts, None, longest, longest)
    first = None
    for _ in range(100):
        gradients = mha_varlen_bwd(
            dout, q, k, v, out, lse, None, None, None, *sizes, **masks, deterministic=True
        )[:3]
        first = first or gradients
        for gradient, before in zip(gradients, first, strict=True):
            assert torch.equal(gradient, before)


def built(
    torch: Any,
    operation: str,
    tensors: dict[str, Any],
    outputs: list[Any],
    options: dict[str, Any],
) -> tuple[dlattn.pygraph, dict[Any, Any], Any]:
    """A built graph of one operation in bf16, what it is executed with, and its workspace."""
    graph = dlattn.pygraph(
        io_data_type=dlattn.data_type.BFLOAT16,
        intermediate_data_type=dlattn.data_type.FLOAT,
        compute_data_type=dlattn.data_type.FLOAT,
    )
    given = {role: graph.tensor_like(t) for role, t in tensors.items()}
    results = getattr(graph, operation)(**given, **options)
    for result, output in zip(results, outputs, strict=True):
        result.set_output(True).set_dim(output.shape).set_stride(output.stride())
        if output.itemsize == 4:  # log-sum-exps
            result.set_data_type(dlattn.data_type.FLOAT)
    graph.build([dlattn.heur_mode.A])
    pack = {given[role]: t for role, t in tensors.items()}
    pack |= dict(zip(results, outputs, strict=True))
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=outputs[0].device)
    return graph, pack, workspace


def attended(torch: Any, seq: int, masks: dict[str, Any], lengths: Any) -> Any:
    """(B, 1, S, S): which keys a query attends to."""
    query = torch.arange(seq, device="cuda").view(-1, 1)
    key = query.view(1, -1)
    keep = torch.ones(1, 1, seq, seq, dtype=torch.bool, device="cuda")
    if "use_causal_mask" in masks or "diagonal_band_right_bound" in masks:
        keep = keep & (key <= query)
    if "diagonal_band_left_bound" in masks:
        keep = keep & (key > query - masks["diagonal_band_left_bound"])
    if "use_padding_mask" in masks:
        ends = lengths.view(-1, 1, 1, 1)
        keep = keep & (key < ends) & (query < ends)
    return keep


def attention(torch: Any, q: Any, k: Any, v: Any, keep: Any, scale: float) -> tuple[Any, Any]:
    """o, and the log-sum-exp; rows that attend to nothing hold 0 and -inf."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~keep, float("-inf"))
    stats = scores.logsumexp(-1, keepdim=True)
    p = (scores - stats.masked_fill(stats.isinf(), 0)).exp()
    return p @ v, stats
