"""Sweeps the tilings of the portable kernels: ``python -m bench.tune_sm80 [forward|backward]``.

Prints, per shape and tiling, the ratio of FlashAttention-2's time (torch's FLASH_ATTENTION backend)
to ours, and the geometric mean per tiling. Every tiling is checked against FlashAttention-2 first,
and not timed if it is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.machine import machine, require_gpu
from bench.sm80_cases import Shape, make_tensors, prepare, shapes
from bench.timing import geometric_mean, interleaved
from dlattn.config import settings
from dlattn.plans.bwd_sm80 import BwdSm80, BwdTiling
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm80 import FwdSm80, FwdTiling
from dlattn.problem import Direction
from dlattn.runtime import nvrtc

FORWARD: dict[int, list[FwdTiling]] = {
    64: [
        FwdTiling(128, 64, 4, 2, 2),
        FwdTiling(128, 64, 4, 2, 3),
        FwdTiling(128, 64, 4, 1, 2),
        FwdTiling(128, 64, 4, 1, 3),
        FwdTiling(128, 96, 4, 2, 2),
        FwdTiling(128, 128, 4, 2, 2),
        FwdTiling(128, 128, 4, 1, 2),
        FwdTiling(192, 64, 4, 1, 2),
    ],
    128: [
        FwdTiling(128, 64, 4, 1, 2),
        FwdTiling(128, 64, 4, 2, 2),
        FwdTiling(128, 48, 4, 1, 2),
        FwdTiling(128, 48, 4, 2, 2),
        FwdTiling(128, 32, 4, 2, 2),
        FwdTiling(128, 32, 4, 1, 2),
        FwdTiling(128, 64, 8, 1, 1),
    ],
}
BACKWARD: dict[int, list[BwdTiling]] = {
    64: [
        BwdTiling(128, 128, 8, 4, 4, 4, 2, 1),
        BwdTiling(128, 128, 8, 4, 4, 4, 2, 2),
        BwdTiling(128, 128, 8, 2, 4, 4, 2, 1),
        BwdTiling(128, 128, 8, 4, 2, 4, 2, 1),
        BwdTiling(64, 64, 4, 2, 2, 2, 2, 1),
        BwdTiling(64, 64, 4, 2, 2, 2, 2, 2),
        BwdTiling(64, 64, 4, 2, 2, 2, 1, 1),
        BwdTiling(64, 64, 4, 2, 4, 2, 2, 1),
        BwdTiling(64, 96, 4, 2, 2, 2, 2, 1),
        BwdTiling(64, 128, 4, 2, 4, 2, 2, 1),
        BwdTiling(64, 128, 4, 2, 4, 2, 2, 2),
        BwdTiling(64, 128, 4, 1, 4, 2, 2, 1),
        BwdTiling(64, 128, 8, 2, 4, 2, 2, 2),
    ],
    128: [
        BwdTiling(64, 128, 8, 2, 4, 4, 2, 2),
        BwdTiling(64, 128, 8, 2, 4, 2, 2, 2),
        BwdTiling(64, 128, 8, 2, 2, 4, 2, 2),
        BwdTiling(64, 128, 8, 2, 4, 4, 2, 1),
        BwdTiling(64, 96, 8, 2, 2, 4, 2, 2),
        BwdTiling(64, 64, 4, 2, 2, 2, 1, 1),
        BwdTiling(32, 128, 8, 2, 4, 2, 2, 2),
    ],
}


def flash2(
    shape: Shape, tensors: dict[str, torch.Tensor]
) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    """FlashAttention-2 as torch ships it, forward and backward, without autograd around it."""
    aten, scale = torch.ops.aten, shape.head_dim**-0.5
    q, k, v, dO = (tensors[role] for role in ("q", "k", "v", "dO"))

    def forward() -> tuple[torch.Tensor, ...]:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, shape.causal, False, scale=scale
        )

    o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return aten._scaled_dot_product_flash_attention_backward(
            dO, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, shape.causal, seed, offset,
            scale=scale,
        )  # fmt: skip

    return {"forward": forward, "backward": backward}


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    return bool(difference < 1e-2)


def sweep(direction: Direction) -> None:
    """Time every tiling of one pass on every shape."""
    table, plan = (FORWARD, FwdSm80) if direction is Direction.FORWARD else (BACKWARD, BwdSm80)
    ratios: dict[tuple[int, str], list[float]] = {}
    for shape in shapes():
        tensors = make_tensors(shape)
        peers = flash2(shape, tensors)
        o, lse = peers["forward"]()[:2]  # what the backward reads
        tensors["o"].copy_(o)
        tensors["stats"].copy_(lse.unsqueeze(-1))
        peer = peers[direction.value]
        right = right_calls(plan, shape, tensors, table[shape.head_dim], peer())
        times = interleaved({"FA2": peer, **right}, rounds=3, seconds=0.01)
        base = times.pop("FA2")
        flops = shape.flops(direction) * 1e-9
        print(f"{shape} {direction.value}: FA2 {flops / base:.0f} TFLOP/s")
        for name, ms in times.items():
            ratios.setdefault((shape.head_dim, name), []).append(base / ms)
            print(f"  {name:48} {flops / ms:5.0f}  x{base / ms:.3f}", flush=True)
    for (head_dim, name), values in ratios.items():
        print(f"d{head_dim} {name:48} mean x{geometric_mean(values):.3f} least x{min(values):.3f}")


def right_calls(
    plan: type[CudaPlan],
    shape: Shape,
    tensors: dict[str, torch.Tensor],
    tilings: Sequence[Any],
    expected: Sequence[torch.Tensor],
) -> dict[str, Callable[[], object]]:
    """The tilings that compile, fit and agree with the peer's results, ready to be called.

    They are named by their C++ type and, if that is more than one, by the blocks that must fit on a
    multiprocessor.
    """

    def attempt(tiling: Any) -> Callable[[], None] | None:
        try:
            return prepare(plan, shape, tensors, tiling)
        except Exception as error:  # a tiling that does not fit is a row of the table, not an end
            print(f"SKIP {shape} {tiling.cpp}: {str(error)[:200]}", flush=True)
            return None

    with ThreadPoolExecutor(16) as pool:
        calls = list(pool.map(attempt, tilings))
    outputs = ("o",) if plan.name.startswith("fwd") else ("dQ", "dK", "dV")
    kept: dict[str, Callable[[], object]] = {}
    for tiling, call in zip(tilings, calls, strict=True):
        if call is None:
            continue
        for role in outputs:
            tensors[role].fill_(float("nan"))
        call()
        results = zip(outputs, expected, strict=False)
        wrong = [role for role, theirs in results if not agree(tensors[role], theirs)]
        name = tiling.cpp + (f" x{tiling.min_blocks}" if tiling.min_blocks > 1 else "")
        if wrong:
            print(f"WRONG {shape} {name}: {wrong}", flush=True)
        else:
            kept[name] = call
    return kept


def main() -> None:
    require_gpu("bench.tune_sm80")
    print(f"{machine()}; NVRTC {nvrtc.load(settings().cache_dir).version}")
    for direction in sys.argv[1:] or ["forward", "backward"]:
        sweep(Direction(direction))


if __name__ == "__main__":
    main()
