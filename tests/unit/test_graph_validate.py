"""``validate``: every refusal, with its type and its words."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn as cudnn
from tests.unit.valid_graphs import FLOAT, HALF, Backward, Forward, Q, lengths

NotSupported = cudnn.cudnnGraphNotSupportedError


# Not supported ------------------------------------------------------------------------------------


def test_absent_means_none_or_false():
    """None and False ask for nothing."""
    made = Forward()
    made.sdpa(
        bias=None,
        use_alibi_mask=np.False_,
        score_mod=None,
        unfuse_fma=True,
        implementation=cudnn.attention_implementation.UNIFIED,
        dropout=None,
    ).validate()


def reordered(made):
    made.v.set_reordering_type(cudnn.tensor_reordering.F16x16)


def strided_heads(made):
    made.q.set_stride((1024, 256, 32, 2))


def two_heads_too_many(made):
    made.k.set_dim((2, 3, 12, 16))


def mixed_types(made):
    made.v.set_data_type(cudnn.data_type.BFLOAT16)


def integers(made):
    for t in (made.q, made.k, made.v):
        t.set_data_type(cudnn.data_type.INT8)
    made.o.set_data_type(cudnn.data_type.INT8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (reordered, "v has reordering"),
        (strided_heads, "q has stride .* last stride must be 1"),
        (two_heads_too_many, "k has 3 heads, which do not divide the 4 heads of q"),
        (mixed_types, "v is data_type.BFLOAT16 and q is data_type.HALF"),
        (integers, "reference: "),
    ],
)
def test_valid_graphs_that_nothing_runs(change, said):
    """Each is cudnnGraphNotSupportedError from validate, with the tensor's name or all reasons."""
    made = Forward().sdpa()
    change(made)
    with pytest.raises(NotSupported, match=said):
        made.validate()


def test_compute_type_must_be_float():
    """Half accumulation is refused; double is the reference engine's."""
    with pytest.raises(NotSupported, match="compute_data_type data_type.HALF"):
        Forward(compute_data_type=HALF).sdpa().validate()
    Forward(compute_data_type=cudnn.data_type.DOUBLE).sdpa().validate()
    with pytest.raises(NotSupported, match="compute_data_type data_type.BFLOAT16"):
        Forward().sdpa(compute_data_type=cudnn.data_type.BFLOAT16).validate()


def test_attn_scale_tensors_are_float():
    """A scale tensor of another type is refused, not converted."""
    made = Forward()
    made.sdpa(attn_scale=made.graph.tensor((1, 1, 1, 1), data_type=HALF, name="scale"))
    with pytest.raises(NotSupported, match="scale is data_type.HALF"):
        made.validate()


def test_graphs_of_one_operation():
    """Nothing, and two operations, are refused with what the graph holds."""
    with pytest.raises(NotSupported, match="holds nothing"):
        cudnn.pygraph().validate()
    made = Forward().sdpa()
    made.sdpa()
    with pytest.raises(NotSupported, match="holds sdpa 'sdpa', sdpa 'sdpa'"):
        made.validate()


# Wrong --------------------------------------------------------------------------------------------


def virtual_output(made):
    made.o.set_output(False)


def wrong_output(made):
    made.o.set_dim(Q)


def overlapping_output(made):
    made.o.set_stride((768, 0, 24, 1))


def short_stride(made):
    made.o.set_stride((24, 1))


def virtual_input(made):
    made.q.set_is_virtual(True)


def three_dimensions(made):
    made.v.set_dim((2, 12, 24)).set_stride((288, 24, 1))


def no_rows(made):
    made.q.set_dim((2, 4, 0, 16))


def other_batch(made):
    made.k.set_dim((3, 2, 12, 16))


def other_head_dim(made):
    made.k.set_dim((2, 2, 12, 8))


def other_keys(made):
    made.v.set_dim((2, 1, 11, 24))


def backwards(made):
    made.q.set_stride((512, 128, -16, 1))


def one_uid_twice(made):
    made.q.set_uid(3)
    made.v.set_uid(3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (virtual_output, r"sdpa::O is virtual.*set_output\(True\)"),
        (wrong_output, r"sdpa::O has dim \(2, 4, 8, 16\); expected \(2, 4, 8, 24\)"),
        (overlapping_output, "sdpa::O is an output .* share an address"),
        (short_stride, "sdpa::O has stride"),
        (virtual_input, "q is virtual, but no node"),
        (three_dimensions, "v must have four dimensions"),
        (no_rows, "q has dim .* at least 1"),
        (other_batch, r"k has dim \(3, 2, 12, 16\); expected \(2, 2, 12, 16\)"),
        (other_head_dim, "k has dim"),
        (other_keys, r"v has dim \(2, 1, 11, 24\); expected \(2, 1, 12, 24\)"),
        (backwards, "q has the negative stride -16"),
        (one_uid_twice, "'q' and 'v' .* both have uid 3"),
    ],
)
def test_wrong_graphs_are_value_errors(change, said):
    """Each is a ValueError from validate that names the tensor, what it has and what it should."""
    made = Forward().sdpa()
    change(made)
    with pytest.raises(ValueError, match=said):
        made.validate()


@pytest.mark.parametrize(
    ("dim", "attributes", "said"),
    [
        ((3, 1, 1, 1), {}, r"seq_len has dim \(3, 1, 1, 1\); expected \(2, 1, 1, 1\)"),
        ((2,), {}, r"seq_len must have four dimensions, \(batch, 1, 1, 1\)"),
        ((2, 1, 1, 1), {"data_type": FLOAT}, "seq_len is data_type.FLOAT; expected INT32"),
    ],
)
def test_wrong_lengths(dim, attributes, said):
    """Length tensors have one integer per batch entry."""
    made = Forward()
    made.sdpa(use_padding_mask=True, seq_len_kv=lengths(made.graph, dim=dim, **attributes))
    with pytest.raises(ValueError, match=said):
        made.validate()


def test_lengths_and_padding_mask_go_together():
    """The flag without lengths, and lengths without the flag, are refused."""
    with pytest.raises(ValueError, match="without seq_len_q or seq_len_kv"):
        Forward().sdpa(use_padding_mask=True).validate()
    made = Forward()
    with pytest.raises(ValueError, match="seq_len_q without use_padding_mask"):
        made.sdpa(seq_len_q=lengths(made.graph)).validate()


def test_a_scale_has_one_element():
    """A scale per head is no scale."""
    made = Forward()
    made.sdpa(attn_scale=made.graph.tensor((1, 4, 1, 1), data_type=FLOAT, name="scale"))
    with pytest.raises(ValueError, match="scale must have one element"):
        made.validate()


@pytest.mark.parametrize("dim", [(2, 4, 8, 12), (1, 4, 8, 12), (1, 1, 8, 1), (2, 1, 1, 12)])
def test_biases_broadcast(dim):
    """Each size of a bias is the whole or 1; nothing else is."""
    made = Forward()
    made.sdpa(bias=made.graph.tensor(dim, name="my bias")).validate()
    for wrong in ((8, 12), (2, 2, 8, 12), (2, 4, 12, 8), (3, 1, 1, 1), (2, 4, 8, 16)):
        made = Forward()
        made.sdpa(bias=made.graph.tensor(wrong, name="my bias"))
        with pytest.raises(ValueError, match=r"my bias has dim .*; expected \(2, 4, 8, 12\)"):
            made.validate()


def test_types_of_biases():
    """Floating-point numbers are added, booleans mask; other integers are neither."""
    types = cudnn.data_type
    for dtype in (
        types.HALF,
        types.BFLOAT16,
        types.FLOAT,
        types.DOUBLE,
        types.BOOLEAN,
        types.UINT8,
    ):
        made = Forward()
        made.sdpa(bias=made.graph.tensor((2, 4, 8, 12), data_type=dtype)).validate()
    made = Forward()
    made.sdpa(bias=made.graph.tensor((2, 4, 8, 12), data_type=types.INT32, name="my bias"))
    with pytest.raises(ValueError, match="my bias is data_type.INT32; expected FLOAT"):
        made.validate()


@pytest.mark.parametrize("dim", [(2, 4, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1)])
def test_block_masks_broadcast_over_batch_and_heads(dim):
    """A block mask has a bit for each block, 8 a byte, and a type that is not inferred from q."""
    made = Forward()
    made.sdpa(block_mask=made.graph.tensor(dim, (1, 1, 7, 3), name="blocks")).validate()
    assert made.graph.lowered.tensors["block_mask"].get_data_type() is cudnn.data_type.UINT8
    for wrong in ((1, 1), (3, 4, 1, 1), (2, 2, 1, 1), (2, 4, 2, 1), (2, 4, 1, 2), (2, 4, 8, 12)):
        made = Forward()
        made.sdpa(block_mask=made.graph.tensor(wrong, name="blocks"))
        with pytest.raises(ValueError, match=r"blocks has dim .*; expected \(2, 4, 1, 1\), a bit"):
            made.validate()
    made = Backward()
    blocks = made.graph.tensor(dim, data_type=cudnn.data_type.BOOLEAN, name="blocks")
    made.sdpa(block_mask=blocks)
    with pytest.raises(ValueError, match="blocks is data_type.BOOLEAN; expected UINT8"):
        made.validate()


@pytest.mark.parametrize("dim", [(4,), (1, 4), (2, 4), (1, 4, 1, 1), (2, 4, 1, 1)])
def test_slopes_are_one_per_head(dim):
    """ALiBi's slopes are (Hq), or (B, Hq) in two or four dimensions; nothing else is."""
    made = Forward()
    made.sdpa(alibi_slopes=made.graph.tensor(dim, data_type=FLOAT, name="slopes")).validate()
    for wrong in ((2,), (3, 4), (4, 2), (2, 4, 1), (2, 4, 8, 1), (4, 2, 1, 1)):
        made = Forward()
        made.sdpa(alibi_slopes=made.graph.tensor(wrong, data_type=FLOAT, name="slopes"))
        with pytest.raises(ValueError, match=r"slopes has dim .*; expected \(4,\)"):
            made.validate()


def test_slopes_are_float():
    """Slopes of another type are refused, not converted."""
    made = Forward()
    made.sdpa(alibi_slopes=made.graph.tensor((4,), data_type=HALF, name="slopes"))
    with pytest.raises(NotSupported, match="slopes is data_type.HALF; plans take alibi_slopes as"):
        made.validate()


def test_types_must_be_known():
    """Without a type on the tensor or the graph there is nothing to assume."""
    graph = cudnn.pygraph(handle=cudnn.create_handle(device="cpu"))
    o, _ = graph.sdpa(*(graph.tensor(Q) for _ in range(3)), generate_stats=False)
    o.set_output(True)
    with pytest.raises(ValueError, match="q has no data type"):
        graph.validate()
