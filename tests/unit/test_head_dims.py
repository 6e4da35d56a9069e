"""Which head dimensions and element types each engine takes, and what it says of others."""

from __future__ import annotations

import pytest

import dlattn as cudnn
from tests.unit.valid_graphs import FLOAT, plans


@pytest.mark.parametrize("backward", [False, True])
def test_every_multiple_of_8_up_to_512(backward):
    """Every pair of them has a kernel; up to 256, Hopper's own comes first."""
    names = ["bwd_sm90", "bwd_sm80"] if backward else ["fwd_sm90", "fwd_sm80"]
    for dims in ((8, 8), (256, 256), (264, 64), (64, 264), (512, 8), (512, 512)):
        expected = names if max(dims) <= 256 else names[1:]
        assert plans("sm_90a", *dims, backward=backward) == expected
        assert plans("sm_80", *dims, backward=backward) == names[1:]


def test_what_a_small_shared_memory_leaves_out():
    """A backward of more than 480 and 480 does not fit 99 KB, and says so."""
    assert plans("sm_120", 480, 512, backward=True) == ["bwd_sm80"]
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="one of them must be at most 480"):
        plans("sm_120", 488, 512, backward=True)
    assert plans("sm_120", 512, 512) == ["fwd_sm80"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((12, 16), "head dimension of q and k must be a multiple of 8; got 12. .* zeros to 16"),
        ((16, 65), "head dimension of v must be a multiple of 8; got 65. .* zeros to 72"),
        ((520, 16), "head dimension of q and k must be at most 512; got 520"),
        ((16, 1024), "head dimension of v must be at most 512; got 1024"),
    ],
)
def test_other_head_dims(backward, dims, said):
    """On a GPU they are refused with what to do; the reference engine takes them."""
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=said):
        plans("sm_90a", *dims, backward=backward)
    assert plans("cpu", *dims, backward=backward) == ["reference"]


@pytest.mark.parametrize("dtype", [FLOAT, cudnn.data_type.DOUBLE])
def test_other_element_types(dtype):
    """The same of fp32 and fp64, with the names of the types that a GPU takes."""
    with pytest.raises(
        cudnn.cudnnGraphNotSupportedError,
        match=rf"tensor cores take HALF or BFLOAT16; the graph has {dtype.name}. Cast q, k and v",
    ):
        plans("sm_80", 64, 64, dtype=dtype)
    assert plans("cpu", 64, 64, dtype=dtype) == ["reference"]
