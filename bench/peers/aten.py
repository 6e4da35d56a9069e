"""What torch ships: FlashAttention-2, its cuDNN backend, FlexAttention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.cases import FORWARD, SOFTCAP, Case
from bench.peers.base import Peer, Prepared
from bench.reference import Tensors

if TYPE_CHECKING:
    import torch


class TorchPeer(Peer):
    """An operator pair of ATen, called without autograd."""

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.lengths is not None:
            return f"{self.name}: torch's operator has no lengths for padded batches."
        if case.deterministic:
            return f"{self.name}: torch's operator does not promise an order of additions."
        if case.mask != "full" and case.seq_q != case.seq_kv:
            return f"{self.name}: torch's operator aligns masks to the top left corner."
        return None

    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        roles = (tensors.q, tensors.k, tensors.v, tensors.dO)
        q, k, v, dO = (t.transpose(1, 2) for t in roles)
        forward, backward = self.passes(case, q, k, v)
        if direction == FORWARD:
            return Prepared(forward, lambda made: (made[0].transpose(1, 2),))
        saved = forward()
        return Prepared(
            lambda: backward(dO, saved), lambda made: tuple(t.transpose(1, 2) for t in made[:3])
        )

    @abstractmethod
    def passes(
        self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
        """The forward, and the backward from dO and what the forward returned; all BHSD."""


class Fa2(TorchPeer):
    """FlashAttention-2 as torch ships it."""

    name = "fa2"

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.head_dim_qk != case.head_dim_v:
            return "fa2 needs equal head dimensions of q and v."
        return super().refuses(case, direction)

    def passes(
        self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
        import torch

        aten, causal, scale = torch.ops.aten, case.mask == "causal", case.scale
        if case.mask == "window":
            return self._window_passes(case, *(t.transpose(1, 2) for t in (q, k, v)))

        def forward() -> Any:
            return aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, False, scale=scale
            )  # fmt: skip

        def backward(dO: torch.Tensor, saved: Any) -> Any:
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
            return aten._scaled_dot_product_flash_attention_backward(
                dO, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset,
                scale=scale,
            )  # fmt: skip

        return forward, backward

    def _window_passes(
        self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
        """The operators below the public ones, which have no windows; these take BSHD."""
        import torch

        assert case.window is not None
        aten, sizes = torch.ops.aten, (case.seq_q, case.seq_kv)
        options = {
            "scale": case.scale,
            "window_size_left": case.window - 1,
            "window_size_right": 0,
        }

        def forward() -> Any:
            o, *rest = aten._flash_attention_forward(
                q, k, v, None, None, *sizes, 0.0, False, False, **options
            )
            return (o.transpose(1, 2), *rest)

        def backward(dO: torch.Tensor, saved: Any) -> Any:
            o, lse, seed, offset, _ = saved
            dO, o = dO.transpose(1, 2), o.transpose(1, 2)
            gradients = aten._flash_attention_backward(
                dO, q, k, v, o, lse, None, None, *sizes, 0.0, False, seed, offset, **options
            )
            return tuple(t.transpose(1, 2) for t in gradients)

        return forward, backward


class TorchCudnn(TorchPeer):
    """torch's cuDNN backend of ``scaled_dot_product_attention``."""

    name = "torch_cudnn"

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.mask == "window":
            return "torch_cudnn: torch's operator has no windows."
        return super().refuses(case, direction)

    def passes(
        self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
        import torch

        aten, causal, scale = torch.ops.aten, case.mask == "causal", case.scale

        def forward() -> Any:
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )

        def backward(dO: torch.Tensor, saved: Any) -> Any:
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
            return aten._scaled_dot_product_cudnn_attention_backward(
                dO, q, k, v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal,
                scale=scale,
            )  # fmt: skip

        return forward, backward


class Flex(Peer):
    """FlexAttention compiled by torch; several seconds of compiling for each case."""

    name = "flex"
    extras = ("softcap", "alibi")
    modules = ("torch", "triton")

    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        shift, window, lengths = case.seq_kv - case.seq_q, case.window, tensors.lengths
        causal = case.mask != "full"

        def keep(b: Any, h: Any, query: Any, key: Any) -> Any:
            kept = key <= query + shift if causal else key >= 0
            if window is not None:
                kept = kept & (key > query + shift - window)
            if lengths is not None:
                kept = kept & (query < lengths[b]) & (key < lengths[b])
            return kept

        block_mask = None
        if causal or lengths is not None:
            entries = None if lengths is None else case.batch
            block_mask = create_block_mask(keep, entries, None, case.seq_q, case.seq_kv)
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        roles = (tensors.q, tensors.k, tensors.v)
        q, k, v = (t.transpose(1, 2).detach() for t in roles)
        options = {
            "block_mask": block_mask,
            "score_mod": flex_function(case, tensors),
            "scale": case.scale,
            "enable_gqa": case.heads_q != case.heads_kv,
        }
        if direction == FORWARD:
            return Prepared(
                lambda: compiled(q, k, v, return_lse=True, **options),
                lambda made: (made[0].transpose(1, 2),),
            )
        inputs = tuple(t.requires_grad_() for t in (q, k, v))
        o, dO = compiled(*inputs, **options), tensors.dO.transpose(1, 2)
        return Prepared(
            lambda: torch.autograd.grad(o, inputs, dO, retain_graph=True),
            lambda made: tuple(t.transpose(1, 2) for t in made),
        )


def flex_function(case: Case, tensors: Tensors) -> Callable[..., Any] | None:
    """The edit of scores of a case, or ``None``."""
    import torch

    if case.extra == "softcap":
        return lambda score, b, h, q, k: SOFTCAP * torch.tanh(score / SOFTCAP)
    if case.extra == "alibi":
        heads = torch.arange(1, case.heads_q + 1, device=tensors.q.device)
        slopes = 2.0 ** (-8.0 * heads / case.heads_q)
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)
    return None
