"""A few small calls that together reach every branch of the kernels.

Small enough to run under ``compute-sanitizer`` (CONTRIBUTING.md says how).
"""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.drivers import check, run_graph
from tests.libraries import Library

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

CASES = {
    "one element": Case(head_dim_qk=8, head_dim_v=8, scale=1.0),
    "tile tails": Case(seq_q=130, seq_kv=131, head_dim_qk=64, head_dim_v=64, scale=0.125),
    "causal, two tiles": Case(
        dtype="float16", heads_q=2, heads_k=2, heads_v=2, seq_q=193, seq_kv=193, right=0,
        head_dim_qk=128, head_dim_v=128, scale=0.09,
    ),
    "window, bottom right, padding, unequal groups": Case(
        batch=2, heads_q=6, heads_k=2, heads_v=3, seq_q=70, seq_kv=150, left=40, right=3,
        bottom_right=True, len_q=(70, 33), len_kv=(150, 0), head_dim_qk=72, head_dim_v=40,
        scale=-0.2, tails="nan",
    ),
    "element-wise access": Case(
        batch=2, heads_q=2, heads_k=1, heads_v=1, seq_q=37, seq_kv=70, head_dim_qk=24,
        head_dim_v=16, scale=0.2, len_kv=(70, 5),
        layouts=(("q", "odd"), ("k", "odd"), ("v", "odd"), ("o", "odd"), ("dQ", "odd"),
                 ("dK", "odd"), ("dV", "odd"), ("dO", "odd")),
    ),
    "wide heads, rows without keys": Case(
        dtype="float16", heads_q=2, heads_k=1, heads_v=2, seq_q=100, seq_kv=40, right=0,
        bottom_right=True, head_dim_qk=256, head_dim_v=256, scale_as="device", scale=0.06,
    ),
    "scores far above those of earlier tiles": Case(
        dtype="float16", heads_q=2, heads_k=1, heads_v=1, seq_q=200, seq_kv=600, head_dim_qk=64,
        head_dim_v=64, scale=0.125, logits=1000.0,
    ),
    "scores far below zero, half of the last key tile beyond the end": Case(
        heads_q=2, heads_k=1, heads_v=1, seq_q=129, seq_kv=192, head_dim_qk=64, head_dim_v=64,
        scale=0.125, offset=-120.0,
    ),
    "long items, in parts of their queries": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=1500, seq_kv=200, head_dim_qk=128,
        head_dim_v=128, scale=0.09, len_q=(1500, 700), len_kv=(200, 131), tails="nan",
    ),
    "groups of heads in several items": Case(
        batch=2, heads_q=12, heads_k=2, heads_v=2, seq_q=300, seq_kv=330, right=0,
        bottom_right=True, head_dim_qk=128, head_dim_v=64, scale=0.09,
    ),
    "one query, log-sum-exp far below zero": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=1, seq_kv=100, head_dim_qk=128,
        head_dim_v=128, scale=0.09, offset=-120.0,
    ),
    "a band without a key": Case(
        heads_q=2, heads_k=1, heads_v=1, seq_q=145, seq_kv=129, left=5, right=-6, head_dim_qk=128,
        head_dim_v=128, scale=0.09,
    ),
    "wide heads in a window": Case(
        heads_q=2, heads_k=1, heads_v=1, seq_q=190, seq_kv=190, left=30, right=0, head_dim_qk=256,
        head_dim_v=256, scale=0.0625,
    ),
    "a narrow window of many heads": Case(
        batch=2, heads_q=8, heads_k=2, heads_v=2, seq_q=700, seq_kv=700, left=100, right=0,
        head_dim_qk=64, head_dim_v=64, scale=0.125, sink=0.5,
    ),
    "a narrow window on both sides, unequal head dims": Case(
        dtype="float16", heads_q=5, heads_k=1, heads_v=1, seq_q=333, seq_kv=333, left=50, right=10,
        head_dim_qk=192, head_dim_v=128, scale=0.07,
    ),
    "clusters, half a cluster's keys beyond the end, padding, unequal groups": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=333, seq_kv=450, right=0,
        len_q=(333, 70), len_kv=(450, 129), head_dim_qk=192, head_dim_v=192, scale=0.07,
        tails="nan",
    ),
    "clusters, causal, deterministic": Case(
        batch=2, heads_q=2, heads_k=2, heads_v=2, seq_q=600, seq_kv=600, right=0, head_dim_qk=256,
        head_dim_v=256, scale=0.0625, deterministic=True,
    ),
    "soft cap, below and above what a polynomial takes": Case(
        heads_q=2, heads_k=1, heads_v=1, seq_q=200, seq_kv=300, right=0, head_dim_qk=128,
        head_dim_v=128, scale=0.09, softcap=5.0, logits=2.0,
    ),
    "soft cap far below the scores, narrow heads": Case(
        dtype="float16", heads_q=2, heads_k=2, heads_v=2, seq_q=130, seq_kv=190, head_dim_qk=64,
        head_dim_v=64, scale=0.125, softcap=3.0, logits=100.0,
    ),
    "slopes of cuDNN, aligned bottom right": Case(
        heads_q=6, heads_k=2, heads_v=3, seq_q=150, seq_kv=270, right=0, bottom_right=True,
        head_dim_qk=128, head_dim_v=128, scale=0.09, alibi="cudnn",
    ),
    "slopes by batch entry and head, padding, soft cap": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=150, seq_kv=200, len_q=(70, 150),
        len_kv=(200, 33), head_dim_qk=64, head_dim_v=64, scale=0.125, alibi="BH", softcap=20.0,
    ),
    "bias, rows of -inf and NaN beyond the lengths": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=150, seq_kv=200, len_q=(150, 33),
        len_kv=(7, 200), head_dim_qk=128, head_dim_v=128, scale=0.09, bias="float32",
    ),
    "bias for all keys of a row, transposed, in a window": Case(
        dtype="float16", heads_q=2, heads_k=2, heads_v=2, seq_q=200, seq_kv=130, left=50, right=3,
        head_dim_qk=64, head_dim_v=64, scale=0.125, bias="bfloat16", bias_axes="hqk",
        bias_layout="queries", softcap=30.0,
    ),
    "boolean mask for all queries, with slopes": Case(
        batch=3, heads_q=2, heads_k=1, heads_v=1, seq_q=90, seq_kv=300, head_dim_qk=192,
        head_dim_v=128, scale=0.07, bias="bool", bias_axes="bk", alibi="H",
    ),
    "boolean mask that comes by tiles, lengths, a soft cap": Case(
        batch=3, heads_q=4, heads_k=2, heads_v=1, seq_q=330, seq_kv=270, len_q=(330, 0, 77),
        len_kv=(270, 90, 1), head_dim_qk=128, head_dim_v=128, scale=0.09, softcap=20.0,
        bias="bool", bias_axes="bqk", bias_layout="aligned",
    ),
    "bytes as a mask that comes by tiles, causal, slopes, dropout": Case(
        dtype="float16", batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=200, seq_kv=300, right=0,
        bottom_right=True, head_dim_qk=64, head_dim_v=64, scale=0.125, alibi="H", dropout=0.3,
        bias="uint8", bias_layout="aligned",
    ),
    "gradient of a bias for all batch entries, padding": Case(
        batch=3, heads_q=4, heads_k=2, heads_v=1, seq_q=200, seq_kv=330, len_q=(200, 70, 0),
        len_kv=(330, 0, 90), right=20, bottom_right=True, head_dim_qk=128, head_dim_v=128,
        scale=0.09, bias="bfloat16", bias_axes="hqk", d_bias="bfloat16",
    ),
    "gradient of a bias for all heads, odd strides": Case(
        dtype="float16", batch=2, heads_q=6, heads_k=2, heads_v=3, seq_q=130, seq_kv=131,
        head_dim_qk=72, head_dim_v=40, scale=0.1, bias="float32", bias_axes="bqk",
        d_bias="float32", layouts=(("dBias", "odd"),),
    ),
    "gradient of a bias for all queries": Case(
        batch=2, heads_q=2, heads_k=1, heads_v=2, seq_q=300, seq_kv=200, left=40, right=0,
        head_dim_qk=64, head_dim_v=64, scale=0.125, bias="float16", bias_axes="hk",
        d_bias="float16",
    ),
    "gradient of a bias for all keys, soft cap and slopes": Case(
        dtype="float16", batch=2, heads_q=2, heads_k=2, heads_v=2, seq_q=190, seq_kv=300,
        head_dim_qk=192, head_dim_v=128, scale=0.07, softcap=5.0, alibi="H", bias="bfloat16",
        bias_axes="bq", d_bias="float32",
    ),
    "gradient of one number, element-wise access": Case(
        batch=2, heads_q=2, heads_k=1, heads_v=1, seq_q=70, seq_kv=90, len_kv=(90, 5), right=0,
        head_dim_qk=256, head_dim_v=256, scale=0.06, bias="float32", bias_axes="",
        d_bias="float32", layouts=(("q", "odd"), ("dO", "odd")),
    ),
    "gradient of an aligned bias": Case(
        dtype="float16", batch=2, heads_q=2, heads_k=1, heads_v=2, seq_q=300, seq_kv=200,
        head_dim_qk=128, head_dim_v=128, scale=0.09, bias="float16", bias_axes="qk",
        d_bias="bfloat16",
    ),
    "gradient of a bias by tiles, for all batch entries, NaN beyond the lengths": Case(
        batch=3, heads_q=4, heads_k=2, heads_v=1, seq_q=200, seq_kv=330, len_q=(200, 70, 0),
        len_kv=(330, 0, 90), right=20, bottom_right=True, head_dim_qk=128, head_dim_v=128,
        scale=0.09, bias="bfloat16", bias_axes="hqk", bias_layout="aligned", d_bias="bfloat16",
        tails="nan",
    ),
    "gradient of a bias by tiles, of each entry and head, narrow heads": Case(
        dtype="float16", batch=2, heads_q=2, heads_k=1, heads_v=2, seq_q=450, seq_kv=264, left=100,
        right=3, head_dim_qk=64, head_dim_v=40, scale=0.125, bias="float16", bias_axes="bhqk",
        bias_layout="aligned", d_bias="float32",
    ),
    "gradient of a bias by tiles, for all heads, odd strides, slopes": Case(
        batch=2, heads_q=6, heads_k=2, heads_v=3, seq_q=130, seq_kv=131, head_dim_qk=72,
        head_dim_v=104, scale=0.1, alibi="H", bias="float16", bias_axes="bqk",
        bias_layout="aligned", d_bias="float16", layouts=(("dBias", "odd"),),
    ),
    "gradient of a bias by tiles, for all, few blocks": Case(
        batch=2, heads_q=4, heads_k=4, heads_v=4, seq_q=700, seq_kv=520, head_dim_qk=128,
        head_dim_v=64, scale=0.09, bias="bfloat16", bias_axes="qk", bias_layout="aligned",
        d_bias="bfloat16", blocks=0.3, blocks_axes="bh", seed=3,
    ),
    "gradient of a bias, transposed in memory": Case(
        heads_q=2, heads_k=2, heads_v=2, seq_q=129, seq_kv=190, right=5, head_dim_qk=96,
        head_dim_v=96, scale=0.1, bias="bfloat16", d_bias="bfloat16", bias_layout="queries",
    ),
    "sinks, every statistic, a window, entries without keys or queries": Case(
        batch=3, heads_q=4, heads_k=2, heads_v=1, seq_q=200, seq_kv=330, left=50, right=0,
        bottom_right=True, len_q=(200, 70, 0), len_kv=(330, 0, 90), head_dim_qk=64, head_dim_v=64,
        scale=0.125, sink=0.5, row_outputs=("score_max", "score_sum_exp"),
    ),
    "sinks and every statistic, growing scores": Case(
        dtype="float16", heads_q=2, heads_k=1, heads_v=1, seq_q=129, seq_kv=400, head_dim_qk=128,
        head_dim_v=128, scale=0.09, logits=100.0, sink=100.0,
        row_outputs=("score_max", "score_sum_exp"),
    ),
    "one query and a sink far above its scores": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=1, seq_kv=100, head_dim_qk=40,
        head_dim_v=40, scale=-0.2, offset=-120.0, sink=0.0, row_outputs=("score_max",),
    ),
    "dropout, a window, padding, seed and offset of the host, dumps": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=150, seq_kv=270, left=100, right=3,
        len_q=(150, 33), len_kv=(270, 90), head_dim_qk=128, head_dim_v=128, scale=0.09, dropout=0.1,
        dropout_as="host", dropout_dtypes=("int32", "int64"), rng_dump=True, seed=3,
    ),
    "dropout, narrow heads, a sink, element-wise access": Case(
        dtype="float16", heads_q=2, heads_k=1, heads_v=1, seq_q=129, seq_kv=200, right=0,
        head_dim_qk=64, head_dim_v=64, scale=0.125, dropout=0.5, sink=0.5, softcap=20.0,
        layouts=(("q", "odd"), ("dK", "odd")), rng_dump=True,
    ),
    "dropout, one key worker for each product": Case(
        heads_q=2, heads_k=2, heads_v=1, seq_q=200, seq_kv=190, right=0, head_dim_qk=256,
        head_dim_v=256, scale=0.0625, dropout=0.1, dropout_as="value",
    ),
    "dropout in parts of the queries, with slopes": Case(
        heads_q=4, heads_k=2, heads_v=2, seq_q=200, seq_kv=190, right=0, head_dim_qk=192,
        head_dim_v=128, scale=0.07, dropout=0.9, alibi="cudnn",
    ),
    "FlashAttention's dropout, an odd number of blocks, padding, host numbers": Case(
        dtype="bfloat16", batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=200, seq_kv=333,
        head_dim_qk=128, head_dim_v=128, scale=0.09, len_q=(77, 200), len_kv=(333, 47),
        dropout=0.17, dropout_algorithm="flash", dropout_as="host", rng_dump=True, right=0,
        debug_softmax=True,
    ),
    "FlashAttention's dropout, narrow heads, ragged": Case(
        dtype="float16", batch=3, heads_q=2, heads_k=2, heads_v=2, seq_q=300, seq_kv=260,
        head_dim_qk=64, head_dim_v=64, scale=0.125, len_q=(300, 17, 140), len_kv=(33, 260, 129),
        dropout=0.5, dropout_algorithm="flash", rng_dump=True,
        ragged=("q", "k", "v", "o", "dO", "dQ", "dK", "dV"), debug_softmax=True,
    ),
    "FlashAttention's dropout, tiles of 16 keys, a bias and its gradient": Case(
        dtype="float16", heads_q=2, heads_k=1, heads_v=2, seq_q=100, seq_kv=210, head_dim_qk=512,
        head_dim_v=512, scale=0.04, dropout=0.3, dropout_algorithm="flash", bias="float32",
        bias_axes="hqk", d_bias="float16", dropout_as="value", debug_softmax=True,
    ),
    "dropout by a boolean mask of a row of keys": Case(
        batch=2, heads_q=2, heads_k=1, heads_v=1, seq_q=130, seq_kv=150, head_dim_qk=128,
        head_dim_v=128, scale=0.09, dropout="bool", dropout_axes="bk", dropout_as="value",
        rng_dump=True,
    ),
    "dropout by a mask, transposed, narrow heads": Case(
        dtype="float16", heads_q=2, heads_k=2, heads_v=2, seq_q=200, seq_kv=130, right=0,
        head_dim_qk=64, head_dim_v=64, scale=0.125, dropout="bfloat16", dropout_layout="queries",
        dropout_as="host", len_kv=(99,),
    ),
    "gradients of tables, slopes, rows and a number that a function reads": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=140, seq_kv=200, len_q=(140, 33),
        len_kv=(90, 200), head_dim_qk=64, head_dim_v=64, scale=0.125, d_mods="float32",
        score_mod=(
            (
                "add",
                ("mul", ("add", "s", "table"), "factor"),
                ("mul", ("tanh", ("mul", "s", "rows")), ("mul", "slopes", "columns")),
            ),
            ("cmp_ge", ("add", "row", 60), "col"),
        ),
    ),
    "gradients of what a function reads, dropout, a soft cap and a bias": Case(
        dtype="float16", batch=2, heads_q=2, heads_k=1, heads_v=1, seq_q=130, seq_kv=150, right=0,
        bottom_right=True, head_dim_qk=72, head_dim_v=40, scale=0.12, softcap=20.0, dropout=0.3,
        bias="float32", bias_axes="qk", d_bias="float32", d_mods="float16",
        score_mod=(("add", ("sigmoid", ("add", "s", "columns")), ("mul", "slopes", "s")), None),
    ),
    "pages of keys and values, of two sizes, in turn": Case(
        batch=3, heads_q=4, heads_k=2, heads_v=1, seq_q=70, seq_kv=300, right=0, bottom_right=True,
        len_q=(70, 33, 1), len_kv=(300, 129, 64), head_dim_qk=128, head_dim_v=128, scale=0.09,
        page_k=16, page_v=64,
    ),
    "pages larger than tiles, an empty sequence, packed tables": Case(
        dtype="float16", batch=3, heads_q=2, heads_k=2, heads_v=2, seq_q=130, seq_kv=290,
        len_q=(130, 7, 90), len_kv=(290, 0, 200), head_dim_qk=64, head_dim_v=64, scale=0.125,
        page_k=256, page_v=128, packed_tables=True,
    ),
    "pages of values alone, of one row, in a window": Case(
        batch=2, heads_q=4, heads_k=1, heads_v=2, seq_q=40, seq_kv=130, left=50, right=3,
        len_q=(40, 33), len_kv=(130, 77), head_dim_qk=72, head_dim_v=40, scale=0.2, page_v=1,
    ),
    "one query, pages of keys alone, tiles of 96 keys": Case(
        batch=2, heads_q=4, heads_k=1, heads_v=1, seq_q=1, seq_kv=500, len_q=(1, 1),
        len_kv=(500, 333), head_dim_qk=192, head_dim_v=192, scale=0.07, page_k=128, sink=0.5,
    ),
    "pages of 8 rows, wide heads, a bias and slopes": Case(
        dtype="float16", batch=2, heads_q=2, heads_k=2, heads_v=1, seq_q=65, seq_kv=190,
        len_q=(65, 40), len_kv=(190, 100), head_dim_qk=256, head_dim_v=256, scale=0.0625,
        bias="float16", alibi="H", page_k=8, page_v=8, packed_tables=True,
    ),
    "pages, element-wise access": Case(
        batch=2, heads_q=2, heads_k=1, heads_v=1, seq_q=37, seq_kv=70, head_dim_qk=24,
        head_dim_v=16, scale=0.2, len_q=(37, 3), len_kv=(70, 5), page_k=16, page_v=4,
        layouts=(("k", "odd"), ("v", "odd"), ("dK", "odd"), ("dV", "odd")),
    ),
    "ragged: all of them, gaps, an entry without queries, one without keys": Case(
        batch=4, heads_q=4, heads_k=2, heads_v=1, seq_q=200, seq_kv=330, len_q=(200, 0, 130, 7),
        len_kv=(330, 50, 0, 129), right=0, bottom_right=True, head_dim_qk=128, head_dim_v=128,
        scale=0.09, ragged=("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"), gaps=True,
        offset_dtype="int64",
    ),
    "ragged: lengths from offsets, fused projections, padded stats, a window, sinks": Case(
        dtype="float16", batch=3, heads_q=4, heads_k=2, heads_v=2, seq_q=300, seq_kv=300, left=70,
        right=0, len_q=(300, 65, 128), len_kv=(300, 65, 128), head_dim_qk=64, head_dim_v=64,
        scale=0.125, lengths_as="offsets", sink=0.5, row_outputs=("score_max",),
        ragged=("q", "k", "v", "o", "dO", "dQ", "dK", "dV"),
        layouts=(("q", "packed"), ("k", "packed"), ("v", "packed"), ("dQ", "packed")),
    ),
    "ragged queries, padded keys": Case(
        batch=3, heads_q=2, heads_k=1, heads_v=1, seq_q=150, seq_kv=200, len_q=(1, 150, 64),
        len_kv=(33, 200, 128), head_dim_qk=192, head_dim_v=128, scale=0.07, bias="bfloat16",
        ragged=("q", "o", "dO", "dQ", "score_max"), row_outputs=("score_max",),
    ),
    "ragged queries, pages of keys and values, packed tables": Case(
        batch=3, heads_q=4, heads_k=2, heads_v=2, seq_q=150, seq_kv=300, len_q=(1, 150, 64),
        len_kv=(33, 300, 128), right=0, bottom_right=True, head_dim_qk=128, head_dim_v=128,
        scale=0.09, ragged=("q", "o", "stats", "dO", "dQ"), lengths_as="offsets", page_k=16,
        page_v=64, packed_tables=True,
    ),
    "ragged queries and values, pages of keys": Case(
        dtype="float16", batch=2, heads_q=2, heads_k=1, heads_v=2, seq_q=70, seq_kv=150,
        len_q=(70, 0), len_kv=(40, 150), head_dim_qk=64, head_dim_v=64, scale=0.125,
        ragged=("q", "v", "o", "dV"), gaps=True, page_k=128,
    ),
    "ragged keys, element-wise access": Case(
        batch=2, heads_q=2, heads_k=2, heads_v=2, seq_q=70, seq_kv=150, len_kv=(40, 150),
        head_dim_qk=40, head_dim_v=24, scale=0.2, ragged=("k", "v", "dK", "dV"), gaps=True,
        layouts=(("k", "odd"), ("dV", "odd")),
    ),
    "ragged: many short sequences and a long one, wide heads": Case(
        batch=9, heads_q=6, heads_k=3, heads_v=3, seq_q=400, seq_kv=400, right=0, bounded=True,
        len_q=(1, 3, 64, 65, 0, 400, 2, 127, 128), len_kv=(1, 3, 64, 65, 0, 400, 2, 127, 128),
        head_dim_qk=256, head_dim_v=256, scale=0.06,
        ragged=("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    ),
    "ragged: more bundles of heads than places of sums": Case(
        batch=60, heads_q=6, heads_k=6, heads_v=6, seq_q=130, seq_kv=130, right=0,
        len_q=(130, 33, 129, 100, 64, 130) * 10, len_kv=(130, 33, 129, 100, 64, 130) * 10,
        head_dim_qk=128, head_dim_v=128, scale=0.09, gaps=True,
        ragged=("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    ),
    "ragged, narrow heads, full: more bundles than places; deterministic": Case(
        dtype="float16", batch=60, heads_q=6, heads_k=6, heads_v=6, seq_q=129, seq_kv=130,
        len_q=(129, 20, 129, 129, 0, 129) * 10, len_kv=(3, 129, 130, 64, 40, 100) * 10,
        head_dim_qk=64, head_dim_v=64, scale=0.125, gaps=True, deterministic=True,
        ragged=("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    ),
    "few queries: a consumer for each head; lengths": Case(
        batch=9, heads_q=64, heads_k=8, heads_v=16, seq_q=50, seq_kv=150, right=0,
        bottom_right=True, len_q=(50, 0, 1, 33, 50, 17, 49, 50, 2),
        len_kv=(150, 20, 0, 129, 64, 1, 65, 150, 3), head_dim_qk=64, head_dim_v=64, scale=0.125,
    ),
    "few queries: a consumer for each head; a sink": Case(
        dtype="float16", batch=9, heads_q=32, heads_k=16, heads_v=8, seq_q=64, seq_kv=300,
        head_dim_qk=128, head_dim_v=128, scale=0.09, sink=0.5,
    ),
    "few queries: a consumer for each head; ragged": Case(
        batch=9, heads_q=32, heads_k=4, heads_v=4, seq_q=40, seq_kv=200, right=3,
        len_q=(40, 0, 1, 33, 40, 17, 39, 40, 2), len_kv=(150, 20, 0, 129, 64, 1, 65, 200, 3),
        head_dim_qk=128, head_dim_v=96, scale=0.09,
        ragged=("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    ),
    "unequal head dims": Case(
        heads_q=2, heads_k=2, heads_v=2, seq_q=65, seq_kv=129, head_dim_qk=192, head_dim_v=128,
        scale=0.07,
    ),
    "few blocks, rows of blocks without any": Case(
        batch=2, heads_q=4, heads_k=2, heads_v=1, seq_q=700, seq_kv=1300, head_dim_qk=128,
        head_dim_v=128, scale=0.09, blocks=0.1, blocks_layout="queries", seed=3,
    ),
    "blocks by head, causal, padding, by product, deterministic": Case(
        batch=2, heads_q=4, heads_k=4, heads_v=2, seq_q=400, seq_kv=500, len_q=(400, 131),
        len_kv=(300, 500), head_dim_qk=192, head_dim_v=128, scale=0.07, blocks=0.5,
        blocks_axes="h", right=0, bottom_right=True, deterministic=True,
    ),
    "heads wider than a block's registers": Case(
        heads_q=2, heads_k=1, heads_v=1, seq_q=130, seq_kv=200, head_dim_qk=264, head_dim_v=512,
        scale=0.06, right=0,
    ),
    "wide heads, odd slices, element-wise access": Case(
        heads_q=2, heads_k=1, heads_v=2, seq_q=70, seq_kv=90, head_dim_qk=64, head_dim_v=264,
        scale=0.125, layouts=(("v", "odd"), ("o", "odd")),
    ),
}  # fmt: skip


def library(name: str) -> Library:
    """A library with CUDA, or a skipped test."""
    xp = pytest.importorskip(name)
    if name == "torch" and not xp.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return Library(xp, "cuda")


@pytest.mark.parametrize("name", ["torch", "cupy"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_small(case: Case, name: str) -> None:
    """Forward and backward are right, and write nothing but their outputs, from every library."""
    check(case, library(name), run_graph)
