"""Merging attention over disjoint sets of keys: ``cuda_src/kernels/merge_states.cuh``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from dlattn.dtypes import data_type, to_cpp
from dlattn.plans.direct import DirectPlan, direct_source, has_wide_rows, lanes_of, unit_size
from dlattn.plans.kernels import MOST_BLOCKS_YZ, KernelLaunch
from dlattn.problem import TensorSpec
from dlattn.problem.score import Array
from dlattn.runtime.target import Target

THREADS = 256

#: Types of outputs that states may have.
STATE_TYPES = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT)


class StateRef(ctypes.Structure):
    """Address and strides (in elements) of rows, or of a number for each row."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
    ]


class MergeParams(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = [
        ("o_first", StateRef),
        ("lse_first", StateRef),
        ("o_other", StateRef),
        ("lse_other", StateRef),
        ("o_step", ctypes.c_int64),
        ("lse_step", ctypes.c_int64),
        ("o", StateRef),
        ("lse", StateRef),
        ("states", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("outer", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class MergeStates(DirectPlan):
    """The union of a first state and others.

    Its tensors: ``o_first`` and ``o`` (batch, outer, inner, D) and ``o_other`` (states - 1, batch,
    outer, inner, D) with contiguous columns; ``lse_first``, ``lse`` and ``lse_other`` the same
    without D, fp32. The outer and the inner dimension are heads and tokens, in either order.
    """

    name = "merge_states"

    @classmethod
    def refusal(cls, o: TensorSpec, target: Target) -> str | None:
        """Why no kernel merges such states, or ``None``."""
        if target.kind == "cuda" and target.capability < (8, 0):
            return f"it needs compute capability 8.0 or above; {target} has {target.version}."
        if max(o.dim[0], o.dim[1] * o.dim[2]) >= 2**31 or o.dim[3] >= 2**30:
            return (
                "there must be fewer than 2**31 rows in a batch entry, of fewer than 2**30 columns "
                f"each; got {o.dim}."
            )
        return None

    def make_argument(self) -> MergeParams:
        others = self.tensors["o_other"]
        batch, outer, inner, head_dim = self.tensors["o"].dim
        params = MergeParams(
            o_step=others.stride[0],
            lse_step=self.tensors["lse_other"].stride[0],
            states=1 + others.dim[0],
            batch=batch,
            outer=outer,
            inner=inner,
            head_dim=head_dim,
        )
        for role, spec in self.tensors.items():
            first = int(role.endswith("other"))
            setattr(params, role, StateRef(0, *spec.stride[first : first + 3]))
        return params

    def kernel(self) -> KernelLaunch:
        o, others = self.tensors["o"], self.tensors["o_other"]
        batch, outer, inner, head_dim = o.dim
        types = (o.dtype, others.dtype)
        rows = (self.tensors[role] for role in ("o_first", "o_other", "o"))
        wide = (
            self.wide and head_dim % unit_size(True, *types) == 0 and all(map(has_wide_rows, rows))
        )
        lanes = lanes_of(head_dim, unit_size(wide, *types))
        source = direct_source(
            "merge_states",
            MergeParams,
            THREADS,
            *map(to_cpp, types),
            lanes,
            wide,
            2 if others.dim[0] == 1 else 0,
        )
        blocks = -(-outer * inner // (THREADS // lanes))
        return KernelLaunch(source, (blocks, min(batch, MOST_BLOCKS_YZ), 1), THREADS, 0)

    def on_host(self, arrays: Mapping[str, Array]) -> None:
        is_wide = any(x.dtype == np.float64 for x in arrays.values())
        compute = np.float64 if is_wide else np.float32
        o = [arrays["o_first"], *arrays["o_other"]]
        lse = np.stack([arrays["lse_first"], *arrays["lse_other"]]).astype(compute)
        with np.errstate(all="ignore"):
            merged, sums = merge(np.stack([x.astype(compute) for x in o]), lse)
            arrays["o"][...], arrays["lse"][...] = merged, sums


def merge(o: Array, lse: Array) -> tuple[Array, Array]:
    """The union of states (N, ..., D) with log-sum-exps (N, ...); see :func:`merge_states`."""
    empty = np.isinf(lse)
    largest = np.where(empty, -np.inf, lse).max(axis=0)
    # Without this, empty states alone would ask for exp(-inf - -inf).
    weights = np.where(empty, 0, np.exp(lse - np.where(np.isneginf(largest), 0, largest)))
    total = weights.sum(axis=0)
    parts = np.where(weights[..., None] == 0, 0, o) * weights[..., None]
    merged = np.divide(
        parts.sum(axis=0), total[..., None], out=np.zeros_like(o[0]), where=total[..., None] != 0
    )
    return merged, np.where(np.isneginf(largest), lse[0], largest + np.log(total))
