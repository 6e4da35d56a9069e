"""The plans beside attention: which kernel they take, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dlattn import states as merging
from dlattn.dtypes import data_type
from dlattn.plans.append import Append, Cache, Rotation
from dlattn.plans.direct import lanes_of, unit_size
from dlattn.plans.merge import MergeStates
from dlattn.problem import TensorSpec
from dlattn.runtime.protocols import compact_strides
from dlattn.runtime.target import KNOWN

HOPPER = KNOWN["sm_90a"]


def spec(*dim: int, dtype: data_type = data_type.HALF) -> TensorSpec:
    return TensorSpec("x", dim, compact_strides(dim), dtype)


def merge(
    batch: int = 2, rows: int = 30, columns: int = 64, states: int = 2, wide: bool = True
) -> MergeStates:
    row = {"o": (batch, rows, 4, columns), "lse": (batch, rows, 4)}
    tensors = {}
    for kind, dim in row.items():
        dtype = data_type.HALF if kind == "o" else data_type.FLOAT
        tensors |= {kind: spec(*dim, dtype=dtype), f"{kind}_first": spec(*dim, dtype=dtype)}
        tensors[f"{kind}_other"] = spec(states - 1, *dim, dtype=dtype)
    return MergeStates(tensors, HOPPER, wide)


def append(
    batch: int = 2, new: int = 3, columns: int = 64, rotary: int = 32, interleaved: bool = True
) -> Append:
    tensors = {
        **{role: spec(batch, 2, 48, columns) for role in ("k_cache", "v_cache")},
        **{role: spec(batch, 2, new, columns) for role in ("k_new", "v_new")},
        **{role: spec(batch, 4, new, columns) for role in ("q", "q_rotated")},
        **{role: spec(48, rotary // 2) for role in ("cos", "sin")},
    }
    rotation = Rotation(interleaved, queries_move=True)
    return Append(tensors, HOPPER, True, batch=batch, cache=Cache(48, batch, 1), rotation=rotation)


def test_sizes_are_run_time_values() -> None:
    """Another batch, length, head dimension or number of states takes the same kernel."""
    assert merge().kernel().source == merge(batch=7, rows=5000, columns=56).kernel().source
    assert merge(states=3).kernel().source == merge(states=9).kernel().source
    assert append().kernel().source == append(batch=9, new=700, columns=40).kernel().source


def test_every_row_has_lanes() -> None:
    """Grids have as many threads as rows need."""
    kernel = merge(batch=3, rows=1001, columns=64).kernel()
    assert kernel.grid == (-(-1001 * 4 * 8 // 256), 3, 1)
    kernel = append(batch=5, new=100, columns=64).kernel()
    assert kernel.grid == (-(-(100 * 2 * 2 + 100 * 4) * 8 // 256), 5, 1)


@pytest.mark.parametrize(
    "made, wide",
    [
        (merge(), True),
        (merge(wide=False), False),  # an address
        (merge(columns=60), False),
        (append(), True),
        (append(rotary=12), False),  # a unit would turn in part
        (append(rotary=24, interleaved=True), True),
        (append(rotary=24, interleaved=False), False),  # halves of 12
    ],
)
def test_wide_accesses(made: MergeStates | Append, wide: bool) -> None:
    """Accesses are wide where every row, and what turns of it, is aligned."""
    types_lanes_wide_rest = re.findall(r"<(.*)>\(p\)", made.kernel().source.text)[0].split(", ")
    assert types_lanes_wide_rest[3] == str(wide).lower()


@pytest.mark.parametrize(
    ("states", "gap", "wide"), [(2, 0, True), (2, 8, True), (2, 4, False), (3, 4, False)]
)
def test_stacked_states_may_begin_anywhere(
    states: int, gap: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the second one is not aligned, no access is wide."""
    size = 1 * 5 * 2 * 8
    memory = np.zeros(states * (size + gap) + 64, np.float16)
    first = -(memory.ctypes.data // 2) % 32
    rows = memory[first : first + states * (size + gap)].reshape(states, size + gap)[:, :size]
    o, lse = rows.reshape(states, 1, 5, 2, 8), np.zeros((states, 1, 2, 5), np.float32)
    assert np.shares_memory(o, memory)
    monkeypatch.setattr(merging, "prepared", lambda *given: given[4])
    plan = merging._prepare(o, lse, None, None, None, None, ("bshd",))
    assert isinstance(plan, MergeStates)
    source = plan.kernel().source.text
    assert re.findall(r"<(.*)>\(p\)", source)[0].split(", ")[3] == str(wide).lower()


def test_lanes() -> None:
    """A row has as few lanes as have a unit each, from 4 to a warp."""
    assert [lanes_of(n, 8) for n in (1, 32, 40, 128, 256, 512)] == [4, 4, 8, 16, 32, 32]
    assert unit_size(True, data_type.FLOAT) == 4
    assert unit_size(True, data_type.FLOAT, data_type.HALF) == 8
    assert unit_size(False, data_type.HALF) == 1


def test_refusals() -> None:
    """What kernels cannot do is refused in a sentence."""
    old = replace(HOPPER, capability=(7, 5))
    rows = spec(2, 30, 4, 64)
    assert MergeStates.refusal(rows, HOPPER) is None
    assert "compute capability 8.0" in (MergeStates.refusal(rows, old) or "")
    assert "fewer than 2**31 rows" in (MergeStates.refusal(spec(1, 2**20, 2**11, 8), HOPPER) or "")
    assert "2**30 columns" in (MergeStates.refusal(spec(1, 1, 1, 2**30), HOPPER) or "")
    assert append().refusal() is None
    assert "the batch must be at most" in (append(batch=2**16).refusal() or "")
