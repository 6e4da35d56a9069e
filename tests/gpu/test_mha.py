"""Attention written as primitive operations, on a GPU: the very bits of ``sdpa``."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings

from tests.callers import gpu_callers
from tests.mha import Mha
from tests.mha_checks import check_mha
from tests.primitive_strategies import mhas
from tests.reference.test_mha import NAMES, SUBSETS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]


@pytest.mark.parametrize("subset", range(len(SUBSETS)), ids=NAMES)
@pytest.mark.parametrize("seq", [64, 300, 1024])
def test_every_subset(seq: int, subset: int) -> None:
    """Every subset of the parts, of head dimension 64."""
    sizes = {"seq_q": seq, "seq_kv": seq, "head_dim_qk": 64, "head_dim_v": 64}
    for caller, softmax in product(gpu_callers(), ("primitives", "node")):
        check_mha(Mha(dtype="float16", softmax=softmax, **sizes, **SUBSETS[subset]), caller)


@settings(settings.get_profile("gpu"))
@given(mhas("gpu"))
def test_random(case: Mha) -> None:
    """Any attention of primitive operations, of tensors of each framework."""
    for caller in gpu_callers():
        check_mha(case, caller)
