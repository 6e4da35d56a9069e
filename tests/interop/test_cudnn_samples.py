"""cuDNN's two tutorial programs with ``import dlattn as cudnn``, on PyTorch's CPU tensors.

They are written as cuDNN frontend 1.23's samples ``50_sdpa_forward`` and ``51_sdpa_backward``
write them, in both API styles; only the device and the sizes differ.
"""

import math

import pytest

import dlattn as cudnn

torch = pytest.importorskip("torch")

B, S, H, D = 2, 96, 3, 32
DIMS = (B, H, S, D)
STRIDES = (S * H * D, D, H * D, 1)
ATTN_SCALE = 1.0 / math.sqrt(D)
TYPES = {
    "io_data_type": cudnn.data_type.HALF,
    "intermediate_data_type": cudnn.data_type.FLOAT,
    "compute_data_type": cudnn.data_type.FLOAT,
}


@pytest.fixture
def handle():
    torch.manual_seed(42)
    handle = cudnn.create_handle()
    assert cudnn.backend_version() >= 8903
    yield handle
    cudnn.destroy_handle(handle)


def bshd(requires_grad=False):
    x = torch.randn(B, S, H, D, dtype=torch.half, requires_grad=requires_grad)
    return x.transpose(1, 2)


def built(graph):
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def expected(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, scale=ATTN_SCALE
    )


def assert_close(actual, reference):
    torch.testing.assert_close(actual.float(), reference.float(), atol=5e-3, rtol=3e-3)


def test_forward_wrapper(handle):
    """The forward program in wrapper style gives PyTorch's output, as a torch tensor."""
    q, k, v = bshd(), bshd(), bshd()

    with cudnn.Graph(
        **TYPES, inputs=["SDPA::q", "SDPA::k", "SDPA::v"], outputs=["attn_output"]
    ) as graph:
        o, _ = graph.sdpa(
            name="SDPA",
            q=q,
            k=k,
            v=v,
            attn_scale=ATTN_SCALE,
            is_inference=True,
            use_causal_mask=True,
        )
        o.set_output(True).set_name("attn_output").set_dim(q.shape).set_stride(q.stride())

    o = graph(q, k, v, handle=handle)

    assert isinstance(o, torch.Tensor)
    assert o.stride() == q.stride()
    assert_close(o, expected(q, k, v))


def test_forward_bindings(handle):
    """The forward program in binding style gives PyTorch's output."""
    q_cpu, k_cpu, v_cpu = bshd(), bshd(), bshd()
    graph = cudnn.pygraph(**TYPES)
    q, k, v = graph.tensor_like(q_cpu), graph.tensor_like(k_cpu), graph.tensor_like(v_cpu)
    o, _ = graph.sdpa(
        name="sdpa",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=ATTN_SCALE,
        use_causal_mask=True,
    )
    o.set_output(True).set_dim(DIMS).set_stride(STRIDES)
    built(graph)

    o_cpu = torch.empty(B, H, S, D, dtype=torch.half).as_strided(DIMS, STRIDES)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
    graph.execute({q: q_cpu, k: k_cpu, v: v_cpu, o: o_cpu}, workspace, handle=handle)

    assert_close(o_cpu, expected(q_cpu, k_cpu, v_cpu))


def test_backward_wrapper(handle):
    """The training program in wrapper style gives PyTorch's output and gradients."""
    q, k, v = bshd(True), bshd(True), bshd(True)
    with cudnn.Graph(
        **TYPES,
        workspace_alloc=False,
        inputs=["SDPA::q", "SDPA::k", "SDPA::v"],
        outputs=["output", "stats"],
    ) as forward:
        o, stats = forward.sdpa(
            name="SDPA",
            q=q,
            k=k,
            v=v,
            attn_scale=ATTN_SCALE,
            is_inference=False,
            use_causal_mask=True,
        )
        o.set_output(True).set_dim(q.shape).set_stride(q.stride()).set_name("output")
        stats.set_output(True).set_data_type(cudnn.data_type.FLOAT).set_name("stats")

    dO = torch.randn_like(q)
    o_cpu = torch.randn_like(q)
    stats_cpu = torch.randn(B, H, S, 1, dtype=torch.float32)
    with cudnn.Graph(
        **TYPES,
        workspace_alloc=False,
        inputs=[f"d_sdpa::{role}" for role in ("q", "k", "v", "o", "stats", "dO")],
        outputs=["dQ", "dK", "dV"],
    ) as backward:
        dQ, dK, dV = backward.sdpa_backward(
            name="d_sdpa",
            q=q,
            k=k,
            v=v,
            o=o_cpu,
            dO=dO,
            stats=stats_cpu,
            attn_scale=ATTN_SCALE,
            use_causal_mask=True,
        )
        dQ.set_output(True).set_dim(q.shape).set_stride(q.stride()).set_name("dQ")
        dK.set_output(True).set_dim(k.shape).set_stride(k.stride()).set_name("dK")
        dV.set_output(True).set_dim(v.shape).set_stride(v.stride()).set_name("dV")

    workspace_size = max(forward.get_workspace_size(), backward.get_workspace_size())
    workspace = torch.empty(workspace_size, dtype=torch.uint8)
    o_cpu, stats_cpu = forward(q, k, v, workspace=workspace, handle=handle)
    o_ref = expected(q, k, v)
    assert_close(o_cpu, o_ref)

    gradients = backward(q, k, v, o_cpu, stats_cpu, dO, workspace=workspace, handle=handle)
    references = torch.autograd.grad(o_ref, [q, k, v], dO.float())
    for gradient, reference in zip(gradients, references, strict=True):
        assert_close(gradient, reference)


def test_backward_bindings(handle):
    """The training program in binding style gives PyTorch's output and gradients."""
    q_cpu, k_cpu, v_cpu = (torch.randn(B * S * H * D).half().as_strided(DIMS, STRIDES),) * 3
    q_cpu, k_cpu, v_cpu = (x.clone() for x in (q_cpu, k_cpu.flip(2), v_cpu.flip(1)))
    o_cpu = torch.empty(B * S * H * D).half().as_strided(DIMS, STRIDES)
    stats_cpu = torch.empty(B, H, S, 1)

    forward = cudnn.pygraph(**TYPES)
    q, k, v = (forward.tensor_like(x) for x in (q_cpu, k_cpu, v_cpu))
    o, stats = forward.sdpa(
        name="sdpa",
        q=q,
        k=k,
        v=v,
        generate_stats=True,
        attn_scale=ATTN_SCALE,
        use_causal_mask=True,
    )
    o.set_output(True).set_dim(o_cpu.size()).set_stride(o_cpu.stride())
    stats.set_output(True).set_dim(stats_cpu.size()).set_stride(stats_cpu.stride())
    stats.set_data_type(cudnn.data_type.FLOAT)
    built(forward)

    dO_cpu = torch.randn_like(o_cpu)
    gradients_cpu = [torch.empty_like(x) for x in (q_cpu, k_cpu, v_cpu)]
    backward = cudnn.pygraph(**TYPES)
    inputs_cpu = (q_cpu, k_cpu, v_cpu, o_cpu, dO_cpu, stats_cpu)
    inputs = [backward.tensor_like(x) for x in inputs_cpu]
    gradients = backward.sdpa_backward(
        name="sdpa_backward",
        **dict(zip(("q", "k", "v", "o", "dO", "stats"), inputs, strict=True)),
        attn_scale=ATTN_SCALE,
        use_causal_mask=True,
    )
    for gradient, memory in zip(gradients, gradients_cpu, strict=True):
        gradient.set_output(True).set_dim(memory.size()).set_stride(memory.stride())
    built(backward)

    workspace_size = max(forward.get_workspace_size(), backward.get_workspace_size())
    workspace = torch.empty(workspace_size, dtype=torch.uint8)
    forward.execute(
        {q: q_cpu, k: k_cpu, v: v_cpu, o: o_cpu, stats: stats_cpu}, workspace, handle=handle
    )
    pack = dict(zip([*inputs, *gradients], [*inputs_cpu, *gradients_cpu], strict=True))
    backward.execute(pack, workspace, handle=handle)

    leaves = [x.float().requires_grad_() for x in (q_cpu, k_cpu, v_cpu)]
    o_ref = expected(*leaves)
    assert_close(o_cpu, o_ref)
    references = torch.autograd.grad(o_ref, leaves, dO_cpu.float())
    for actual, reference in zip(gradients_cpu, references, strict=True):
        assert_close(actual, reference)
