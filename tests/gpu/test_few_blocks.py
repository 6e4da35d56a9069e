"""Some kernels with so few blocks that each has many items; test_random.py has others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.cases import Case
from tests.drivers import check, gpu_library
from tests.few_blocks import run_on_few

pytestmark = pytest.mark.gpu

CAUSAL = Case(
    batch=2, heads_q=3, heads_k=3, heads_v=3, seq_q=450, seq_kv=450, right=0, head_dim_qk=256,
    head_dim_v=256, scale=0.0625,
)  # fmt: skip
NARROW = replace(CAUSAL, head_dim_qk=64, head_dim_v=64, scale=0.125)
MIDDLE = replace(CAUSAL, head_dim_qk=128, head_dim_v=128, scale=0.09)
#: Of lengths that three consumers divide better.
WIDE = replace(CAUSAL, seq_q=550, seq_kv=550, head_dim_qk=160, head_dim_v=160, scale=0.08)
LONGER = replace(MIDDLE, seq_q=550, seq_kv=550)
PADDED = replace(LONGER, len_q=(550, 300), len_kv=(550, 300))
CASES = {
    "256, causal": CAUSAL,
    "256, causal, fewer queries than keys": replace(
        CAUSAL, seq_q=300, seq_kv=517, bottom_right=True
    ),
    "256, causal, rows without keys": replace(CAUSAL, seq_q=517, seq_kv=130, bottom_right=True),
    "256, causal, lengths": replace(
        CAUSAL, len_q=(450, 140), len_kv=(450, 200), tails="nan", sink=0.5
    ),
    "256, causal, dropout": replace(CAUSAL, dtype="float16", dropout=0.1, dropout_as="value"),
    "256, full": replace(CAUSAL, right=None, seq_kv=333),
    "256, a window": replace(CAUSAL, left=100),
    "192/128, causal, groups": replace(
        CAUSAL, heads_q=6, heads_k=2, heads_v=2, head_dim_qk=192, head_dim_v=128, scale=0.07
    ),
    "192, causal, of another element type": replace(
        CAUSAL, dtype="float16", head_dim_qk=192, head_dim_v=192, scale=0.07
    ),
    "192, full, few keys": replace(WIDE, right=None, seq_kv=140, head_dim_qk=192, head_dim_v=192),
    "168, causal": replace(WIDE, head_dim_qk=168, head_dim_v=168),
    "160, causal, sink": replace(WIDE, sink=0.5),
    "136, full, lengths": replace(
        WIDE,
        head_dim_qk=136,
        head_dim_v=136,
        right=None,
        seq_kv=333,
        len_q=(550, 130),
        len_kv=(333, 200),
        tails="nan",
    ),  # fmt: skip
    "128, causal": MIDDLE,
    "128, causal, deterministic": replace(MIDDLE, deterministic=True),
    "128, causal, groups, lengths": replace(
        MIDDLE, heads_q=6, len_q=(450, 70), len_kv=(400, 129), tails="nan"
    ),
    "128, full": replace(MIDDLE, right=None, seq_q=550, seq_kv=333),
    "128, full, parts of keys": replace(MIDDLE, right=None, seq_q=550, seq_kv=3000),
    "128, full, lengths": replace(
        MIDDLE, right=None, seq_q=550, len_q=(550, 130), len_kv=(333, 450), tails="nan"
    ),
    "128, a window": replace(LONGER, left=100),
    "128, a wide window": replace(MIDDLE, seq_q=900, seq_kv=900, left=500),
    "128, causal, soft cap, sink": replace(LONGER, softcap=5.0, sink=0.5),
    "128, causal, pages": replace(PADDED, page_k=16, page_v=16),
    "128, causal, packed": replace(PADDED, ragged=("q", "k", "v", "o", "dO", "dQ", "dK", "dV")),
    "96, causal, dropout": replace(
        LONGER, head_dim_qk=96, head_dim_v=96, dropout=0.1, dropout_as="value"
    ),
    "112, full, parts of keys": replace(
        MIDDLE, right=None, seq_q=550, seq_kv=3000, head_dim_qk=112, head_dim_v=112
    ),
    "64, causal": replace(NARROW, seq_q=700, seq_kv=700),
    "64, full, of three parts": replace(NARROW, right=None, seq_q=550, seq_kv=550),
    "64, full": replace(NARROW, right=None, seq_q=700, seq_kv=333),
    "64, a window": replace(NARROW, seq_q=700, seq_kv=700, left=100),
    "48, causal": replace(NARROW, seq_q=700, seq_kv=700, head_dim_qk=48, head_dim_v=48),
    "32, causal": replace(NARROW, seq_q=700, seq_kv=700, head_dim_qk=32, head_dim_v=32),
    "32, a window, fewer columns of v": replace(
        NARROW, seq_q=700, seq_kv=700, left=100, head_dim_qk=32, head_dim_v=16
    ),
}


@pytest.mark.parametrize("multiprocessors", [3, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_with_many_items(case: Case, multiprocessors: int) -> None:
    """Results are those of attention however many items a block has, and none waits for ever."""
    check(case, gpu_library(), partial(run_on_few, multiprocessors))
