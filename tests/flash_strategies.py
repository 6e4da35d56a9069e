"""Random calls of FlashAttention's functions, and of the one with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.flash import FlashCase
from tests.kvcache import CacheCase
from tests.strategies import HEAD_DIMS, PAGE_SIZES, PROFILES


@st.composite
def flash_cases(
    draw: st.DrawFn, profile: str = "cpu", packed: bool = False, **fixed: Any
) -> FlashCase:
    """Any call of FlashAttention's functions; ``fixed`` pins fields."""
    sizes = PROFILES[profile]
    batch = draw(st.integers(1, 3))
    heads = draw(st.sampled_from(sizes.heads))
    used, page = draw(st.booleans()), None
    length = st.sampled_from((*sizes.edges, 0, 1)) | st.integers(0, sizes.longest)
    if packed or used:
        lens_q, lens_k = (draw(st.tuples(*[length] * batch)) for _ in range(2))
    else:
        lens_q, lens_k = ((draw(length),) * batch for _ in range(2))
    if packed:
        # Gradients are of keys without pages.
        page = draw(st.sampled_from((*len(PAGE_SIZES) * (None,), *PAGE_SIZES)))
    head_size = draw(st.sampled_from((*HEAD_DIMS[::8], 64, 128)) | st.integers(1, 256))
    layout = draw(st.sampled_from(("plain", "plain", "of more heads", "heads first", "odd")))
    bound = st.sampled_from((-1, -1, -1, 0, 1)) | st.integers(0, sizes.longest)
    causal, alibi = draw(st.booleans()), draw(st.sampled_from((None, None, "H", "BH")))
    softcap = draw(st.sampled_from((0.0, 0.0, 3.0, 30.0)))
    dropout = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5)))
    # The portable backward, which alone takes some wide heads, has no order of its sums.
    portable = layout == "odd" or head_size > (128 if softcap and dropout and alibi else 256)
    case = FlashCase(
        dtype=draw(st.sampled_from(tuple(sizes.dtypes))),
        heads=heads,
        heads_k=draw(st.sampled_from([h for h in range(1, heads + 1) if heads % h == 0])),
        head_size=head_size,
        head_size_v=draw(st.just(head_size) | st.just(head_size) | st.integers(1, 256)),
        lens_q=lens_q,
        lens_k=lens_k,
        packed=packed,
        used=used,
        page=page,
        slack=draw(st.integers(0, 3)) if packed else 0,
        more=draw(st.sampled_from((0, 0, 5))),
        causal=causal,
        left=draw(bound),
        right=draw(bound),
        softcap=softcap,
        alibi=alibi,
        scale=draw(st.sampled_from((None, None, 0.5, -0.2, 0.0))),
        sinks=draw(st.sampled_from((False, False, True))),
        dropout=dropout,
        given=draw(st.booleans()),
        zero_tensors=draw(st.booleans()),
        deterministic=not portable and draw(st.booleans()),
        layout=layout,
        logits=draw(st.sampled_from((1.0, 1.0, 0.01, 10.0))),
        seed=draw(st.integers(0, 2**16)),
    )
    return replace(case, **fixed)


#: What changes a kernel's code, besides the scale's sign and which sides of a window are bounds.
_KIND = (
    *("dtype", "head_size", "head_size_v", "page", "causal", "softcap", "alibi", "sinks"),
    *("dropout", "layout", "deterministic"),
)


@st.composite
def flash_families(
    draw: st.DrawFn, packed: bool = False, size: int = 24, **fixed: Any
) -> tuple[FlashCase, ...]:
    """From half of ``size`` to ``size`` calls on a GPU, no two alike, whose kernels few
    compilations make."""
    first = draw(flash_cases("gpu", packed, **fixed))
    alike = {name: getattr(first, name) for name in _KIND}
    cases = flash_cases("gpu", packed, **{**fixed, **alike}).map(lambda it: _like(first, it))
    return tuple(draw(st.lists(cases, min_size=size // 2, max_size=size, unique=True)))


def _like(first: FlashCase, case: FlashCase) -> FlashCase:
    """A case with a scale of the first one's sign, and bounds on the same sides."""

    def positive(scale: float | None) -> bool:
        return scale is None or scale > 0

    def side(of_first: int, own: int) -> int:
        most, keys = first.longest[1], case.longest[1]
        if (0 <= of_first < most) == (0 <= own < keys):
            return own
        return of_first % keys if 0 <= of_first < most and keys else -1

    return replace(
        case,
        scale=case.scale if positive(case.scale) == positive(first.scale) else first.scale,
        left=side(first.left, case.left),
        right=side(first.right, case.right),
    )


@st.composite
def cache_cases(draw: st.DrawFn, profile: str = "cpu") -> CacheCase:
    """Any call of ``flash_attn_with_kvcache``."""
    sizes = PROFILES[profile]
    batch, heads = draw(st.integers(1, 3)), draw(st.sampled_from(sizes.heads))
    length = st.sampled_from((*sizes.edges, 0)) | st.integers(0, sizes.longest)
    cached = draw(st.tuples(*[length] * batch))
    head_size = draw(st.sampled_from((8, 24, 40, 64, 72, 128, 256)))
    page = draw(st.sampled_from((None, None, 1, 2, 3, 12, 16, 24, 48, 64, 100, 256)))
    seqlens_as = draw(st.sampled_from(("int32", "int32", "int32", "int64", "number", "none")))
    new = None
    if seqlens_as != "none":
        new = draw(st.sampled_from((None, 1, 1, 2)) | st.integers(1, 20))
    padded = page is None and draw(st.sampled_from((False, False, True)))
    turned = st.sampled_from((0, head_size, head_size // 2 // 8 * 8, 2, 6))
    bound = st.sampled_from((-1, -1, -1, 0, 1)) | st.integers(0, sizes.longest)
    return CacheCase(
        dtype=draw(st.sampled_from(tuple(sizes.dtypes))),
        heads=heads,
        heads_k=draw(st.sampled_from([h for h in range(1, heads + 1) if heads % h == 0])),
        head_size=head_size,
        head_size_v=draw(st.sampled_from((head_size, head_size, head_size, 16))),
        seqlen=draw(st.sampled_from((1, 1, 2, 5)) | st.integers(1, 20)),
        cached=cached,
        seqlens_as=seqlens_as,
        new=new,
        room=draw(st.sampled_from((0, 48, 64)) | length),
        page=page,
        index=page is None and draw(st.booleans()),
        leftpad=tuple(draw(st.integers(0, n)) for n in cached) if padded else None,
        rotary=0 if new is None else draw(turned),
        interleaved=draw(st.booleans()),
        angles=draw(st.sampled_from(("float32", "same"))),
        exact=draw(st.sampled_from((True, True, False))),
        causal=draw(st.booleans()),
        left=draw(bound),
        right=draw(bound),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        alibi=draw(st.sampled_from((None, None, "H", "BH"))),
        scale=draw(st.sampled_from((None, None, 0.2))),
        sinks=draw(st.sampled_from((False, False, True))),
        layout=draw(
            st.sampled_from(("plain", "plain", "heads first", "packed", "interleaved", "odd"))
        ),
        given=draw(st.booleans()),
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
