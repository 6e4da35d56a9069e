"""Backwards of attention written as primitive operations, on a GPU: beside float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.callers import gpu_callers
from tests.mha import Mha
from tests.mha_backward import MhaBackward, check_backward
from tests.mha_bprop import check_bprop
from tests.primitive_strategies import backwards
from tests.reference.test_mha import NAMES, SUBSETS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

#: cuDNN's flash form, and its Mha-bprop.
FORMS = (check_backward, check_bprop)


@pytest.mark.parametrize("check", FORMS)
@pytest.mark.parametrize("subset", range(len(SUBSETS)), ids=NAMES)
@pytest.mark.parametrize("seq", [64, 300, 1024, 4096])
def test_every_subset(check: Callable[..., Any], seq: int, subset: int) -> None:
    """Every subset of the parts, of head dimension 64: forward and backward."""
    heads = {"batch": 1, "heads_q": 1, "heads_k": 1, "heads_v": 1} if seq > 1024 else {}
    sizes = {"seq_q": seq, "seq_kv": seq, "head_dim_qk": 64, "head_dim_v": 64, **heads}
    callers = gpu_callers()
    of = Mha(dtype=("float16", "bfloat16")[subset % 2], **sizes, **SUBSETS[subset])
    late = subset % 3 != 0
    check(MhaBackward(of, late=late, d_bias=True, again=late), callers[subset % len(callers)])


@pytest.mark.parametrize("check", FORMS)
@settings(settings.get_profile("gpu"))
@given(case=backwards("gpu"))
def test_random(check: Callable[..., Any], case: MhaBackward) -> None:
    """Any backward of primitive operations, of tensors of each framework."""
    for caller in gpu_callers():
        check(case, caller)


@pytest.mark.parametrize("dim_qk, dim_v", [(8, 8), (128, 128), (192, 128), (256, 256), (512, 512)])
def test_head_dims(dim_qk: int, dim_v: int) -> None:
    """S of each class of head dimensions, with what takes most registers."""
    of = Mha(
        dtype="float16", seq_q=200, seq_kv=333, head_dim_qk=dim_qk, head_dim_v=dim_v,
        scale="scores", bias=(True, True, True, True), padding="qk", causal=3, bottom_right=True,
        dropout="rng",
    )  # fmt: skip
    d_bias = dim_qk <= 256
    for caller in gpu_callers():
        check_bprop(MhaBackward(of, d_bias=d_bias, again=True), caller)
        check_bprop(MhaBackward(of, d_bias=d_bias), caller)
