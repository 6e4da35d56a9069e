"""The Hopper backward: what its tilings take, and no spills in what few problems do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from dlattn.dtypes import data_type
from dlattn.plans import bwd_sm90
from dlattn.plans.bwd_division import Division
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.bwd_sm90_tiling import tilings
from dlattn.plans.kernels import KernelLaunch
from dlattn.problem import Direction, Problem, Scale
from dlattn.runtime import jit
from dlattn.runtime.target import KNOWN
from tests.compile.problems import MASKS, plan_for
from tests.unit.test_backward_plans import geometry
from tests.unit.test_backward_plans import problem as backward

#: Head dims -> tile_q, tile_k, bytes of shared memory and registers a thread at launch of the main
#: kernel: what ``setmaxnreg`` divides.
RESOURCES = {
    (64, 64): (128, 128, 218112, 128),
    (96, 96): (64, 128, 224256, 128),
    (64, 128): (64, 128, 183296, 128),
    (128, 128): (64, 128, 232448, 128),
    (192, 128): (64, 128, 231424, 128),
    (192, 192): (64, 128, 215040, 128),
    (256, 256): (64, 128, 223232, 128),
}


@pytest.mark.parametrize("head_dims", RESOURCES)
def test_resources(head_dims: tuple[int, int]) -> None:
    """Tiles, shared memory and registers are those of the table; a change must be meant."""
    problem = Problem(
        Direction.BACKWARD, data_type.BFLOAT16, *head_dims, (Scale(positive=True),),
        MASKS["causal"], data_type.FLOAT,
    )  # fmt: skip
    plan = plan_for(BwdSm90, problem, "sm_90a", seq=4096)
    assert isinstance(plan, BwdSm90)
    kernel = plan.kernels()[1]
    registers = jit.compile_kernel(kernel.source, "sm_90a").registers
    found = (plan.tiling.tile_q, plan.tiling.tile_k, kernel.shared, registers)
    assert found == RESOURCES[head_dims]


def assert_compiled_cleanly(kernels: Iterable[KernelLaunch]) -> None:
    """Each is compiled for Hopper without spills or ptxas performance warnings."""
    for kernel in kernels:
        compiled = jit.compile_kernel(kernel.source, "sm_90a")
        assert not (compiled.spill_stores or compiled.spill_loads or compiled.warnings)


@pytest.mark.parametrize("dtype", [data_type.BFLOAT16, data_type.HALF])
@pytest.mark.parametrize(
    "head_dim, mask, seq",
    [(64, "full", 20_000), (128, "full", 20_000), (64, "causal", 200), (128, "causal", 200),
     (128, "full", 200), (256, "causal", 200)],
)  # fmt: skip
def test_long_and_short_items(head_dim: int, mask: str, seq: int, dtype: data_type) -> None:
    """Items in parts, and few steps, take no registers that there are not."""
    problem = Problem(
        Direction.BACKWARD, dtype, head_dim, head_dim, (Scale(positive=True),), MASKS[mask],
        data_type.FLOAT,
    )  # fmt: skip
    right = 0 if mask == "causal" else None
    plan = plan_for(BwdSm90, problem, "sm_90a", seq=seq, left=None, right=right)
    assert isinstance(plan, BwdSm90)
    assert (plan.tiling.adds_keys, plan.tiling.shares_last) == (seq > 1000, seq < 1000)
    assert_compiled_cleanly(plan.kernels())


@pytest.mark.parametrize("dtype", [data_type.BFLOAT16, data_type.HALF])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128])
def test_few_items_under_a_causal_mask(head_dim: int, dtype: data_type) -> None:
    """Parts of their queries take no registers that there are not."""
    shape = geometry(1, 4, 4, 4096, 4096, head_dim, causal=True)
    problem = replace(backward(head_dim), dtype=dtype, masks=MASKS["causal"])
    plan = BwdSm90(problem, shape, KNOWN["sm_90a"])
    assert plan.tiling.adds_keys and plan._params.items.parts.number > 1
    assert_compiled_cleanly(plan.kernels())


@pytest.mark.parametrize("dtype", [data_type.BFLOAT16, data_type.HALF])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 66])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_one_key_tile(head_dim: int, batch: int, causal: bool, dtype: data_type) -> None:
    """Items that have all of their queries' dQ, in parts or not, have registers for it."""
    shape = geometry(batch, 4, 4, 100 if causal else 2000, 100, head_dim, causal=causal)
    masks = MASKS["causal" if causal else "full"]
    plan = BwdSm90(replace(backward(head_dim), dtype=dtype, masks=masks), shape, KNOWN["sm_90a"])
    assert plan.tiling.relays
    assert plan.tiling.adds_keys == (batch == 1 and not causal)
    assert_compiled_cleanly(plan.kernels())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(
    "head_dims", [(40, 40), (64, 64), (96, 96), (128, 64), (128, 128), (192, 128)]
)
def test_one_key_tile_of_each_sequence(
    head_dims: tuple[int, int], mask: str, deterministic: bool
) -> None:
    """The same of packed sequences, whether items are divided or not."""
    problem = Problem(
        Direction.BACKWARD, data_type.BFLOAT16, *head_dims, (Scale(positive=True),), MASKS[mask],
        data_type.FLOAT, deterministic=deterministic, ragged=True,
    )  # fmt: skip
    plan = plan_for(BwdSm90, problem, "sm_90a", seq=100)
    assert isinstance(plan, BwdSm90) and plan.tiling.relays
    relaying = [it for it in tilings(problem) if it.relays]
    assert {it.adds_keys for it in relaying} == {False, max(head_dims) <= 128}
    others = [BwdSm90(plan.problem, plan.geometry, plan.target, it) for it in relaying]
    assert_compiled_cleanly(kernel for it in others for kernel in it.kernels())


@pytest.mark.parametrize("dtype", [data_type.BFLOAT16, data_type.HALF])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_divided_groups_in_a_fixed_order(head_dim: int, dtype: data_type) -> None:
    """Taking turns to add to dK and dV takes no registers that there are not."""
    shape = geometry(4, 4, 4 * 71, 4096, 4096, head_dim, causal=True)
    ordered = backward(head_dim, deterministic=True)
    problem = replace(ordered, dtype=dtype, masks=MASKS["causal"])
    plan = BwdSm90(problem, shape, KNOWN["sm_90a"])
    assert plan.tiling.adds_keys
    assert_compiled_cleanly(plan.kernels())


@pytest.mark.parametrize(
    "dtype, deterministic", [(data_type.BFLOAT16, False), (data_type.HALF, True)]
)
@pytest.mark.parametrize("mask", ["full", "causal", "left", "window"])
@pytest.mark.parametrize("head_dims", [(8, 8), (64, 32), (64, 64), (96, 96), (128, 128)])
def test_ragged_divided_groups(
    head_dims: tuple[int, int],
    mask: str,
    dtype: data_type,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items of some heads of a group take no registers that there are not."""
    monkeypatch.setattr(bwd_sm90, "divided_ragged_group", lambda *_: Division(1, 0))
    problem = Problem(
        Direction.BACKWARD, dtype, *head_dims, (Scale(positive=True),), MASKS[mask],
        data_type.FLOAT, deterministic=deterministic, ragged=True,
    )  # fmt: skip
    left = 2048 if mask in ("left", "window") else None
    right = 0 if mask in ("causal", "window") else None
    plan = plan_for(BwdSm90, problem, "sm_90a", seq=4096, left=left, right=right)
    assert isinstance(plan, BwdSm90) and plan.tiling.adds_keys
    kernels = [*plan.first_kernels(), *plan.kernels()]
    assert_compiled_cleanly(kernels)
    assert all(kernel.shared <= KNOWN["sm_90a"].shared_memory for kernel in kernels)
