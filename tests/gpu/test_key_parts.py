"""Query tiles whose keys several blocks of the Hopper forward share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.runtime.target import cuda_target
from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph

pytestmark = pytest.mark.gpu

#: Few query tiles, whose keys many blocks share. It runs twice in the same workspace, which nobody
#: clears, and must leave the same bits.
FEW = Case(
    heads_q=3, heads_k=1, heads_v=3, seq_q=200, seq_kv=3000, head_dim_qk=128, head_dim_v=128,
    scale=0.09, deterministic=True,
)  # fmt: skip
#: More than any of these GPUs has multiprocessors, by some.
MANY = replace(FEW, batch=2, heads_q=90, heads_k=30, heads_v=30, seq_q=70, seq_kv=2100, stats=None)
CASES = {
    "few": FEW,
    "many": MANY,
    "many, 64": replace(MANY, seq_q=250, head_dim_qk=64, head_dim_v=64),
    "few, 64": replace(FEW, head_dim_qk=64, head_dim_v=64),
    "few, 96": replace(FEW, head_dim_qk=96, head_dim_v=96),
    "few, 192 and 128": replace(FEW, head_dim_qk=192),
    "few, 256": replace(FEW, dtype="float16", head_dim_qk=256, head_dim_v=256),
    "growing scores": replace(FEW, logits=12.0, offset=60.0),
    "a sink, maxima": replace(FEW, sink=2.0, row_outputs=("score_max", "score_sum_exp")),
    "a soft cap": replace(FEW, softcap=4.0),
    "a bias": replace(FEW, bias="bfloat16", bias_layout="aligned"),
    "slopes": replace(FEW, alibi="H"),
    "dropout": replace(FEW, dropout=0.2),
    "one row": replace(FEW, seq_q=129, seq_kv=9001),
}


#: The next queries of a sequence: their tiles have different keys, and some rows of a tile none of
#: those in a part.
NEXT = replace(FEW, seq_q=300, right=0, bottom_right=True)
MORE_CASES = {
    "two tiles side by side": replace(
        FEW, heads_q=8, heads_k=8, heads_v=8, seq_kv=33000, dtype="bfloat16", stats=None
    ),
    "side by side, causal": replace(NEXT, heads_q=12, heads_k=4, heads_v=4, seq_kv=40000),
    "causal": NEXT,
    "causal, one sequence": replace(NEXT, heads_q=2, heads_k=2, heads_v=1, seq_q=3000),
    "causal, a corner that no tile has": replace(NEXT, seq_q=257, seq_kv=4111),
    "causal, top left": replace(NEXT, seq_q=3000, seq_kv=3500, bottom_right=False),
    "causal, 64": replace(NEXT, head_dim_qk=64, head_dim_v=64),
    "causal, 96": replace(NEXT, head_dim_qk=96, head_dim_v=96),
    "causal, 192 and 128": replace(NEXT, head_dim_qk=192),
    "causal, 256": replace(NEXT, dtype="float16", head_dim_qk=256, head_dim_v=256),
    "a window": replace(NEXT, seq_q=700, seq_kv=6000, left=3000),
    "a left bound": replace(NEXT, left=2500, right=None),
    "causal, growing scores": replace(NEXT, logits=12.0, offset=60.0),
    "causal, a sink, maxima": replace(NEXT, sink=2.0, row_outputs=("score_max", "score_sum_exp")),
    "causal, a bias": replace(NEXT, bias="bfloat16", bias_layout="aligned"),
    "causal, dropout": replace(NEXT, dropout=0.2),
    "heads that share tiles": replace(NEXT, heads_q=8, heads_k=2, heads_v=2, seq_q=50),
    "heads that share consumers": replace(
        NEXT, heads_q=16, heads_k=2, heads_v=2, seq_q=20, seq_kv=20000
    ),
    "heads that share consumers, full": replace(
        FEW, heads_q=8, heads_k=2, heads_v=2, seq_q=32, seq_kv=20000, sink=2.0, alibi="H"
    ),
    "heads that share consumers, dropout": replace(
        FEW, heads_q=8, heads_k=1, heads_v=1, seq_q=17, seq_kv=30000, dropout=0.2
    ),
    "heads that share consumers, lengths on the device": replace(
        NEXT,
        batch=70,
        heads_q=8,
        heads_k=2,
        heads_v=2,
        seq_q=20,
        seq_kv=300,
        len_q=(20, 17, 16, 3, 0) * 14,
        len_kv=(300, 129, 77, 0, 5, 256, 19) * 10,
    ),
    "heads that share consumers, in a window": replace(
        NEXT,
        heads_q=4,
        heads_k=1,
        heads_v=1,
        batch=8,
        seq_q=31,
        seq_kv=9000,
        left=8000,
        head_dim_qk=64,
        head_dim_v=64,
    ),
    "seven heads, of which one has no other": replace(
        NEXT, heads_q=28, heads_k=4, heads_v=4, seq_q=32, seq_kv=9000, alibi="H", sink=1.0
    ),
    "five heads, in tiles of three and two": replace(
        NEXT,
        batch=3,
        heads_q=10,
        heads_k=2,
        heads_v=2,
        seq_q=30,
        seq_kv=9000,
        head_dim_qk=64,
        head_dim_v=64,
        dropout=0.2,
        row_outputs=("score_max",),
    ),
    "three heads, whose queries fill consumers": replace(
        FEW, heads_q=12, heads_k=4, heads_v=2, seq_q=60, seq_kv=9001, bias="bfloat16"
    ),
    "seven heads, lengths on the device": replace(
        NEXT,
        batch=35,
        heads_q=14,
        heads_k=2,
        heads_v=2,
        seq_q=32,
        seq_kv=300,
        len_q=(20, 17, 32, 3, 0) * 7,
        len_kv=(300, 129, 77, 0, 5, 256, 19) * 5,
    ),
    "three heads, of which the last block adds the parts": replace(
        FEW, batch=4, heads_q=24, heads_k=8, heads_v=8, seq_q=64, seq_kv=2000, stats=None
    ),
    "three heads, the same, causal": replace(
        NEXT, batch=4, heads_q=24, heads_k=8, heads_v=8, seq_q=64, seq_kv=2000, stats=None
    ),
    "five heads, of which the last block adds the parts": replace(
        NEXT, batch=4, heads_q=40, heads_k=8, heads_v=8, seq_q=32, seq_kv=2000, stats=None
    ),
    "six heads, in a window, many tiles": replace(
        NEXT,
        heads_q=6,
        heads_k=1,
        heads_v=1,
        batch=70,
        seq_q=31,
        seq_kv=700,
        left=300,
        stats=None,
        layouts=(("q", "bhsd"), ("o", "bhsd")),
    ),
    "heads that share tiles, full": replace(
        FEW, heads_q=8, heads_k=2, heads_v=2, seq_q=64, seq_kv=9001
    ),
    "many parts": replace(FEW, heads_q=1, heads_v=1, seq_q=100, seq_kv=14000),
    "whole tiles, and others of many parts": replace(
        FEW, heads_q=139, heads_k=1, heads_v=1, seq_q=20, seq_kv=5000, stats=None
    ),
    "many parts that one block adds": replace(
        FEW,
        heads_q=16,
        heads_k=16,
        heads_v=16,
        seq_q=192,
        seq_kv=16384,
        head_dim_qk=64,
        head_dim_v=64,
        stats=None,
    ),
    "many parts, causal": replace(NEXT, heads_q=1, heads_v=1, seq_q=64, seq_kv=14000),
}


EVERY_CASE = CASES | MORE_CASES


@pytest.mark.parametrize("case", EVERY_CASE.values(), ids=EVERY_CASE)
def test_parts_are_one_attention(case: Case) -> None:
    """Parts of keys add up to all of them, whatever is done to scores; of query tiles with keys of
    their own, too, of several heads, and of many blocks."""
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's forward shares keys")
    check(case, gpu_library(), run_graph)
