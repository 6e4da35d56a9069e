"""A small GPT, trained with dlattn's attention and with torch's: ``python -m bench.train_gpt``.

Four layers of eight heads of 64, 1024 tokens, bf16 autocast, AdamW; the text is the source of
Python's standard library, a token a byte. Every run starts from the same weights and sees the same
batches; runs take turns step by step, so that they share the GPU's moods. How far torch's own
backends (and two runs of the same one) drift apart is the noise that dlattn's curve is held to.

Writes ``train_gpt.csv``, ``.md`` and ``.png`` into ``--out``. Exit status: 1 if a curve is out of
the noise. ``--small`` runs in seconds on a CPU; ``--compile`` runs both under ``torch.compile``,
too.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import commit, gpu_name, machine
from bench.peers import has_module
from bench.train_report import DLATTN, TORCH, Step, write

if TYPE_CHECKING:
    import torch

RESULTS = Path(__file__).parent / "results"
#: Bytes of text: more than are seen.
TEXT = 16 * 2**20

Attention = Callable[..., "torch.Tensor"]


@dataclass(frozen=True)
class Setting:
    """The model, and how it is trained.

    Attributes:
        head_dim: of ``heads`` heads; the model is as wide as both together.
        tokens: of a sequence, of which a step has ``batch``.
        rate: of AdamW, after ``warm_up`` steps.
    """

    layers: int = 4
    heads: int = 8
    head_dim: int = 64
    tokens: int = 1024
    batch: int = 32
    steps: int = 200
    rate: float = 1e-3
    warm_up: int = 20
    seed: int = 0

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.heads * self.head_dim


SMALL = Setting(layers=2, heads=2, head_dim=16, tokens=64, batch=4, steps=12, warm_up=2)


def text() -> bytes:
    """Python's standard library, without its tests, in the order of file names."""
    root = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        inside = set(path.relative_to(root).parts)
        if inside & {"test", "tests", "site-packages", "dist-packages", "idlelib"}:
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= TEXT:
            break
    return b"".join(parts)


def batches(setting: Setting, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens (batch, tokens) and the next ones, of each step."""
    import torch

    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(setting.seed)
    last = len(data) - setting.tokens - 1
    starts = torch.randint(last, (setting.steps, setting.batch, 1), generator=generator).to(device)
    span = torch.arange(setting.tokens + 1, device=device)
    for of_step in starts:
        found = data[of_step + span].long()
        yield found[:, :-1], found[:, 1:]


def make_model(setting: Setting, attention: Attention) -> torch.nn.Module:
    """The same weights for every attention."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = setting.width
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, width = x.shape
            qkv = self.qkv(self.before(x)).view(batch, tokens, 3, setting.heads, -1)
            q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
            made = attention(q, k, v, is_causal=True)
            x = x + self.out(made.transpose(1, 2).reshape(batch, tokens, width))
            return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(256, setting.width)
            self.places = nn.Embedding(setting.tokens, setting.width)
            self.blocks = nn.Sequential(*(Block() for _ in range(setting.layers)))
            self.last = nn.LayerNorm(setting.width)
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    deep = name.endswith(("out.weight", "down.weight"))
                    std = 0.02 / (2 * setting.layers) ** 0.5 if deep else 0.02
                    nn.init.normal_(weight, std=std)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.last(self.blocks(self.tokens(tokens) + self.places(places)))
            logits = nn.functional.linear(x, self.tokens.weight)
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    torch.manual_seed(setting.seed)
    return Gpt()


def attentions(device: str) -> dict[str, Attention]:
    """By run: dlattn's and torch's own; torch's once more, and its other backends, as noise."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dlattn.torch import scaled_dot_product_attention as ours

    def own(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    def by(backend: SDPBackend) -> Attention:
        def call(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
            with sdpa_kernel(backend):
                return own(*tensors, **options)

        return call

    found = {TORCH: own, DLATTN: ours, "torch again": own, "torch, math": by(SDPBackend.MATH)}
    if device == "cuda":
        found["torch, efficient"] = by(SDPBackend.EFFICIENT_ATTENTION)
    return found


class Run:
    """One model in training.

    Args:
        compiled: whether ``torch.compile`` compiles it, as one graph.
    """

    def __init__(
        self, setting: Setting, attention: Attention, device: str, *, compiled: bool = False
    ) -> None:
        import torch

        self._setting, self._device = setting, device
        model = make_model(setting, attention).to(device)
        self._weights = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=setting.rate, betas=(0.9, 0.95), fused=device == "cuda"
        )
        self._model = torch.compile(model, fullgraph=True) if compiled else model
        self._losses: list[torch.Tensor] = []
        self._clocks: list[Clock] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Trains on a batch; waits for nothing."""
        import torch

        setting = self._setting
        for group in self._optimizer.param_groups:
            group["lr"] = setting.rate * min(1.0, (len(self._losses) + 1) / setting.warm_up)
        with Clock(self._device) as clock:
            with torch.autocast(self._device, torch.bfloat16):
                loss = self._model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())
        self._clocks.append(clock)

    def steps(self) -> list[tuple[float, float]]:
        """Loss and milliseconds of each step."""
        return [
            (float(loss), clock.ms())
            for loss, clock in zip(self._losses, self._clocks, strict=True)
        ]


class Clock:
    """Times what is inside: by events on the GPU, else on the CPU."""

    def __init__(self, device: str) -> None:
        import time

        import torch

        self._on_gpu, self._now = device == "cuda", time.perf_counter
        if self._on_gpu:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> Clock:
        if self._on_gpu:
            self._begin.record()
        else:
            self._begun = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            self._end.record()
        else:
            self._ended = self._now()

    def ms(self) -> float:
        """Milliseconds between entering and leaving."""
        if self._on_gpu:
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end))
        return 1e3 * (self._ended - self._begun)


def train(setting: Setting, chosen: dict[str, Attention], device: str, mode: str) -> Iterator[Step]:
    """Every run's steps; the runs take turns, and in each step another one begins.

    Args:
        mode: ``eager`` or ``compiled``.
    """
    runs = {
        name: Run(setting, attention, device, compiled=mode == "compiled")
        for name, attention in chosen.items()
    }
    order, bar = list(runs), progress(setting.steps, mode)
    with bar as advance:
        for tokens, targets in batches(setting, device):
            for name in order:
                runs[name].step(tokens, targets)
            order = order[1:] + order[:1]
            advance()
    when = commit(), datetime.date.today().isoformat()
    for name, run in runs.items():
        for number, (loss, ms) in enumerate(run.steps()):
            yield Step(name, mode, number, loss, ms, *when)


def progress(total: int, mode: str) -> Any:
    """A context that gives what is called after each step: a bar, or nothing to see."""
    if has_module("tqdm") and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=total, desc=mode, unit="step")
        return _Bar(bar)
    print(f"{total} steps, {mode}", flush=True)
    return nullcontext(lambda: None)


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __enter__(self) -> Callable[[], object]:
        return self._bar.update

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a curve is out of the noise, or torch is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, in seconds on a CPU")
    parser.add_argument("--steps", type=int, help="of training (200; small: 12)")
    parser.add_argument("--batch", type=int, help="sequences of a step (32; small: 4)")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<gpu>)")
    given = parser.parse_args(arguments)
    if not has_module("torch"):
        print("bench.train_gpt needs torch, which is not installed.")
        return 1
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.small:
        print("bench.train_gpt needs a CUDA device; there is none. --small does not.")
        return 1
    setting = SMALL if given.small else Setting()
    setting = replace(
        setting, steps=given.steps or setting.steps, batch=given.batch or setting.batch
    )
    chosen = attentions(device)
    steps = list(train(setting, chosen, device, "eager"))
    if given.compile:
        both = {name: chosen[name] for name in (TORCH, DLATTN)}
        steps += train(setting, both, device, "compiled")
    gpu = gpu_name() if device == "cuda" else "cpu"
    place = machine() if device == "cuda" else f"CPU; torch {torch.__version__}"
    return write(steps, setting, place, gpu, given.out or RESULTS / gpu)


if __name__ == "__main__":
    sys.exit(main())
