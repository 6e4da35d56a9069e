"""The gradient of a bias: what the call and ``validate`` say, and what the problem knows."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn as cudnn
from tests.unit.valid_graphs import FLOAT, HALF, Backward

BIAS = (1, 4, 8, 12)
NotSupported = cudnn.cudnnGraphNotSupportedError


def backward(bias=None, gradient=None):
    """A graph with a bias and its gradient, of these attributes."""
    made = Backward()
    given = {"dim": BIAS, "data_type": FLOAT}
    made.bias = made.graph.tensor(name="bias", **{**given, **(bias or {})})
    made.dBias = made.graph.tensor(name="dBias", **{**given, **(gradient or {})})
    return made.sdpa(bias=made.bias, dBias=made.dBias)


def test_it_is_written_in_a_type_of_its_own():
    """The problem has its type, which need not be that of the bias or of q."""
    for dtype in (FLOAT, HALF, cudnn.data_type.BFLOAT16):
        lowered = backward(gradient={"data_type": dtype}).graph.lowered
        assert lowered.problem.d_bias is dtype
        assert lowered.outputs == {"dQ", "dK", "dV", "dBias"}
    made = Backward()
    made.sdpa(bias=made.graph.tensor(BIAS, name="bias"))
    assert made.graph.lowered.problem.d_bias is None


def test_what_is_left_out_is_that_of_the_bias():
    """Shape and strides that are not set are the bias's."""
    stride = (0, 96, 1, 8)
    made = backward(bias={"stride": stride}, gradient={"dim": (), "stride": ()})
    made.validate()
    assert tuple(made.dBias.get_dim()) == BIAS
    assert tuple(made.dBias.get_stride()) == stride


def test_any_strides_without_overlap():
    """Keys need not be contiguous; elements must have addresses of their own."""
    backward(gradient={"stride": (0, 300, 2, 17)}).validate()
    with pytest.raises(ValueError, match="dBias is an output .* share an address"):
        backward(gradient={"stride": (0, 0, 12, 1)}).validate()


def test_it_needs_a_bias():
    """Alone it contradicts itself at the call, and so does the bias in its place."""
    made = Backward()
    t = made.graph.tensor(BIAS, name="t", data_type=FLOAT)
    with pytest.raises(RuntimeError, match="dBias without bias"):
        made.sdpa(dBias=t)
    with pytest.raises(RuntimeError, match="one tensor as dBias, .* as bias"):
        made.sdpa(bias=t, dBias=t)


@pytest.mark.parametrize("dtype", [cudnn.data_type.BOOLEAN, cudnn.data_type.UINT8])
def test_a_mask_has_none(dtype):
    """A boolean bias is refused together with a gradient."""
    with pytest.raises(NotSupported, match=r"bias is .*, a mask, .* leave out dBias"):
        backward(bias={"data_type": dtype}).validate()


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"dim": (2, 4, 8, 12)}, r"dBias has dim .*; expected \(1, 4, 8, 12\), from bias"),
        ({"dim": (1, 1, 8, 12)}, r"dBias has dim"),
        ({"data_type": cudnn.data_type.INT32}, r"dBias is .*INT32; expected FLOAT or HALF"),
        ({"is_virtual": True}, r"dBias is virtual"),
    ],
)
def test_refusals(attributes, said):
    """Another shape than the bias's, no float, and no memory are refused by name."""
    with pytest.raises(ValueError, match=said):
        backward(gradient=attributes).validate()


def test_through_the_wrapper():
    """A Graph finds it by its port; a gradient for all heads is the sum of each head's."""
    rng = np.random.default_rng(0)
    q, k, v, o, dO = rng.standard_normal((5, 2, 4, 8, 16)).astype(np.float32)
    stats = np.full((2, 4, 8, 1), 9, np.float32)
    found, names = [], ["bwd::dQ", "bwd::dK", "bwd::dV", "bwd::dBias"]
    for heads in (1, 4):
        bias = np.zeros((1, heads, 8, 8), np.float32)
        inputs = [q, k, v, o, dO, stats, bias]
        with cudnn.Graph(inputs=inputs, outputs=names) as graph:
            made = graph.sdpa_backward(*inputs[:6], bias=bias, dBias=bias.copy(), name="bwd")
            for gradient in made:
                gradient.set_output(True)
        found.append(graph(*inputs)[3])
    assert np.abs(found[0]).max() > 1e-3
    assert np.allclose(found[0], found[1].sum(1, keepdims=True), rtol=1e-4, atol=1e-5)
