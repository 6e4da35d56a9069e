"""Few query tiles of sequences whose lengths the device alone knows: blocks of the Hopper forward
find out by themselves which parts of the keys are theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from dlattn.plans.fwd_sm90_shares import Shares
from dlattn.plans.fwd_sm90_tiling import Sm90FwdTiling
from dlattn.runtime.target import cuda_target
from tests.callers import gpu_callers
from tests.cases import Case
from tests.drivers import Tensors, check, gpu_library, run_graph
from tests.few_blocks import run_on_few
from tests.flash import FlashCase
from tests.flash_check import check as check_flash

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

#: Tiles of very different lengths, in parts of one to six blocks, and whole ones among them. It
#: runs twice in the same workspace, which nobody clears, and must leave the same bits.
FULL = Case(
    batch=4, heads_q=2, heads_k=1, heads_v=2, seq_q=300, seq_kv=3000, head_dim_qk=128,
    head_dim_v=128, len_q=(300, 1, 0, 140), len_kv=(3000, 2500, 2000, 130), tails="nan",
    scale=0.09, deterministic=True,
)  # fmt: skip
CAUSAL = replace(FULL, right=0, bottom_right=True)
#: So few tiles that a kernel of its own adds up what many blocks have of each.
FEW = replace(FULL, batch=2, heads_v=1, seq_q=100, seq_kv=9000, len_q=(100, 7), len_kv=(9000, 3000))
PACKED = ("q", "k", "v", "o", "stats")
CASES = {
    "full": FULL,
    "full, 64": replace(FULL, head_dim_qk=64, head_dim_v=64),
    "full, 96": replace(FULL, head_dim_qk=96, head_dim_v=96),
    "full, 256": replace(FULL, dtype="float16", head_dim_qk=256, head_dim_v=256),
    "causal": CAUSAL,
    "causal, 64": replace(CAUSAL, head_dim_qk=64, head_dim_v=64),
    "causal, 192 and 128": replace(CAUSAL, head_dim_qk=192),
    "causal, 256": replace(CAUSAL, head_dim_qk=256, head_dim_v=256),
    "causal, top left": replace(CAUSAL, seq_q=3000, len_q=(3000, 700, 0, 1), bottom_right=False),
    "causal, rows without keys": replace(CAUSAL, len_kv=(2900, 0, 3000, 20)),
    "a window": replace(CAUSAL, left=2000),
    "a left bound": replace(CAUSAL, left=1500, right=None),
    "one sequence": replace(CAUSAL, batch=1, len_q=(129,), len_kv=(2999,)),
    "one tile": replace(FULL, batch=1, heads_q=1, heads_v=1, len_q=(5,), len_kv=(3000,)),
    "few tiles": FEW,
    "few tiles, causal": replace(FEW, right=0, bottom_right=True, len_q=(3, 100)),
    "few tiles, rows without keys": replace(FEW, right=0, bottom_right=True, len_kv=(40, 0)),
    "few tiles, an empty sequence": replace(FEW, len_q=(0, 77), head_dim_qk=64, head_dim_v=64),
    "few tiles, a sink, maxima": replace(
        FEW, sink=2.0, row_outputs=("score_max", "score_sum_exp"), head_dim_qk=256, head_dim_v=256
    ),
    "few tiles, pages": replace(FEW, page_k=64, page_v=16, dropout=0.2),
    "few tiles, packed": replace(FEW, ragged=PACKED, gaps=True, right=0, bottom_right=True),
    "few tiles, padded stats": replace(FEW, ragged=("q", "k", "v", "o")),
    "few tiles, heads": replace(FEW, batch=1, heads_q=8, seq_q=9, len_q=(5,), len_kv=(9000,)),
    "many sequences": replace(
        CAUSAL, batch=70, len_q=(300, *(1, 0, 7) * 23), len_kv=(3000, *(500, 9, 77) * 23)
    ),
    "growing scores": replace(CAUSAL, logits=12.0, offset=60.0),
    "a sink, maxima": replace(CAUSAL, sink=2.0, row_outputs=("score_max", "score_sum_exp")),
    "a soft cap": replace(FULL, softcap=4.0),
    "a bias": replace(CAUSAL, bias="bfloat16", bias_layout="aligned"),
    "slopes": replace(FULL, alibi="H"),
    "dropout": replace(CAUSAL, dropout=0.2),
    "packed": replace(CAUSAL, ragged=PACKED),
    "packed, full": replace(FULL, ragged=PACKED, gaps=True),
    "packed queries": replace(CAUSAL, ragged=("q",), head_dim_qk=64, head_dim_v=64),
    "packed, 256": replace(CAUSAL, ragged=PACKED, head_dim_qk=256, head_dim_v=256),
    "pages": replace(CAUSAL, page_k=16, page_v=64),
    "pages, full": replace(FULL, page_k=128, page_v=16),
    "packed queries, pages": replace(CAUSAL, ragged=("q", "o", "stats"), page_k=64, page_v=64),
    "heads that share tiles": replace(CAUSAL, heads_q=8, heads_k=2, heads_v=2, sink=1.0),
}

MIXED = FlashCase(
    dtype="bfloat16", heads=16, heads_k=2, head_size=128, head_size_v=128,
    lens_q=(300, 1, 1, 0, 4, 45), lens_k=(300, 2500, 3100, 77, 0, 1000), packed=True, slack=7,
    given=True, causal=True,
)  # fmt: skip
FLASH_CASES = {
    "causal": MIXED,
    "full": replace(MIXED, causal=False),
    "64": replace(MIXED, head_size=64, head_size_v=64),
    "pages": replace(MIXED, page=16),
    "pages, 256": replace(MIXED, page=128, head_size=256, head_size_v=256, dtype="float16"),
    "five heads": replace(MIXED, heads=10),
    "six heads": replace(MIXED, heads=6, heads_k=1, used=True),
    "a window": replace(MIXED, causal=False, left=2000, right=0, heads=4),
    "slopes, sinks": replace(MIXED, alibi="BH", sinks=True, heads=8),
    "one sequence": replace(MIXED, lens_q=(200,), lens_k=(3000,), heads=4),
    "many of one query": replace(
        MIXED, lens_q=(70, *(1,) * 40), lens_k=(70, *(900, 3, 0, 1700) * 10), page=64
    ),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's forward divides keys so")


@pytest.fixture(autouse=True)
def may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tilings are those whose blocks may share keys."""

    def first(self: Shares, tilings: Sequence[Sm90FwdTiling]) -> Sm90FwdTiling:
        return next(it for it in tilings if it.consumers == 2)

    monkeypatch.setattr(Shares, "best", first)


@pytest.mark.parametrize("run", [run_graph, partial(run_on_few, 11)], ids=["all", "few"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_are_one_attention(case: Case, run: Callable[[Case, Tensors], None]) -> None:
    """Parts of keys add up to all of them, whatever lengths are; nothing else is written. Few
    blocks have many tiles each, of which some are whole."""
    check(case, gpu_library(), run)


@pytest.mark.parametrize("heads, queries", [((8, 1), 40), ((16, 2), 130), ((16, 2), 17)])
@pytest.mark.parametrize("case", [FULL, CAUSAL, replace(CAUSAL, ragged=PACKED)])
def test_heads_side_by_side(
    case: Case, heads: tuple[int, int], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where tiles of heads that share keys have blocks side by side, as where L2 has no
    room for all keys."""
    monkeypatch.setattr("dlattn.plans.fwd_sm90_shares.WAVE_BYTES", 1)
    kinds = dict(zip(("heads_q", "heads_k", "heads_v"), (*heads, heads[1]), strict=True))
    lens_q = tuple(min(queries, n) for n in (queries, 1, 0, 9))
    check(replace(case, **kinds, seq_q=queries, len_q=lens_q), gpu_library(), run_graph)


@pytest.mark.parametrize("case", FLASH_CASES.values(), ids=FLASH_CASES)
def test_prompts_beside_decoded_tokens(case: FlashCase) -> None:
    """The same of packed calls, where the sum of all lengths says how many heads share a tile."""
    check_flash(case, gpu_callers()[case.heads % len(gpu_callers())])
