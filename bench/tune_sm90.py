"""Sweeps the tilings of the Hopper kernels: ``python -m bench.tune_sm90 forward 64 128 256``, or
``backward``; ``--seqs 300,576,900`` at other lengths than 1k, 4k and 16k.

Prints, per shape and tiling, TFLOP/s and the ratio of FlashAttention-3's time to ours, and per head
dimension and mask the geometric mean of each tiling. Every tiling is checked first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from bench.machine import require_gpu
from bench.peers.flash import load_flash3
from bench.sm80_cases import SEQS, TOKENS, Shape, make_tensors, shapes
from bench.timing import geometric_mean, interleaved
from bench.tune_sm80 import flash2, right_calls
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.bwd_sm90_tiling import Sm90BwdTiling
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.fwd_sm90_tiling import Sm90FwdTiling
from dlattn.problem import Direction

#: consumers, tile_k, stages, q_stages; each with all four choices of the two flags.
BASES = {
    32: [(4, 64, 6, 2), (3, 96, 4, 2), (3, 128, 4, 2)],
    64: [
        (4, 64, 6, 2),
        (3, 96, 4, 2),
        (3, 64, 6, 2),
        (2, 128, 3, 2),
        (2, 192, 2, 2),
    ],
    128: [
        (3, 64, 3, 2),
        (3, 64, 4, 1),
        (2, 128, 2, 2),
        (2, 96, 2, 2),
        (2, 64, 4, 2),
        (2, 160, 2, 1),
    ],
    136: [(3, 48, 3, 1), (2, 96, 2, 1)],
    160: [(3, 48, 3, 1), (2, 96, 2, 1)],
    168: [(3, 32, 4, 1), (2, 96, 2, 1), (2, 64, 3, 1)],
    192: [(2, 96, 2, 1), (2, 64, 3, 1), (2, 48, 4, 1)],
    256: [(2, 64, 2, 1), (2, 48, 3, 1), (2, 32, 4, 1)],
}
FORWARD = {
    head_dim: [
        Sm90FwdTiling(*base, ping_pong, exponentials_first)
        for base in bases
        for ping_pong in (False, True)
        for exponentials_first in (False, True)
    ]
    for head_dim, bases in BASES.items()
}
#: tile_q, tile_k, by_product, stages, ds_stages, piece_columns, dq_slots, share_slots; do_stages,
#: cluster, query_registers.
BACKWARD = {
    32: [
        Sm90BwdTiling(128, 128, False, 2, 2, 64, 1, 1),
        Sm90BwdTiling(128, 128, False, 2, 2, 32, 1, 1),
        Sm90BwdTiling(128, 128, False, 2, 2, 32, 2, 2),
        Sm90BwdTiling(128, 128, False, 3, 2, 32, 2, 1),
    ],
    64: [
        Sm90BwdTiling(
            128, 128, False, 2, 2, 64, 1, 1, stats_in_products=True, keys_in_registers=True
        ),
        Sm90BwdTiling(128, 128, False, 2, 2, 64, 1, 1, stats_in_products=True),
        Sm90BwdTiling(128, 128, False, 2, 2, 64, 1, 1),
        Sm90BwdTiling(
            128, 128, False, 2, 2, 64, 2, 1, stats_in_products=True, keys_in_registers=True
        ),
    ],
    96: [
        Sm90BwdTiling(64, 128, False, 2, 2, 64, 2, 2),
        Sm90BwdTiling(64, 128, False, 2, 2, 32, 3, 3),
        Sm90BwdTiling(64, 128, False, 3, 2, 32, 3, 0),
    ],
    128: [
        Sm90BwdTiling(64, 128, False, 2, 2, 64, 2, 2, stats_in_products=True),
        Sm90BwdTiling(64, 128, False, 2, 2, 64, 2, 2),
        Sm90BwdTiling(64, 128, False, 2, 3, 64, 2, 1, stats_in_products=True),
        Sm90BwdTiling(64, 128, False, 3, 2, 64, 1, 1, stats_in_products=True),
    ],
    160: [
        Sm90BwdTiling(64, 128, False, 2, 2, 64, 1, 0, 1),
        Sm90BwdTiling(64, 128, False, 2, 1, 64, 1, 0),
        Sm90BwdTiling(64, 128, True, 2, 2, 96, 1, 0, 1, 2, 88),
    ],
    192: [
        Sm90BwdTiling(64, 128, True, 2, 1, 96, 1, 0, 2, 2, 88),
        Sm90BwdTiling(64, 128, True, 2, 2, 96, 1, 0, 1, 2, 88),
        Sm90BwdTiling(64, 64, True, 2, 2, 64, 3, 0),
        Sm90BwdTiling(64, 64, True, 2, 2, 64, 1, 1),
    ],
    256: [
        Sm90BwdTiling(64, 128, True, 2, 1, 64, 1, 0, 1, 2, 88),
        Sm90BwdTiling(64, 128, True, 2, 1, 64, 1, 0, 1, 2, 104),
        Sm90BwdTiling(64, 128, True, 2, 1, 32, 2, 0, 1, 2, 88),
        Sm90BwdTiling(64, 64, True, 2, 2, 64, 2, 0, 1),
        Sm90BwdTiling(64, 64, True, 2, 1, 32, 2, 0),
    ],
}
PLANS: dict[Direction, tuple[type[CudaPlan], dict[int, Sequence[object]]]] = {
    Direction.FORWARD: (FwdSm90, FORWARD),
    Direction.BACKWARD: (BwdSm90, BACKWARD),
}


def flash3(
    shape: Shape, tensors: dict[str, torch.Tensor], direction: Direction
) -> Callable[[], object] | None:
    """FlashAttention-3, if it is there."""
    missing = load_flash3()
    if missing is not None:
        print(missing)
        return None
    q, k, v, o, dO = (tensors[role].transpose(1, 2) for role in ("q", "k", "v", "o", "dO"))
    options = {"softmax_scale": shape.head_dim**-0.5, "is_causal": shape.causal}
    if direction is Direction.FORWARD:
        return lambda: torch.ops.flash_attn_3.fwd(q, k, v, **options)
    stats = tensors["stats"].squeeze(-1)
    return lambda: torch.ops.flash_attn_3.bwd(dO, q, k, v, o, stats, **options)


def sweep(direction: Direction, head_dim: int, seqs: Sequence[int]) -> None:
    """Time every tiling of one pass and head dimension on every shape."""
    plan, table = PLANS[direction]
    ratios: dict[tuple[bool, str], list[float]] = {}
    for shape in shapes((head_dim,), seqs):
        tensors = make_tensors(shape)
        peers = flash2(shape, tensors)
        o, lse = peers["forward"]()[:2]  # what the backward reads
        tensors["o"].copy_(o)
        tensors["stats"].copy_(lse.unsqueeze(-1))
        contenders: dict[str, Callable[[], object]] = {}
        third = flash3(shape, tensors, direction)
        if third is not None:
            contenders["FA3"] = third
        expected = peers[direction.value]()
        contenders |= right_calls(plan, shape, tensors, table[head_dim], expected)
        times = interleaved(contenders, rounds=3, seconds=0.01)
        flops = shape.flops(direction) * 1e-9
        base = times.pop("FA3", 1.0)
        print(f"{shape} {direction.value}: FA3 {flops / base:.0f} TFLOP/s")
        for name, ms in times.items():
            ratios.setdefault((shape.causal, name), []).append(base / ms)
            print(f"  {name:52} {flops / ms:5.0f}  x{base / ms:.3f}", flush=True)
    for (causal, name), values in ratios.items():
        each = " ".join(f"{value:.3f}" for value in values)
        mask = "causal" if causal else "full"
        print(f"d{head_dim} {mask:6} {name:52} mean x{geometric_mean(values):.3f} ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tune_sm90", description=__doc__)
    parser.add_argument("direction", type=Direction, help="forward or backward")
    parser.add_argument("head_dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument(
        "--seqs",
        type=lambda text: [int(seq) for seq in text.split(",")],
        default=SEQS,
        help=f"lengths of sequences, of {TOKENS} tokens in all (%(default)s)",
    )
    given = parser.parse_args()
    require_gpu("bench.tune_sm90")
    for head_dim in given.head_dims:
        sweep(given.direction, head_dim, given.seqs)


if __name__ == "__main__":
    main()
