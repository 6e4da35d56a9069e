"""cuDNN's sample of fused attention as an operation graph, node by node and type by type, on
PyTorch's CPU tensors: ``run_mha_fprop`` and ``run_mha_bprop`` of its legacy samples."""

import pytest

import dlattn as cudnn
from dlattn.problem import Problem

torch = pytest.importorskip("torch")

B, H, SQ, SKV, D = 2, 3, 64, 128, 64
HALF, FLOAT, INT32 = cudnn.data_type.HALF, cudnn.data_type.FLOAT, cudnn.data_type.INT32
BOOLEAN = cudnn.data_type.BOOLEAN
SCORES, ROWS = (B, H, SQ, SKV), (B, H, SQ, 1)
F16x16 = cudnn.tensor_reordering.F16x16
ADD, MAX = cudnn.reduction_mode.ADD, cudnn.reduction_mode.MAX
SCALE, SEED = 0.125, 123456


class Sample:
    """A graph whose tensors have the sample's names, types and order of sizes."""

    def __init__(self):
        self.graph = cudnn.pygraph(
            io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT
        )
        self.tensors = {}

    def half(self, name, rows, transposed=False):
        dim, stride = (B, H, rows, D), (rows * 3 * H * D, D, 3 * H * D, 1)  # of packed q, k and v
        if transposed:
            dim, stride = (*dim[:2], dim[3], dim[2]), (*stride[:2], stride[3], stride[2])
        return self.kept(name, self.graph.tensor(dim, stride, HALF, name=name))

    def number(self, name, data_type):
        ones = (1, 1, 1, 1)
        t = self.graph.tensor(ones, ones, data_type, name=name, is_pass_by_value=True)
        return self.kept(name, t)

    def lengths(self):
        return [
            self.kept(name, self.graph.tensor((B, 1, 1, 1), (1, 1, 1, 1), INT32, name=name))
            for name in ("len_q", "len_k")
        ]

    def kept(self, name, t):
        self.tensors[name] = t
        return t

    def mask(self, x, lengths, causal, value):
        graph = self.graph
        row = graph.gen_index(x, 2).set_data_type(FLOAT)
        column = graph.gen_index(x, 3).set_data_type(FLOAT)
        keep = graph.logical_and(
            graph.cmp_lt(row, lengths[0]).set_data_type(BOOLEAN),
            graph.cmp_lt(column, lengths[1]).set_data_type(BOOLEAN),
        )
        if causal:
            keep = graph.logical_and(keep, graph.cmp_ge(row, column).set_data_type(BOOLEAN))
        return graph.binary_select(x, value, keep.set_data_type(BOOLEAN))

    def run(self, memory):
        self.graph.build()
        assert isinstance(self.graph.lowered.problem, Problem)
        pack = {t: memory[name] for name, t in self.tensors.items()}
        workspace = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8)
        self.graph.execute(pack, workspace)


def packed(rows):
    return (H * rows * D, rows * D, D, 1)


def forward(causal, bias, p):
    """``run_mha_fprop``."""
    it = Sample()
    graph = it.graph
    k = graph.mul(it.half("k", SKV, transposed=True), it.number("scale", HALF))
    lengths = it.lengths()
    q = it.half("q", SQ)
    x = graph.matmul(
        q, k.set_data_type(HALF), m_override=lengths[0], n_override=lengths[1]
    ).set_data_type(FLOAT)
    if bias:
        stride = (H * SQ * SKV, SQ * SKV, SKV, 1)
        x = graph.add(x, it.kept("bias", graph.tensor((1, *SCORES[1:]), stride, HALF)))
    x = it.mask(x, lengths, causal, it.number("negative", FLOAT))
    most = graph.reduction(x, MAX).set_dim(ROWS)
    x = graph.exp(graph.sub(x, most))
    s = graph.div(x, graph.reduction(x, ADD).set_dim(ROWS))
    if p:
        seed, offset = graph.tensor_scalar(SEED), graph.tensor_scalar(0)
        drawn = graph.rng(seed, offset, bernoulli_probability=1 - p).set_dim(SCORES)
        s = graph.mul(s, drawn)
    it.kept("s", s).set_data_type(HALF).set_output(True).set_reordering_type(F16x16)
    if p:
        s = graph.mul(s, it.number("dropout", HALF)).set_data_type(HALF)
    o = graph.matmul(s, it.half("v", SKV), m_override=lengths[0], k_override=lengths[1])
    it.kept("o", o).set_output(True).set_stride(packed(SQ))
    return it


def backward(causal):
    """``run_mha_bprop``."""
    it = Sample()
    graph = it.graph
    q, k, v = it.half("q", SQ), it.half("k", SKV), it.half("v", SKV, transposed=True)
    lengths = it.lengths()
    d_o = it.kept("dO", graph.tensor((B, H, SQ, D), (SQ * H * D, D, H * D, 1), HALF))
    stride = (H * SQ * SKV, SQ * SKV, SKV, 1)
    turned = ((B, H, SKV, SQ), (*stride[:2], stride[3], stride[2]))
    s = it.kept("s", graph.tensor(SCORES, stride, HALF, reordering_type=F16x16))
    zero, dropout = it.number("zero", FLOAT), it.number("dropout_float", FLOAT)

    p_t = graph.reshape(s).set_dim(turned[0]).set_stride(turned[1])
    p_t = graph.mul(p_t, dropout).set_data_type(HALF)
    p_t = graph.abs(p_t).set_data_type(HALF)
    dv = graph.matmul(p_t, d_o, m_override=lengths[1], k_override=lengths[0])
    dp = graph.matmul(d_o, v, m_override=lengths[0], n_override=lengths[1]).set_data_type(FLOAT)
    y = graph.abs(s).set_data_type(HALF)
    kept = graph.cmp_gt(s, zero).set_data_type(BOOLEAN)
    dy = graph.binary_select(graph.mul(dp, dropout), zero, kept)
    total = graph.reduction(graph.mul(y, dy), ADD).set_dim(ROWS)
    dx = graph.mul(y, graph.sub(dy, total))
    dx = graph.mul(dx, it.number("scale_float", FLOAT))
    ds = it.kept("dS", it.mask(dx, lengths, causal, zero))
    ds.set_data_type(HALF).set_output(True).set_reordering_type(F16x16)
    dq = graph.matmul(ds, k, m_override=lengths[0], k_override=lengths[1])
    ds_t = graph.reshape(ds).set_dim(turned[0]).set_stride(turned[1]).set_data_type(HALF)
    dk = graph.matmul(ds_t, q, m_override=lengths[1], k_override=lengths[0])
    for name, gradient in (("dQ", dq), ("dK", dk), ("dV", dv)):
        rows = SQ if name == "dQ" else SKV
        it.kept(name, gradient).set_output(True).set_stride(packed(rows))
    return it


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias, p", [(False, 0.0), (True, 0.0), (False, 0.25), (True, 0.25)])
def test_mha(causal, bias, p):
    """Output and gradients are those of PyTorch's autograd, with the same dropout."""
    torch.manual_seed(7)
    qkv = torch.randn(B, SKV, 3, H, D, dtype=torch.half)
    k, v = (qkv[:, :, i].transpose(1, 2) for i in (1, 2))
    lengths = torch.tensor([[SQ, SKV], [SQ - 9, SKV - 20]], dtype=torch.int32)
    memory = {
        "q": torch.randn(B, SQ, 3, H, D, dtype=torch.half)[:, :, 0].transpose(1, 2),
        "k": k,
        "v": v,
        "len_q": lengths[:, 0].reshape(B, 1, 1, 1).contiguous(),
        "len_k": lengths[:, 1].reshape(B, 1, 1, 1).contiguous(),
        "bias": torch.randn(1, H, SQ, SKV, dtype=torch.half),
        "dO": torch.randn(B, SQ, H, D, dtype=torch.half).transpose(1, 2),
        "s": torch.full(SCORES, 9, dtype=torch.half),
        "dS": torch.empty(SCORES, dtype=torch.half),
        **{"scale": SCALE, "scale_float": SCALE, "negative": -1e20, "zero": 0.0},
        **{"dropout": 1 / (1 - p), "dropout_float": 1 / (1 - p)},
        **{name: torch.empty(B, H, SQ, D, dtype=torch.half) for name in ("o", "dQ")},
        **{name: torch.empty(B, H, SKV, D, dtype=torch.half) for name in ("dK", "dV")},
    }
    forward(causal, bias, p).run(memory)
    backward(causal).run(memory)

    wide = {name: memory[name].double().requires_grad_() for name in "qkv"}
    x = wide["q"] @ wide["k"].mT * SCALE + bias * memory["bias"].double()
    row, column = torch.arange(SQ).reshape(-1, 1), torch.arange(SKV)
    keep = (row < memory["len_q"]) & (column < memory["len_k"])
    keep = keep & (row >= column) if causal else keep
    weights = x.masked_fill(~keep, -1e20).softmax(-1) * (row < memory["len_q"])
    if p:
        drawn = cudnn.philox_dropout_mask(p, SEED, 0, SCORES)
        weights = weights * torch.from_numpy(drawn) / (1 - p)
    o = weights @ wide["v"]
    gradients = torch.autograd.grad(o, list(wide.values()), memory["dO"].double())
    expected = dict(zip(("o", "dQ", "dK", "dV"), (o, *gradients), strict=True))
    for name, x in expected.items():
        torch.testing.assert_close(memory[name].double(), x, atol=1e-2, rtol=1e-2, msg=name)
