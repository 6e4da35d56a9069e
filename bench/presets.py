"""The measured shapes, as data: the presets made of cases.

Widths follow one convention unless a name says otherwise: 16384 tokens of hidden size 2048, so that
every dense case of a preset holds the same tokens and the same width.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from bench.cases import EXTRAS, Case, case

TOKENS, HIDDEN = 16384, 2048


def _grid(
    head_dims: Iterable[int], seqs: Iterable[int], masks: Iterable[str] = ("full", "causal")
) -> list[Case]:
    """Self-attention over 16384 tokens of width 2048."""
    seqs, masks = tuple(seqs), tuple(masks)
    return [
        case(TOKENS // s, (HIDDEN // d, HIDDEN // d), s, (d, d), mask)
        for d in head_dims
        for s in seqs
        for mask in masks
    ]


def _dense() -> list[Case]:
    grouped = [
        case(1, (64, 8), s, (128, 128), mask) for s in (4096, 16384) for mask in ("full", "causal")
    ]
    return _grid((64, 128, 256), (512, 1024, 2048, 4096, 16384)) + grouped


def _window() -> list[Case]:
    return [case(2, (64, 8), 8192, (64, 64), "window", window=w) for w in (128, 1024)]


def _padding() -> list[Case]:
    """Lengths drawn once from a fixed seed, the longest entry full; each beside the same without
    lengths, and beside a dense batch of equal sequences in which as much is attended to, so that
    all run in the same minute."""
    cases = []
    for batch, seq in ((16, 1024), (16, 4096)):
        draw = random.Random(seq)
        lengths = (seq, *(draw.randint(64, seq) for _ in range(batch - 1)))
        equal = round(math.sqrt(sum(length**2 for length in lengths) / batch))
        for d in (64, 128):
            heads = (HIDDEN // d, HIDDEN // d)
            for mask in ("full", "causal"):
                cases.append(case(batch, heads, seq, (d, d), mask))
                cases.append(case(batch, heads, seq, (d, d), mask, lengths=lengths))
                cases.append(case(batch, heads, equal, (d, d), mask))
    return cases


def _lengths() -> list[Case]:
    """Between the powers of two, where tiles are not whole or blocks have not as many each; and
    whose heads are powers of two, so that none are as many as would suit the tiles."""
    seqs = (300, 400, 576, 640, 700, 768, 900, 1280, 1536, 1800, 2500, 3000)
    return _grid((64, 128, 256), seqs) + [
        case(batch, (HIDDEN // d, HIDDEN // d), seq, (d, d), "causal")
        for d in (64, 128, 256)
        for batch, seq in ((16, 1536), (8, 3072), (2, 6144), (1, 12288))
    ]


def _fp16() -> list[Case]:
    """fp16 beside bf16."""
    return [
        case(4, (HIDDEN // d, HIDDEN // d), 4096, (d, d), mask, dtype=dtype)
        for d in (64, 128, 256)
        for mask in ("full", "causal")
        for dtype in ("bf16", "fp16")
    ]


def _short() -> list[Case]:
    """Little work per call, where launching and the last wave of blocks show."""
    return [
        case(batch, (HIDDEN // d, HIDDEN // d), s, (d, d), mask)
        for d in (64, 128)
        for batch, s in ((1, 512), (4, 128), (4, 512), (32, 128))
        for mask in ("full", "causal")
    ]


def _deterministic() -> list[Case]:
    """Beside the same without a fixed order."""
    sizes = [
        (4, (16, 16), 4096, (128, 128)),
        (4, (28, 4), 4096, (128, 128)),
        (4, (32, 8), 4096, (128, 128)),
        (1, (64, 8), 4096, (128, 128)),
        (1, (128, 128), 16384, (192, 128)),
    ]
    return [
        case(batch, heads, seq, dims, "causal", deterministic=deterministic)
        for batch, heads, seq, dims in sizes
        for deterministic in (False, True)
    ]


def _paged() -> list[Case]:
    """Beside the same without pages; all with lengths, which are full."""
    cases = []
    for d in (64, 128):
        heads = (HIDDEN // d, HIDDEN // d)
        for mask in ("full", "causal"):
            cases.append(case(4, heads, 4096, (d, d), mask, lengths=(4096,) * 4))
            for page in (4, 16, 64, 128):
                cases.append(case(4, heads, 4096, (d, d), mask, lengths=(4096,) * 4, page=page))
    return cases


def _head_dims() -> list[Case]:
    """16 heads of 4096 tokens, whatever their size."""
    return [
        case(4, (16, 16), 4096, (d, d), mask)
        for d in (32, 64, 80, 96, 112, 128, 160, 192, 256)
        for mask in ("full", "causal")
    ]


def _features() -> list[Case]:
    """Plain causal attention, and the same with one thing more; and its own lengths and pages."""
    shape: tuple[int, tuple[int, int], int, tuple[int, int], str]
    shape = (4, (16, 16), 4096, (128, 128), "causal")
    full, draw = (4096,) * 4, random.Random(4096)
    ragged = (4096, *(draw.randint(64, 4096) for _ in range(15)))
    return [
        case(*shape),
        *(case(*shape, extra=extra) for extra in EXTRAS if extra != "ragged"),
        case(*shape, deterministic=True),
        case(*shape, dtype="fp16"),
        case(*shape, lengths=full),
        *(case(*shape, lengths=full, page=page) for page in (16, 64)),
        case(16, *shape[1:], lengths=ragged, extra="ragged"),
    ]


def _shapes() -> list[Case]:
    """What fills a GPU unevenly: few queries to many keys and the other way round, the next queries
    of a long prompt or of several, few heads, odd lengths, one sequence in a window."""
    wide = (128, 128)
    few = [
        case(batch, heads, queries, wide, keys=keys)
        for batch, heads, keys in (
            (1, (16, 2), 1024), (1, (16, 2), 16384), (1, (16, 16), 16384), (8, (16, 16), 4096)
        )
        for queries in (32, 64, 100, 256, 1000)
    ]  # fmt: skip
    few += [case(1, (16, 16), 256, (d, d), keys=16384) for d in (64, 256)]
    few += [case(1, (16, heads), 4096, wide, keys=100) for heads in (16, 2, 1)]
    next_of_prompt = [
        case(1, (32, 8), queries, wide, "causal", keys=keys)
        for queries in (64, 256, 1000)
        for keys in (4096, 16384, 65536)
    ]
    next_of_several = [
        case(batch, heads, queries, wide, "causal", keys=keys)
        for batch, heads, queries, keys in (
            (4, (64, 8), 32, 4096), (8, (32, 8), 32, 8192), (8, (28, 4), 32, 8192),
            (8, (28, 4), 64, 8192), (4, (64, 8), 64, 8192), (8, (40, 8), 32, 8192),
            (32, (32, 32), 32, 2048),
        )
    ]  # fmt: skip
    alone = [
        case(1, (heads, heads), seq, (d, d), mask)
        for d, heads, seq in (
            (128, 4, 1024), (128, 4, 4096), (128, 4, 5000), (128, 8, 2048), (128, 16, 1024),
            (64, 8, 2048), (64, 8, 4096), (256, 8, 2048), (128, 1, 16384), (128, 1, 65536),
        )
        for mask in ("full", "causal")
    ]  # fmt: skip
    odd = [
        case(2, (HIDDEN // d, HIDDEN // d), seq, (d, d), "causal")
        for seq in (1000, 1537, 4097)
        for d in (64, 128, 256)
    ]
    windows = [
        case(1, (heads, heads), 8192, (d, d), "window", window=window)
        for d, heads in ((64, 16), (128, 16), (256, 8))
        for window in (64, 512, 4096)
    ]
    return [*few, *next_of_prompt, *next_of_several, *alone, *odd, *windows]


def _groups() -> list[Case]:
    """Heads that share keys in groups of many sizes, under a causal mask and packed; few keys."""
    causal = [
        case(batch, heads, seq, (d, d), "causal")
        for d, batch, heads, seq in (
            (128, 4, (28, 4), 4096), (128, 2, (28, 4), 8192), (128, 4, (28, 4), 2048),
            (128, 16, (28, 4), 512), (128, 4, (40, 8), 4096), (128, 4, (24, 8), 4096),
            (128, 4, (36, 4), 4096), (128, 4, (48, 8), 4096), (128, 4, (32, 4), 4096),
            (128, 32, (32, 8), 512), (128, 8, (32, 8), 1024), (128, 16, (64, 8), 512),
            (128, 1, (32, 8), 512), (128, 1, (32, 8), 1024), (128, 1, (32, 8), 2048),
            (64, 8, (71, 1), 2048), (64, 4, (32, 8), 4096), (64, 2, (64, 8), 8192),
            (256, 4, (16, 2), 4096), (256, 8, (8, 1), 2048),
        )
    ]  # fmt: skip
    packed = [
        case(4, heads, 4096, (128, 128), "causal", lengths=(4096,) * 4, extra="ragged")
        for heads in ((28, 4), (32, 8))
    ]
    few_keys = [
        case(batch, heads, seq, (d, d), keys=keys)
        for d, batch, heads, seq, keys in (
            (40, 8, (8, 8), 4096, 77), (64, 8, (10, 10), 4096, 77), (40, 8, (8, 8), 4096, 154),
            (128, 1, (16, 16), 4096, 100), (128, 2, (24, 24), 4096, 128),
            (128, 16, (16, 16), 1024, 77), (128, 4, (32, 8), 2048, 100),
        )
    ]  # fmt: skip
    return [*causal, *packed, *few_keys]


def _models() -> dict[str, Case]:
    """Attention layers of models that people run, in batches that fill a GPU."""
    d40, d64, d72, d80, d96, d128, d256 = ((d, d) for d in (40, 64, 72, 80, 96, 128, 256))
    seeing = {
        "ViT-B/16": case(128, (12, 12), 197, d64),
        "DINOv2 ViT-g/14": case(64, (24, 24), 257, d64),
        "CLIP ViT-L/14, 336 px": case(32, (16, 16), 577, d64),
        "SigLIP so400m/14, 384 px": case(32, (16, 16), 729, d72),
        "SAM ViT-H, whole images": case(8, (16, 16), 4096, d80),
    }
    reading = {
        "BERT": case(128, (12, 12), 128, d64),
        "BERT large": case(32, (16, 16), 512, d64),
        "Whisper large, sound": case(8, (20, 20), 1500, d64),
        "Whisper large, text to sound": case(8, (20, 20), 448, d64, keys=1500),
    }
    drawing = {
        "Stable Diffusion 1.5": case(8, (8, 8), 4096, d40),
        "Stable Diffusion 1.5, to text": case(8, (8, 8), 4096, d40, keys=77),
        "SDXL": case(8, (10, 10), 4096, d64),
        "SDXL, to text": case(8, (10, 10), 4096, d64, keys=77),
        "SDXL, coarse": case(8, (20, 20), 1024, d64),
        "FLUX.1": case(2, (24, 24), 4608, d128),
        "Wan 2.1 1.3B, video": case(1, (12, 12), 32760, d128),
    }
    writing = {
        "GPT-2": case(16, (12, 12), 1024, d64, "causal"),
        "Falcon 7B": case(8, (71, 1), 2048, d64, "causal"),
        "GPT-J": case(8, (16, 16), 2048, d256, "causal"),
        "GPT-NeoX 20B": case(4, (64, 64), 2048, d96, "causal"),
        "Phi-3 mini": case(4, (32, 32), 4096, d96, "causal"),
        "Llama 3.1 8B, 512": case(1, (32, 8), 512, d128, "causal"),
        "Llama 3.1 8B, 2k": case(1, (32, 8), 2048, d128, "causal"),
        "Llama 3.1 8B, 2 x 8k": case(2, (32, 8), 8192, d128, "causal"),
        "Llama 3.1 8B, 64k": case(1, (32, 8), 65536, d128, "causal"),
        "Llama 3.1 70B, an eighth": case(4, (8, 1), 8192, d128, "causal"),
        "Qwen2.5 7B": case(4, (28, 4), 4096, d128, "causal"),
        "Qwen3 30B": case(4, (32, 4), 4096, d128, "causal"),
        "Mistral 7B, window": case(2, (32, 8), 8192, d128, "window", window=4096),
        "Gemma 2 9B, no soft cap": case(4, (16, 8), 4096, d256, "causal"),
        "Gemma 3 27B, window": case(2, (32, 16), 8192, d128, "window", window=1024),
        "gpt-oss 120B, no sinks": case(2, (64, 8), 8192, d64, "causal"),
        "gpt-oss 120B, window": case(2, (64, 8), 8192, d64, "window", window=128),
        "DeepSeek-V3": case(1, (128, 128), 4096, (192, 128), "causal"),
    }
    return seeing | reading | drawing | writing


#: By the model, what ``models`` measures.
MODELS = _models()


def _random() -> list[Case]:
    """What nobody chose: drawn from a fixed seed, of all sizes that fill a GPU to some part."""
    seqs = (
        128, 160, 200, 250, 256, 320, 384, 448, 500, 512, 600, 640, 768, 800, 900, 1000, 1024, 1100,
        1200, 1280, 1500, 1536, 1792, 2000, 2048, 2300, 2560, 3000, 3072, 3584, 4000, 4096, 4500,
        5000, 5120, 6000, 6144, 7000, 7168, 8192, 10000, 12288, 16384, 20000, 24576, 32768,
    )  # fmt: skip
    draw, cases = random.Random(1), {}
    while len(cases) < 128:
        d = draw.choice((40, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256))
        seq = draw.choice(seqs)
        heads_kv = draw.choice((1, 2, 4, 5, 6, 8, 12, 16, 20, 32))
        heads = heads_kv * draw.choice((1, 1, 1, 1, 2, 3, 4, 7, 8))
        batch = draw.randint(1, min(64, max(1, 65536 // seq)))
        elements = batch * heads * seq * d
        if heads <= 64 and elements <= 2**28 and elements * seq >= 2**27:
            mask = draw.choice(("full", "causal", "causal"))
            drawn = case(batch, (heads, heads_kv), seq, (d, d), mask)
            cases[drawn.name] = drawn
    return [*cases.values()]


#: Sequence lengths, those that say most first.
_TELLING = (4096, 1024, 16384, 8192, 512, 2048, 128)


def telling_first(cases: Iterable[Case]) -> list[Case]:
    """Ordered so that a run that is cut short has said most: by sequence length."""
    return sorted(cases, key=lambda c: _TELLING.index(c.seq_q) if c.seq_q in _TELLING else 99)


def _presets() -> dict[str, tuple[Case, ...]]:
    parts = {
        "dense": _dense(),
        "features": _features(),
        "head_dims": _head_dims(),
        "foundation": _grid((64, 128), (1024, 4096, 16384)),
        "window": _window(),
        "padding": _padding(),
        "lengths": _lengths(),
        "fp16": _fp16(),
        "mla": [case(1, (128, 128), 8192, (192, 128), "causal")],
        "gpt2": [case(4, (12, 12), 1024, (64, 64), "causal")],
        "short": _short(),
        "shapes": _shapes(),
        "groups": _groups(),
        "models": [*MODELS.values()],
        "deterministic": _deterministic(),
        "paged": _paged(),
        "random": _random(),
    }
    every = {c.name: c for cases in parts.values() for c in cases}
    return {name: tuple(cases) for name, cases in (parts | {"all": [*every.values()]}).items()}


#: ``foundation`` is the part of ``dense`` that the portable engine is held to.
PRESETS = _presets()
