"""The arguments of ``sdpa`` and ``sdpa_backward``: order, defaults, contradictions."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import dlattn as cudnn

FORWARD = """
    q k v is_inference attn_scale bias block_mask use_alibi_mask use_padding_mask seq_len_q
    seq_len_kv use_causal_mask use_causal_mask_bottom_right sliding_window_length
    diagonal_alignment diagonal_band_left_bound diagonal_band_right_bound dropout rng_dump
    paged_attention_k_table paged_attention_v_table paged_attention_max_seq_len_kv
    compute_data_type name score_mod generate_stats implementation score_max score_sum_exp
    sink_token unfuse_fma
""".split()
BACKWARD = """
    q k v o dO stats attn_scale bias dBias use_alibi_mask use_padding_mask seq_len_q seq_len_kv
    max_total_seq_len_q max_total_seq_len_kv use_causal_mask use_causal_mask_bottom_right
    sliding_window_length diagonal_alignment diagonal_band_left_bound diagonal_band_right_bound
    dropout rng_dump use_deterministic_algorithm compute_data_type name score_mod score_mod_bprop
    sink_token dSink_token
""".split()
#: Keywords that cuDNN does not have.
PAGED = {f"paged_attention_{what}" for what in ("k_table", "v_table", "max_seq_len_kv")}
DLATTNS_OWN = {
    "sdpa": {"softcap", "alibi_slopes", "dropout_algorithm", "debug_softmax"},
    "sdpa_backward": {
        *("softcap", "alibi_slopes", "dropout_algorithm", "block_mask", "score_mod_gradients"),
        *PAGED,
    },
}
BOTTOM_RIGHT = cudnn.diagonal_alignment.BOTTOM_RIGHT


@pytest.fixture
def graph():
    return cudnn.pygraph(io_data_type=cudnn.data_type.HALF)


def operands(graph, roles="qkv"):
    return {role: graph.tensor((2, 4, 8, 16), name=role) for role in roles}


def sdpa(graph, **arguments):
    return graph.sdpa(**operands(graph), **{"generate_stats": False, **arguments})


def backward(graph, **arguments):
    stats = graph.tensor((2, 4, 8, 1), name="stats")
    return graph.sdpa_backward(
        **operands(graph, ("q", "k", "v", "o", "dO")), stats=stats, **arguments
    )


def diagonal(graph):
    band = graph._nodes[-1].diagonal
    return band.left, band.right, band.bottom_right


def test_implementations(graph):
    """Each of cuDNN's lowerings, and its numerics switch, mean the one implementation; other values
    are errors."""
    for implementation in cudnn.attention_implementation:
        sdpa(graph, implementation=implementation, unfuse_fma=True)
    with pytest.raises(TypeError, match="implementation must be a dlattn.attention_implementation"):
        sdpa(graph, implementation="UNIFIED")
    with pytest.raises(TypeError, match="unfuse_fma must be True, False or None; got 2"):
        sdpa(graph, unfuse_fma=2)


class LikeATensor:
    """An object with a ``dtype`` that NumPy does not know, as torch's tensors have."""

    dtype = object()


@pytest.mark.parametrize("wrong", [LikeATensor(), 7, "(-1,)f4", "f4, (", "f4,f4"])
def test_what_is_no_element_type(graph, wrong):
    """It is refused as such, however NumPy fails to read it."""
    said = "is not an element type; expected a dlattn.data_type, a NumPy dtype or a torch dtype"
    with pytest.raises(ValueError, match=said):
        sdpa(graph, compute_data_type=wrong)
    with pytest.raises(ValueError, match=said):
        graph.tensor((2, 3), data_type=wrong)


@pytest.mark.parametrize("owner", [cudnn.pygraph, cudnn.Graph])
@pytest.mark.parametrize(("method", "order"), [("sdpa", FORWARD), ("sdpa_backward", BACKWARD)])
def test_positional_order_is_cudnns(owner, method, order):
    """Programs that pass arguments by position mean cuDNN's positions."""
    parameters = inspect.signature(getattr(owner, method)).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert positional == ["self", *order]
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == DLATTNS_OWN[method]


def test_outputs_are_named_after_the_node(graph):
    """Outputs are virtual and called ``<node>::<PORT>``; stats exist when asked for."""
    o, stats = sdpa(graph, name="SDPA", generate_stats=True)
    assert (o.get_name(), stats.get_name()) == ("SDPA::O", "SDPA::Stats")
    assert o.get_is_virtual() and stats.get_is_virtual()
    assert sdpa(graph)[1] is None
    names = [t.get_name() for t in backward(graph, name="d")]
    assert names == ["d::dQ", "d::dK", "d::dV"]


def test_aliases(graph):
    """The flash-attention names are the same operations."""
    o, stats = graph.scaled_dot_product_flash_attention(**operands(graph), is_inference=False)
    assert stats is not None
    stats = graph.tensor((2, 4, 8, 1))
    outputs = graph.scaled_dot_product_flash_attention_backward(
        **operands(graph, ("q", "k", "v", "o", "dO")), stats=stats
    )
    assert len(outputs) == 3


@pytest.mark.parametrize(
    ("is_inference", "has_stats"), [(True, False), (False, True), (np.True_, False)]
)
def test_is_inference_is_the_opposite_of_generate_stats(graph, is_inference, has_stats):
    """The legacy flag asks for stats when it is False, or NumPy's False."""
    _, stats = graph.sdpa(**operands(graph), is_inference=is_inference)
    assert (stats is not None) == has_stats


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "got neither"),
        ({"generate_stats": True, "is_inference": False}, "got both"),
        ({"generate_stats": 1}, "generate_stats must be True or False"),
        ({"is_inference": "no"}, "is_inference must be True or False"),
    ],
)
def test_stats_must_be_decided(graph, flags, said):
    """Exactly one of the two flags, as a bool, or a RuntimeError at the call."""
    with pytest.raises(RuntimeError, match=said):
        graph.sdpa(**operands(graph), **flags)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (None, None, False)),
        ({"use_causal_mask": True}, (None, 0, False)),
        ({"use_causal_mask_bottom_right": True}, (None, 0, True)),
        ({"sliding_window_length": 5}, (5, None, False)),
        ({"sliding_window_length": 5, "use_causal_mask": True}, (5, 0, False)),
        ({"diagonal_band_left_bound": 5, "diagonal_band_right_bound": 2}, (5, 2, False)),
        ({"diagonal_band_left_bound": np.int64(5)}, (5, None, False)),
        ({"diagonal_band_left_bound": 0, "diagonal_band_right_bound": -3}, (0, -3, False)),
        ({"diagonal_alignment": BOTTOM_RIGHT}, (None, None, True)),
        ({"diagonal_alignment": BOTTOM_RIGHT, "diagonal_band_right_bound": 0}, (None, 0, True)),
        ({"use_causal_mask": None, "diagonal_alignment": None}, (None, None, False)),
    ],
)
@pytest.mark.parametrize("operation", [sdpa, backward])
def test_bands(graph, operation, arguments, expected):
    """Flags, alignment and bounds are several spellings of one band."""
    operation(graph, **arguments)
    assert diagonal(graph) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"use_causal_mask": True, "use_causal_mask_bottom_right": True}, "both True"),
        ({"use_causal_mask": True, "diagonal_band_right_bound": 0}, "use_causal_mask means"),
        (
            {"use_causal_mask_bottom_right": True, "diagonal_band_right_bound": 3},
            "use_causal_mask_bottom_right means",
        ),
        ({"use_causal_mask": True, "diagonal_alignment": BOTTOM_RIGHT}, "top left"),
        ({"sliding_window_length": 4, "diagonal_band_left_bound": 4}, "another name"),
        ({"sliding_window_length": -1}, "sliding_window_length must be at least 1"),
        ({"diagonal_band_left_bound": 4.0}, "must be an int"),
        ({"diagonal_band_right_bound": True}, "must be an int"),
        ({"dropout": (0.1, None)[:1]}, "dropout must be a tuple"),
        ({"dropout": [0.1, None, None]}, "dropout must be a tuple"),
        ({"attn_scale": float("nan")}, "finite"),
    ],
)
@pytest.mark.parametrize("operation", [sdpa, backward])
def test_contradictions_are_runtime_errors_at_the_call(graph, operation, arguments, said):
    """Arguments that contradict each other are refused by the call that has them."""
    with pytest.raises(RuntimeError, match=said):
        operation(graph, **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"use_causal_mask": "yes"}, "use_causal_mask must be"),
        ({"use_padding_mask": 2}, "use_padding_mask must be"),
        ({"diagonal_alignment": "TOP_LEFT"}, "diagonal_alignment must be"),
        ({"attn_scale": "big"}, "attn_scale must be a number"),
        ({"attn_scale": True}, "attn_scale must be a number"),
        ({"softcap": "big"}, "softcap must be a number"),
        ({"seq_len_q": 5}, "seq_len_q must be a tensor of the graph"),
        ({"bias": np.zeros(3)}, "bias must be a tensor of the graph"),
    ],
)
def test_wrong_types_are_type_errors(graph, arguments, said):
    """An argument of the wrong Python type is a TypeError that names it."""
    with pytest.raises(TypeError, match=said):
        sdpa(graph, **arguments)


def test_frameworks_tensors_are_refused_with_the_way_out(graph):
    """A pygraph takes graph tensors; the message says how to make one."""
    x = np.zeros((2, 4, 8, 16), np.float16)
    with pytest.raises(TypeError, match=r"q must be a tensor.*tensor_like.*ndarray"):
        graph.sdpa(x, x, x, generate_stats=False)
    with pytest.raises(TypeError, match="needs the tensor v"):
        graph.sdpa(**operands(graph, "qk"), v=None, generate_stats=False)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        *((None, 1.0), (0.5, 0.5), (2, 2.0), (-1.5, -1.5)),
        *((np.float32(0.25), 0.25), (np.float16(0.25), 0.25), (np.float64(0.25), 0.25)),
    ],
)
def test_scales_are_numbers(graph, scale, expected):
    """``None`` means 1, and every real number is taken, ints and NumPy's of any size included."""
    sdpa(graph, attn_scale=scale)
    assert graph._nodes[-1].attn_scale == expected


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), np.float16("inf"), 1e39, 10**400])
def test_scales_are_float32s(graph, scale):
    """A scale that float32 does not hold would make every score infinite."""
    with pytest.raises(RuntimeError, match="attn_scale must be a finite number of FLOAT"):
        sdpa(graph, attn_scale=scale)


@pytest.mark.parametrize(
    ("softcap", "expected"), [(None, None), (50, 50.0), (np.float32(0.5), 0.5), (30.0, 30.0)]
)
def test_soft_caps_are_positive_numbers(graph, softcap, expected):
    """``None`` means no soft cap; what float32 cannot divide by is refused."""
    sdpa(graph, softcap=softcap)
    assert graph._nodes[-1].softcap == expected
    for wrong in (0, -1.0, 1e-40, 1e39, 10**400, float("nan")):
        with pytest.raises(RuntimeError, match="softcap must be"):
            sdpa(graph, softcap=wrong)


def test_one_kind_of_alibi(graph):
    """cuDNN's slopes and slopes of the user's exclude each other; neither needs a causal mask."""
    slopes = graph.tensor((4,), data_type=cudnn.data_type.FLOAT)
    sdpa(graph, alibi_slopes=slopes)
    sdpa(graph, use_alibi_mask=True, diagonal_alignment=BOTTOM_RIGHT)
    with pytest.raises(RuntimeError, match="use_alibi_mask=True means cuDNN's slopes"):
        sdpa(graph, alibi_slopes=slopes, use_alibi_mask=True)
