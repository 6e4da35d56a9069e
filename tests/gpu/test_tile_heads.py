"""Query tiles of the Hopper forward that several heads share, of sequences of any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dlattn.plans import fwd_sm90_shares
from dlattn.plans.fwd_sm90_tiles import Sharing, TileHeads
from dlattn.runtime.target import cuda_target
from tests.cases import Case
from tests.drivers import Tensors, check, gpu_library, run_graph
from tests.few_blocks import run_on_few

pytestmark = pytest.mark.gpu

WINDOW = Case(
    batch=2, heads_q=8, heads_k=2, heads_v=2, seq_q=700, seq_kv=700, head_dim_qk=64, head_dim_v=64,
    scale=0.125, left=100, right=0, logits=3.0, stats=None,
)  # fmt: skip
CAUSAL = replace(WINDOW, left=None)
WIDE = replace(WINDOW, head_dim_qk=128, head_dim_v=128, scale=0.09)
CASES = {
    "a window": replace(WINDOW, stats="float32"),
    "a window, 128": WIDE,
    "a window, 256": replace(WIDE, head_dim_qk=256, head_dim_v=256, scale=0.0625),
    "a window, 192 and 128": replace(WIDE, head_dim_qk=192, scale=0.07),
    "causal": CAUSAL,
    "causal, fewer queries than keys": replace(CAUSAL, seq_q=333, seq_kv=517, bottom_right=True),
    "causal, rows without keys": replace(CAUSAL, seq_q=517, seq_kv=130, bottom_right=True),
    "full": replace(CAUSAL, right=None, seq_q=65, seq_kv=333),
    "six heads": replace(WIDE, heads_q=12),
    "five heads": replace(WINDOW, heads_q=10, stats="float32"),
    "seven heads, 128": replace(WIDE, heads_q=14),
    "three of k, six of v": replace(WIDE, heads_q=12, heads_k=3, heads_v=6),
    "lengths on the device": replace(WINDOW, len_q=(700, 130), len_kv=(600, 200), tails="nan"),
    "lengths on the device, 128": replace(WIDE, len_q=(65, 0), len_kv=(700, 64), tails="inf"),
    "packed": replace(
        WINDOW,
        batch=3,
        len_q=(700, 129, 0),
        len_kv=(700, 300, 5),
        stats="float32",
        ragged=("q", "k", "v", "o", "stats"),
    ),
    "pages": replace(WIDE, len_q=(700, 300), len_kv=(700, 300), page_k=16, page_v=16),
    "dropout, slopes": replace(WIDE, dropout=0.2, alibi="H"),
    "sinks, maxima": replace(WINDOW, sink=1.0, row_outputs=("score_max", "score_sum_exp")),
    "a soft cap": replace(WIDE, softcap=4.0),
    "growing scores": replace(WINDOW, logits=12.0, offset=60.0),
    "a bias of any layout": replace(WIDE, bias="float32", bias_layout="queries"),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's forward has such tiles")


#: Ways to share tiles: consumers have a head each, or rows of two heads, or of four.
WAYS: dict[str, Callable[[TileHeads], bool]] = {
    "apart": lambda heads: heads.tile > heads.consumer,
    "two": lambda heads: heads == TileHeads(2, 2),
    "four": lambda heads: heads == TileHeads(4, 4),
}


@pytest.fixture(params=WAYS)
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are shared in one of these ways, where they may be."""
    choices, is_wanted = fwd_sm90_shares.heads_of_tiles, WAYS[request.param]

    def only(*its: Any) -> list[TileHeads]:
        every = choices(*its)
        return [*filter(is_wanted, every)] or every[:1]

    monkeypatch.setattr(fwd_sm90_shares, "heads_of_tiles", only)


@pytest.mark.parametrize("run", [run_graph, partial(run_on_few, 5)], ids=["all", "few"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_heads_share_tiles(
    case: Case,
    run: Callable[[Case, Tensors], None],
    shared: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results are right, nothing else is written; blocks have whole tiles, one or many."""
    monkeypatch.setattr(fwd_sm90_shares, "sharing", lambda *_: Sharing(0))
    check(case, gpu_library(), run)


#: Blocks share the keys of their tiles.
NEXT = replace(CAUSAL, batch=1, seq_q=200, seq_kv=3000, bottom_right=True)
IN_PARTS = {
    "causal": NEXT,
    "a window, 128": replace(NEXT, left=2000, head_dim_qk=128, head_dim_v=128, scale=0.09),
    "many parts": replace(NEXT, heads_q=4, heads_k=1, heads_v=1, seq_q=70, seq_kv=14000),
}


@pytest.mark.parametrize("case", IN_PARTS.values(), ids=IN_PARTS)
def test_parts_of_tiles_of_several_heads(case: Case, shared: None) -> None:
    """Parts of keys add up to all of them."""
    check(case, gpu_library(), run_graph)
