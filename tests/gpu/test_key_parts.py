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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_are_one_attention(case: Case) -> None:
    """Parts of keys add up to all of them, whatever is done to scores."""
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's forward shares keys")
    check(case, gpu_library(), run_graph)
