"""The argument ``dropout``: what is taken, and what is refused, by the call or by ``validate``."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.problem import FlashDropout, GivenMask, Philox
from tests.unit.valid_graphs import FLOAT, HALF, Backward, Forward, Q

INT32, INT64 = cudnn.data_type.INT32, cudnn.data_type.INT64
BOOLEAN, DOUBLE = cudnn.data_type.BOOLEAN, cudnn.data_type.DOUBLE
SCORES = (*Q[:3], 12)


def number(made, data_type=INT64, dim=(1, 1, 1, 1), **attributes):
    return made.graph.tensor(dim, data_type=data_type, name="number", **attributes)


def mask(made, dim=SCORES, data_type=HALF):
    return made.graph.tensor(dim, data_type=data_type, name="mask")


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_random(kind):
    """Seed and offset of either integer type, on the device or by value, or Python's; the scale is
    that of the user's probability."""
    for entry in (
        lambda made: number(made),
        lambda made: number(made, INT32),
        lambda made: number(made, is_pass_by_value=True),
        lambda made: made.graph.tensor_scalar(-3),
        lambda made: -3,
        lambda made: np.int32(-3),
    ):
        made = kind()
        lowered = made.sdpa(dropout=(0.1, entry(made), entry(made))).graph.lowered
        geometry = lowered.geometry
        assert lowered.problem.dropout == Philox() and geometry.dropout_p == 0.1
        assert (geometry.dropout_scale, geometry.dropout_scale_inv) == (1 / 0.9, 0.9)
        if "dropout_seed" not in geometry.tensors:
            assert (geometry.dropout_seed, geometry.dropout_offset) == (-3, -3)


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_algorithms(kind):
    """FlashAttention's dropout computes with the probability in float32, and so do its scales."""
    lowered = kind().sdpa(dropout=(0.6, 1, 2), dropout_algorithm="flash").graph.lowered
    assert lowered.problem.dropout == FlashDropout()
    geometry, keep = lowered.geometry, np.float32(1) - np.float32(0.6)
    assert geometry.dropout_p == np.float32(0.6) and geometry.dropout_scale_inv == keep
    assert geometry.dropout_scale == 1 / float(keep)
    for algorithm in (None, "philox"):
        lowered = kind().sdpa(dropout=(0.6, 1, 2), dropout_algorithm=algorithm).graph.lowered
        assert lowered.problem.dropout == Philox() and lowered.geometry.dropout_p == 0.6


def test_refused_algorithms():
    """There are two; nothing is drawn of a mask, or without dropout; what float32 rounds to 1 is
    no probability."""
    for given, said in (
        ({"dropout": (0.1, 0, 0), "dropout_algorithm": "threefry"}, "must be one of 'philox', 'fl"),
        ({"dropout": (0.1, 0, 0), "dropout_algorithm": 1}, "must be one of 'philox', 'flash'"),
        ({"dropout_algorithm": "flash"}, "dropout_algorithm without dropout"),
    ):
        with pytest.raises(RuntimeError, match=said):
            Forward().sdpa(**given)
    made = Forward()
    with pytest.raises(RuntimeError, match="with a mask"):
        made.sdpa(dropout=(mask(made), 2.0), dropout_algorithm="flash")
    made.sdpa(dropout=(1 - 1e-9, 0, 0), dropout_algorithm="flash")
    with pytest.raises(ValueError, match="at least 0 and at most 1"):
        made.validate()


def test_wide_seeds():
    """A Python int has the 64 low bits of its two's complement."""
    made = Forward()
    geometry = made.sdpa(dropout=(0.1, 2**64 - 1, 2**63)).graph.lowered.geometry
    assert (geometry.dropout_seed, geometry.dropout_offset) == (-1, -(2**63))


@pytest.mark.parametrize(("data_type", "dim", "contiguous"), [
    (HALF, SCORES, True), (FLOAT, (1, 4, 1, 12), True), (BOOLEAN, (2, 1, 8, 1), False),
    (cudnn.data_type.UINT8, (1, 1, 1, 1), False),
])  # fmt: skip
def test_masks(data_type, dim, contiguous):
    """Masks of every type and of sizes 1; scales are tensors, or numbers."""
    made = Forward()
    problem = made.sdpa(dropout=(mask(made, dim, data_type), 1.25)).graph.lowered.problem
    assert problem.dropout == GivenMask(data_type, contiguous)
    made = Backward()
    scales = number(made, FLOAT), number(made, FLOAT, is_pass_by_value=True)
    lowered = made.sdpa(dropout=(mask(made, dim, data_type), *scales)).graph.lowered
    assert lowered.problem.dropout == GivenMask(data_type, contiguous)
    assert {"dropout_mask", "dropout_scale", "dropout_scale_inv"} < set(lowered.geometry.tensors)


def test_a_probability_of_zero_drops_nothing():
    """It skips dropout, whose tensors a pack may then leave out, unless the mask is wanted."""
    made = Forward()
    lowered = made.sdpa(dropout=(0.0, number(made), number(made))).graph.lowered
    assert lowered.problem.dropout is None
    assert "dropout_seed" not in lowered.geometry.tensors
    made = Forward()
    dump = made.graph.tensor(SCORES, name="dump", data_type=FLOAT)
    lowered = made.sdpa(dropout=(0.0, number(made), number(made)), rng_dump=dump).graph.lowered
    assert lowered.problem.dropout == Philox() and "rng_dump" in lowered.outputs


@pytest.mark.parametrize("algorithm", [None, "flash"])
@pytest.mark.parametrize("p", [1.5, -0.1, 1e300, float("inf"), float("nan"), 10**400])
def test_probabilities(p, algorithm):
    """A probability is at least 0 and at most 1: else ValueError from validate, which says what was
    given."""
    made = Forward()
    made.sdpa(dropout=(p, number(made), number(made)), dropout_algorithm=algorithm)
    with pytest.raises(ValueError, match=f"at least 0 and at most 1.* got {re.escape(str(p))}"):
        made.validate()


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("entries", "said"), [
    (lambda made: (number(made, HALF), 0), "number is data_type.HALF; expected INT32 or INT64"),
    (lambda made: (0, number(made, dim=(2, 1, 1, 1))), "number must have one element"),
])  # fmt: skip
def test_tensors_are_validated(p, entries, said):
    """Seed and offset are integers of one element, whatever p is."""
    made = Forward()
    made.sdpa(dropout=(p, *entries(made)))
    with pytest.raises(ValueError, match=said):
        made.validate()


@pytest.mark.parametrize(("arguments", "said"), [
    (lambda made: {"dropout": (mask(made, (2, 4, 8, 13)), 2.0)}, "mask has dim .* expected"),
    (lambda made: {"dropout": (mask(made, data_type=INT32), 2.0)}, "mask is data_type.INT32"),
    (lambda made: {"dropout": (0.1, 0, 0), "rng_dump": mask(made, (2, 4, 8, 1), FLOAT)},
     "mask has dim .* expected"),
])  # fmt: skip
def test_shapes_and_types(arguments, said):
    """Masks broadcast to the scores; a dump has their shape."""
    made = Forward()
    made.sdpa(**arguments(made))
    with pytest.raises(ValueError, match=said):
        made.validate()


def test_what_is_float():
    """Scales are FLOAT; dumps are that, or on the CPU DOUBLE."""
    for arguments, said in (
        (lambda made: {"dropout": (mask(made), number(made, HALF))}, "as data_type.FLOAT only"),
        (lambda made: {"dropout": (0.1, 0, 0), "rng_dump": mask(made)}, "FLOAT, or on the CPU"),
    ):
        made = Forward()
        made.sdpa(**arguments(made))
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=said):
            made.validate()


@pytest.mark.parametrize(("kind", "entries"), [
    (Forward, lambda made: (0.1, 0)),
    (Forward, lambda made: (0.1, 0, 0, 0)),
    (Forward, lambda made: (mask(made), 2.0, 0.5)),
    (Backward, lambda made: (mask(made), number(made))),
    (Forward, lambda made: ()),
    (Forward, lambda made: [0.1, 0, 0]),
])  # fmt: skip
def test_forms(kind, entries):
    """(p, seed, offset); or (mask, scale) forward and (mask, scale, scale_inv) backward, which may
    leave out the inverse of a number."""
    made = kind()
    with pytest.raises(
        RuntimeError, match=r"dropout must be a tuple \(p, seed, offset\) or \(mask"
    ):
        made.sdpa(dropout=entries(made))


@pytest.mark.parametrize(("entries", "said"), [
    ((0.1, 0.5, 0), "seed must be a tensor of the graph or an int"),
    ((0.1, 0, None), "offset must be a tensor of the graph or an int"),
    ((np.ones(3), 2.0), "mask must be a tensor of the graph"),
    ((True, 0), "mask must be a tensor of the graph"),
])  # fmt: skip
def test_entries(entries, said):
    """An entry of the wrong Python type is a TypeError that names it."""
    with pytest.raises(TypeError, match=said):
        Forward().sdpa(dropout=entries)


def test_a_dump_needs_a_mask():
    """rng_dump without dropout asks for nothing that there is."""
    made = Forward()
    with pytest.raises(RuntimeError, match="rng_dump without dropout"):
        made.sdpa(rng_dump=mask(made, SCORES, FLOAT))


@pytest.mark.parametrize("seed", [7, np.int64(7), np.array(7), np.full((1, 1, 1, 1), 7)])
def test_packs_may_hold_numbers(seed):
    """An integer passed by value is a Python or NumPy number in the pack, or an array of one."""
    graph = cudnn.pygraph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu"))
    x = np.random.default_rng(0).standard_normal((1, 2, 9, 8), dtype=np.float32)
    t = graph.tensor_like(x)
    drawn = graph.tensor((1, 1, 1, 1), data_type=INT64, is_pass_by_value=True)
    dump = np.zeros((1, 2, 9, 9), np.float32)
    t_dump = graph.tensor_like(dump)
    o, _ = graph.sdpa(t, t, t, is_inference=True, dropout=(0.5, drawn, 3), rng_dump=t_dump)
    o.set_output(True)
    graph.build()
    graph.execute({t: x, drawn: seed, t_dump: dump, o: np.empty_like(x)})
    assert (dump == cudnn.philox_dropout_mask(0.5, 7, 3, dump.shape)).all()
