"""How many heads of a group an item of the packed Hopper backward has:
``python -m bench.tune_ragged``.

Prints, per mix of lengths, head dimension, heads and mask, the ratio of FlashAttention-3's time
to ours: of items of whole groups, of as many heads as ``divided_ragged_group`` chooses, and of so
many.
Gradients are held to FlashAttention-3's first; those in a fixed order, to their own second run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from bench.machine import require_gpu
from bench.peers.flash import load_flash3
from bench.timing import capture, interleaved
from dlattn.calls.cache import forget_calls
from dlattn.flash import mha_varlen_bwd, mha_varlen_fwd
from dlattn.plans import bwd_sm90
from dlattn.plans.bwd_division import Division

_draw = random.Random(4096)
#: Lengths of sequences; the second are those of the preset.
MIXES = {
    "64 of 256 and one of 4096": (4096, *[256] * 64),
    "16 of 386 to 4096": (4096, *(_draw.randint(64, 4096) for _ in range(15))),
    "4 of 2048": (2048,) * 4,
    "2 of 4096 and 16 of 512": (4096, 4096, *[512] * 16),
    "64 of 256": (256,) * 64,
    "one of 8192": (8192,),
    "8 of 4096": (4096,) * 8,
}
#: Query heads, and heads of keys.
HEADS = ((16, 1), (16, 2), (32, 4), (16, 16))
FIXED = (1, 2, 4)

Call = Callable[[], tuple[torch.Tensor, ...]]


def contenders(
    lengths: tuple[int, ...], heads: tuple[int, int], dim: int, *, causal: bool
) -> tuple[Call, Callable[[bool], Call]]:
    """FlashAttention-3's backward, and ours, in a fixed order or not."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
    q, dO, k, v = (
        torch.randn(sum(lengths), n, dim, device="cuda", dtype=torch.bfloat16)
        for n in (heads[0], heads[0], heads[1], heads[1])
    )
    longest = max(lengths)
    options: dict[str, Any] = {"softmax_scale": dim**-0.5, "is_causal": causal}
    sizes = (starts, starts, None, None, None, longest, longest)
    o, *_, lse = mha_varlen_fwd(q, k, v, None, *sizes, **options)[:5]
    given = (dO, q, k, v, o, lse)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    packed |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def ours(in_order: bool) -> Call:
        rest = (None, None, None, starts, starts, None, longest, longest)
        return lambda: mha_varlen_bwd(*given, *rest, **options, deterministic=in_order)[:3]

    return lambda: torch.ops.flash_attn_3.bwd(*given, **options, **packed)[:3], ours


def main() -> None:
    require_gpu("bench.tune_ragged")
    missing = load_flash3()
    if missing is not None:
        raise SystemExit(missing)
    chosen = bwd_sm90.divided_ragged_group
    stream = torch.cuda.Stream()
    cases = itertools.product(MIXES, (128, 64), HEADS, (True, False))
    with torch.cuda.stream(stream):
        for mix, dim, heads, causal in cases:
            fa3, ours = contenders(MIXES[mix], heads, dim, causal=causal)
            theirs = fa3()
            calls = {"fa3": capture(fa3)}
            group = heads[0] // heads[1]
            divisions = {"whole": None, "chosen": "", "chosen, in order": ""} | {
                str(n): Division(n, 0) for n in FIXED if group % n == 0 and n < group
            }
            for name, division in divisions.items():
                made = chosen if division == "" else lambda *_, made=division: made
                forget_calls()
                call = ours("in order" in name)
                with mock.patch.object(bwd_sm90, "divided_ragged_group", made):
                    gradients = [x.clone() for x in call()]
                    for got, wanted, again in zip(gradients, theirs, call(), strict=True):
                        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max(), name
                        assert "in order" not in name or torch.equal(got, again), name
                    calls[name] = capture(call)
            times = interleaved({name: replay for name, (replay, _) in calls.items()})
            ms = {name: time / calls[name][1] for name, time in times.items()}
            ratios = ", ".join(f"{n} {ms['fa3'] / t:.3f}" for n, t in ms.items() if n != "fa3")
            shape = f"{mix}, {heads[0]}/{heads[1]} of {dim}, {'causal' if causal else 'full'}"
            print(f"{shape}: {ms['fa3']:.3f} ms; {ratios}", flush=True)


if __name__ == "__main__":
    main()
