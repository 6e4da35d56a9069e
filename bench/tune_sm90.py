"""Sweeps the tilings of the Hopper forward: ``python -m bench.tune_sm90 [64 128 256]``.

Prints, per shape and tiling, TFLOP/s and the ratio of the best peer's time to ours, and per head
dimension and mask the geometric mean of each tiling. Every tiling is checked first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.sm80_cases import Shape, make_tensors, prepare, shapes
from bench.timing import geometric_mean, interleaved
from bench.tune_sm80 import agree, flash2
from dlattn.plans.fwd_sm90 import FwdSm90, Sm90FwdTiling
from dlattn.problem import Direction

#: consumers, tile_k, stages, q_stages, o_slabs; each with all four choices of the two flags.
BASES = {
    64: [
        (3, 128, 2, 2, 1),
        (3, 128, 3, 2, 1),
        (3, 64, 4, 2, 1),
        (2, 128, 3, 2, 1),
        (2, 192, 2, 2, 1),
    ],
    128: [
        (2, 128, 2, 2, 2),
        (2, 128, 2, 2, 1),
        (2, 96, 2, 2, 2),
        (2, 64, 4, 2, 2),
        (2, 160, 2, 1, 1),
    ],
    256: [(2, 64, 2, 1, 1), (2, 64, 2, 1, 2)],
}
TILINGS = {
    head_dim: [
        Sm90FwdTiling(*base, ping_pong, exponentials_first)
        for base in bases
        for ping_pong in (False, True)
        for exponentials_first in (False, True)
    ]
    for head_dim, bases in BASES.items()
}


def flash3(shape: Shape, tensors: dict[str, torch.Tensor]) -> Callable[[], object] | None:
    """FlashAttention-3's forward, if the folder ``PEERS`` has its binary."""
    folder = os.environ.get("PEERS")
    if not folder:
        return None
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        torch.ops.load_library(f"{folder}/fa3/_C.so")
    q, k, v = (tensors[role].transpose(1, 2) for role in ("q", "k", "v"))
    return lambda: torch.ops.flash_attn_3.fwd(
        q, k, v, softmax_scale=shape.head_dim**-0.5, is_causal=shape.causal
    )


def sweep(head_dim: int) -> None:
    ratios: dict[tuple[bool, str], list[float]] = {}
    for shape in shapes((head_dim,)):
        tensors = make_tensors(shape)
        want = flash2(shape, tensors)["forward"]()[0]  # type: ignore[index]
        contenders: dict[str, Callable[[], object]] = {}
        third = flash3(shape, tensors)
        if third is not None:
            contenders["FA3"] = third
        tilings = TILINGS[head_dim]
        with ThreadPoolExecutor(16) as pool:
            calls = list(pool.map(lambda t: prepare(FwdSm90, shape, tensors, t), tilings))  # noqa: B023
        for tiling, call in zip(tilings, calls, strict=True):
            name = tiling.cpp
            tensors["o"].fill_(float("nan"))
            call()
            if agree(tensors["o"], want):
                contenders[name] = call
            else:
                print(f"WRONG {shape} {name}", flush=True)
        times = interleaved(contenders, rounds=3, seconds=0.01)
        flops = shape.flops(Direction.FORWARD) * 1e-9
        base = times.pop("FA3", 1.0)
        print(f"{shape}: FA3 {flops / base:.0f} TFLOP/s")
        for name, ms in times.items():
            ratios.setdefault((shape.causal, name), []).append(base / ms)
            print(f"  {name:52} {flops / ms:5.0f}  x{base / ms:.3f}", flush=True)
    for (causal, name), values in ratios.items():
        each = " ".join(f"{value:.3f}" for value in values)
        mask = "causal" if causal else "full"
        print(f"d{head_dim} {mask:6} {name:52} mean x{geometric_mean(values):.3f} ({each})")


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["64", "128", "256"]:
        sweep(int(argument))
