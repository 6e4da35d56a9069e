"""FlashAttention-3 and FlashAttention-4, by their low-level operators, in BSHD."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.cases import BACKWARD, FORWARD, SOFTCAP, Case
from bench.peers.base import Peer, Prepared, has_module
from bench.peers.packed import Packed
from bench.reference import Tensors


class Fa3(Peer):
    """FlashAttention-3's operators (Hopper)."""

    name = "fa3"
    #: Parts that its forward divides keys into; 0 leaves it the choice.
    splits = 1
    extras = ("softcap", "ragged")

    def refuses(self, case: Case, direction: str) -> str | None:
        return load_flash3()

    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        import torch

        left, right, causal = flash_window(case)
        options: dict[str, Any] = {
            "softmax_scale": case.scale,
            "is_causal": causal,
            "window_size_left": -1 if left is None else left,
            "window_size_right": -1 if right is None else right,
        }
        q, k, v, dO, o, stats = (
            tensors.q, tensors.k, tensors.v, tensors.dO, tensors.o, tensors.stats
        )  # fmt: skip
        outputs: Callable[[Iterable[Any]], tuple[Any, ...]] = tuple
        if case.extra == "softcap":
            options["softcap"] = SOFTCAP
        if case.extra == "ragged":
            packed = Packed(case, q.device)
            q, k, v, dO, o = map(packed.pack, (q, k, v, dO, o))
            stats = packed.pack(stats.transpose(1, 2)).t().contiguous()
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), packed.starts)
            options |= {"max_seqlen_q": case.seq_q, "max_seqlen_k": case.seq_kv}

            def outputs(made: Iterable[Any]) -> tuple[Any, ...]:
                return tuple(map(packed.unpack, made))

        elif tensors.lengths is not None:
            options |= {"seqused_q": tensors.lengths, "seqused_k": tensors.lengths}
        if direction == FORWARD:
            forward = torch.ops.flash_attn_3.fwd
            return Prepared(
                lambda: forward(q, k, v, num_splits=self.splits, **options),
                lambda made: outputs(made[:1]),
            )
        backward = torch.ops.flash_attn_3.bwd
        return Prepared(
            lambda: backward(dO, q, k, v, o, stats, deterministic=case.deterministic, **options),
            lambda made: outputs(made[:3]),
        )


class Fa3Splits(Fa3):
    """The same, whose forward chooses how many parts of the keys are computed side by side."""

    name = "fa3_splits"
    splits = 0

    def refuses(self, case: Case, direction: str) -> str | None:
        if direction == BACKWARD:
            return "fa3_splits: its backward is that of fa3."
        return super().refuses(case, direction)


class Fa4(Peer):
    """FlashAttention-4, the CuTe DSL kernels of the GPU's generation."""

    name = "fa4"
    modules = ("torch", "cutlass", "flash_attn.cute")

    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        from flash_attn.cute import interface

        left, right, causal = flash_window(case)
        options: dict[str, Any] = {
            "softmax_scale": case.scale,
            "causal": causal,
            "window_size_left": left,
            "window_size_right": right,
        }
        if tensors.lengths is not None:
            options |= {"seqused_q": tensors.lengths, "seqused_k": tensors.lengths}
        q, k, v, dO, o, stats = (
            tensors.q, tensors.k, tensors.v, tensors.dO, tensors.o, tensors.stats
        )  # fmt: skip
        if direction == FORWARD:
            return Prepared(
                lambda: interface._flash_attn_fwd(q, k, v, return_lse=True, **options),
                lambda made: (made[0],),
            )
        return Prepared(
            lambda: interface._flash_attn_bwd(
                q, k, v, o, dO, stats, deterministic=case.deterministic, **options
            ),
            lambda made: tuple(made[:3]),
        )


def flash_window(case: Case) -> tuple[int | None, int | None, bool]:
    """FlashAttention's left and right window sizes, and its causal flag."""
    if case.window is not None:
        return case.window - 1, 0, False
    return None, None, case.mask == "causal"


def flash3_forward() -> Callable[..., Any]:
    """FlashAttention-3's own forward.

    Raises:
        RuntimeError: it is not there.
    """
    import torch

    missing = load_flash3()
    if missing is not None:
        raise RuntimeError(missing)
    forward: Callable[..., Any] = torch.ops.flash_attn_3.fwd
    return forward


def load_flash3() -> str | None:
    """Makes ``torch.ops.flash_attn_3`` exist, or says why it does not."""
    import torch

    if hasattr(torch.ops.flash_attn_3, "fwd"):
        return None
    binary = Path(os.environ.get("PEERS", ""), "fa3", "_C.so")
    try:
        if "PEERS" in os.environ and binary.exists():
            torch.ops.load_library(str(binary))
        elif has_module("flash_attn_3._C"):
            importlib.import_module("flash_attn_3._C")
        else:
            return (
                "fa3 needs the Python module flash_attn_3, which is not installed, or a folder "
                "PEERS with fa3/_C.so."
            )
    except (ImportError, OSError) as error:
        return f"fa3 could not be loaded: {error}"
    return None
