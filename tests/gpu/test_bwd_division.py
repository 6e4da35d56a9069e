"""Few long items of the Hopper backward, of some heads of a group and in parts of their queries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.runtime.target import cuda_target
from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

FEW = Case(
    heads_q=16, heads_k=1, heads_v=1, seq_q=2000, seq_kv=100, head_dim_qk=128, head_dim_v=128,
    scale=0.09,
)  # fmt: skip
#: Parts of the last items may have no queries at all.
CAUSAL = replace(FEW, heads_q=1, seq_q=1024, seq_kv=1024, right=0)
CASES = {
    "a group": FEW,
    "two groups, two batch entries": replace(FEW, batch=2, heads_k=2, heads_v=2, seq_q=1500),
    "several key tiles": replace(FEW, heads_k=2, heads_v=2, seq_q=1000, seq_kv=600),
    "no groups": replace(FEW, heads_k=16, heads_v=16, seq_q=4096),
    "64": replace(FEW, head_dim_qk=64, head_dim_v=64, seq_q=4096),
    "few queries": replace(FEW, seq_q=100, seq_kv=1024),
    "one key tile, more pairs than blocks": replace(
        FEW, batch=19, heads_q=14, heads_k=14, heads_v=14, seq_q=333, seq_kv=77
    ),
    "one key tile, the last pairs in parts": replace(
        FEW, batch=19, heads_q=10, heads_k=10, heads_v=10, seq_q=2000, seq_kv=77
    ),
    "one key tile, 40, one query": replace(
        FEW, batch=40, heads_k=4, heads_v=4, seq_q=1, head_dim_qk=40, head_dim_v=40
    ),
    "one key tile, unequal head dimensions": replace(
        FEW,
        batch=3,
        heads_q=12,
        heads_k=6,
        heads_v=6,
        seq_q=700,
        seq_kv=128,
        head_dim_qk=96,
        head_dim_v=64,
        dtype="bfloat16",
    ),
    "one key tile, in a fixed order": replace(FEW, heads_k=4, heads_v=4, deterministic=True),
    "causal, one key tile": replace(
        CAUSAL, batch=40, heads_q=8, heads_k=4, heads_v=4, seq_q=100, seq_kv=100
    ),
    "causal, a group of seven": replace(
        CAUSAL, batch=2, heads_q=28, heads_k=4, heads_v=4, seq_q=900, seq_kv=900
    ),
    "causal, a group of seven, in a fixed order": replace(
        CAUSAL,
        batch=2,
        heads_q=28,
        heads_k=4,
        heads_v=4,
        seq_q=900,
        seq_kv=900,
        deterministic=True,
    ),
    "causal, a group of nine": replace(
        CAUSAL, batch=4, heads_q=36, heads_k=4, heads_v=4, seq_q=640, seq_kv=640
    ),
    "causal": replace(CAUSAL, heads_q=2, heads_k=2, heads_v=2),
    "causal, a group": replace(CAUSAL, heads_q=3),
    "causal, two heads an item": replace(CAUSAL, heads_q=8, seq_q=700, seq_kv=400),
    "causal, more queries than keys": replace(CAUSAL, seq_q=1900, bottom_right=True),
    "causal, fewer queries than keys": replace(CAUSAL, seq_q=1500, seq_kv=1700, bottom_right=True),
    "causal, more items than blocks": replace(
        CAUSAL, heads_q=5, heads_k=5, heads_v=5, seq_q=3584, seq_kv=3584, dtype="bfloat16"
    ),
    "causal, a group, more items than blocks": replace(
        CAUSAL, heads_q=5, seq_q=3500, seq_kv=3500, head_dim_qk=80, head_dim_v=80
    ),
    "causal, 64": replace(CAUSAL, head_dim_qk=64, head_dim_v=64, seq_q=3000, seq_kv=3000),
    "the last few items": replace(FEW, batch=17, heads_q=8, heads_k=4, heads_v=4, seq_kv=250),
    "in a fixed order, a group": replace(FEW, seq_q=600, seq_kv=600, deterministic=True),
    "causal, few, in a fixed order": replace(CAUSAL, heads_q=6, deterministic=True),
    "a window": replace(FEW, seq_q=700, seq_kv=700, left=300, right=0),
    "a window, three groups": replace(
        FEW, batch=2, heads_q=12, heads_k=3, heads_v=3, seq_q=500, seq_kv=600, left=200, right=40,
        head_dim_qk=112, head_dim_v=112, dtype="bfloat16",
    ),
    "a window, in a fixed order": replace(
        FEW, heads_q=12, heads_k=3, heads_v=3, seq_q=500, seq_kv=500, left=400, right=0,
        deterministic=True, head_dim_qk=64, head_dim_v=64,
    ),
    "keys after, in a fixed order": replace(
        FEW, heads_q=8, seq_q=500, seq_kv=500, left=200, deterministic=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_add_up(case: Case) -> None:
    """Parts of groups and of queries give the gradients of all, and nobody waits for ever."""
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's backward divides items")
    check(case, gpu_library(), run_graph)
