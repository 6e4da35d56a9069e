"""What cuDNN refuses: one test for each row of ``docs/refusals.md``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from tests.cases import RAGGED_KV, RAGGED_Q, Case
from tests.drivers import check, run_graph
from tests.libraries import Library
from tests.serial import run_overridden
from tests.unit.valid_graphs import FLOAT, Backward, Forward, lengths, plans

NotSupported = cudnn.cudnnGraphNotSupportedError
Check = Callable[[], None]

#: Rows that dlattn grants, and rows that it refuses; each has a check of its own.
LIFTED: dict[str, Check] = {}
REFUSED: dict[str, Check] = {}


def right(run: Callable[[Case, Any], None] = run_graph, **fields: Any) -> Check:
    """Forward and backward of a small case agree with the oracle."""
    sizes: dict[str, Any] = {
        "dtype": "float16",
        "batch": 2,
        "heads_q": 4,
        "heads_k": 2,
        "heads_v": 2,
        "seq_q": 20,
        "seq_kv": 33,
        "head_dim_qk": 16,
        "head_dim_v": 24,
        "scale": 0.25,
    }
    return lambda: check(Case(**{**sizes, **fields}), Library(), run)


def all_of(*checks: Check) -> Check:
    def run() -> None:
        for one in checks:
            one()

    return run


def refuses(
    graph: type[Forward], given: Any, said: str, error: type[Exception] = NotSupported
) -> Check:
    """The call or ``validate`` raises, and says so; ``given`` are arguments, or makes them."""

    def run() -> None:
        made = graph()
        with pytest.raises(error, match=said):
            made.sdpa(**(given(made) if callable(given) else given)).validate()

    return run


def refuses_change(
    change: Callable[[Any], Any],
    said: str,
    error: type[Exception] = NotSupported,
) -> Check:
    """``validate`` raises once a tensor has been changed."""

    def run() -> None:
        made = Forward().sdpa()
        change(made)
        with pytest.raises(error, match=said):
            made.validate()

    return run


def a_tensor(argument: str) -> Callable[[Any], dict[str, Any]]:
    return lambda made: {argument: made.graph.tensor((1, 1, 1, 1), name=argument)}


def dropout(*entries: Any) -> Callable[[Any], dict[str, Any]]:
    """``None`` among the entries stands for a tensor."""
    return lambda made: {
        "dropout": tuple(
            made.graph.tensor((1, 1, 1, 1)) if entry is None else entry for entry in entries
        )
    }


def same_as_plain(graph: dict[str, Any], **arguments: Any) -> Check:
    """The graph is a plain one to every engine."""

    def run() -> None:
        plain, other = Forward().sdpa(), Forward(**graph).sdpa(**arguments)
        assert other.graph.lowered.problem == plain.graph.lowered.problem
        assert other.graph.lowered.geometry == plain.graph.lowered.geometry

    return run


def drops_everything() -> None:
    """With a probability of 1, o is 0, and so are all gradients; statistics are as ever."""
    dims = (2, 4, 20, 16)
    stats = np.full((2, 4, 20, 1), np.nan, np.float32)
    q, k, v, d_o = (np.random.default_rng(i).normal(size=dims).astype(np.float32) for i in range(4))
    o, *gradients = (np.full(dims, np.nan, np.float32) for _ in range(4))
    given = {"attn_scale": 0.25, "dropout": (1.0, 3, 5)}
    graph = cudnn.pygraph(io_data_type=FLOAT, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    inputs = [graph.tensor_like(x) for x in (q, k, v)]
    made = graph.sdpa(*inputs, **given, generate_stats=True)
    run(graph, dict(zip((*inputs, *made), (q, k, v, o, stats), strict=True)), made)
    assert (o == 0).all() and np.isfinite(stats).all()
    graph = cudnn.pygraph(io_data_type=FLOAT, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    arrays = (q, k, v, o, d_o, stats)
    inputs = [graph.tensor_like(x) for x in arrays]
    made = graph.sdpa_backward(*inputs, **given)
    run(graph, dict(zip((*inputs, *made), (*arrays, *gradients), strict=True)), made)
    assert all((gradient == 0).all() for gradient in gradients)


def run(graph: Any, pack: dict[Any, Any], outputs: list[Any]) -> None:
    for t in outputs:
        t.set_output(True).set_dim(pack[t].shape).set_data_type(FLOAT)
    graph.build()
    graph.execute(pack, None)


def inverts_a_number() -> None:
    """Two entries are three, if the second is a number."""
    geometries = []
    for scales in ((2.0,), (2.0, 0.5)):
        made = Backward()
        mask = made.graph.tensor((2, 4, 8, 12), data_type=FLOAT)
        geometries.append(made.sdpa(dropout=(mask, *scales)).graph.lowered.geometry)
    assert geometries[0] == geometries[1] and geometries[0].dropout_scale_inv == 0.5


def takes(arch: str, dims: tuple[int, int]) -> Check:
    def run() -> None:
        assert plans(arch, *dims, backward=True)

    return run


def old_gpu() -> None:
    with pytest.raises(NotSupported, match=r"it needs compute capability 8.0 \(Ampere\)"):
        plans("sm_75", 64, 64)


def integer_scale() -> None:
    assert Forward().sdpa(attn_scale=2).graph.lowered.geometry.attn_scale == 2.0


_capped: dict[str, Any] = {"score_mod": (("mul", ("tanh", "s"), "slopes"), None)}
_ragged: dict[str, Any] = {"ragged": (*RAGGED_Q, *RAGGED_KV), "len_q": (20, 3), "len_kv": (33, 7)}
_paged: dict[str, Any] = {"page_k": 8, "page_v": 16, "len_q": (20, 3), "len_kv": (33, 7)}
_wide = {"seq_q": 5, "seq_kv": 7, "scale": 0.06}

REFUSED["F1"] = refuses_change(
    lambda made: made.v.set_dim((2, 12, 24)).set_stride((288, 24, 1)),
    "v must have four dimensions",
    ValueError,
)
REFUSED["F2"] = refuses_change(
    lambda made: made.q.set_stride((1024, 256, 32, 2)), "q has stride .* last stride must be 1"
)
LIFTED["F3"] = right(head_dim_qk=12, head_dim_v=5)
LIFTED["F4"] = all_of(right(dtype="float32"), right(dtype="float64"))
REFUSED["F5"] = old_gpu
REFUSED["F6"] = refuses_change(
    lambda made: made.k.set_dim((2, 3, 12, 16)), "k has 3 heads, which do not divide the 4 heads"
)
LIFTED["F7"] = right(bias="bool")
LIFTED["F8"] = right(len_kv=(33, 7))
REFUSED["F9"] = refuses(
    Forward,
    lambda made: {"seq_len_kv": lengths(made.graph)},
    "seq_len_kv without use_padding_mask",
    ValueError,
)
LIFTED["F10"] = right(**_ragged, lengths_as="offsets")
REFUSED["F11"] = refuses(
    Forward,
    dropout(0.1, 0, 0, None, 1.0),
    r"dropout must be a tuple \(p, seed, offset\) or \(mask, scale\)",
    RuntimeError,
)
LIFTED["F12"] = drops_everything
LIFTED["F13"] = right(bias="float16", right=0, bottom_right=True)
LIFTED["F14"] = right(alibi="cudnn", right=0, bottom_right=True)
LIFTED["F15"] = right(dropout=0.1, right=0, bottom_right=True)
LIFTED["F16"] = right(seq_q=40, right=0, bottom_right=True)
LIFTED["F17"] = right(seq_q=40, left=9)
LIFTED["F18"] = all_of(
    right(right=-1), right(left=0, right=5), right(left=-3, right=2, bottom_right=True)
)
LIFTED["F19"] = all_of(right(left=9, bias="float32"), right(left=9, right=0, bias="float32"))
LIFTED["F20"] = right(alibi="cudnn")
LIFTED["F21"] = all_of(right(alibi="H"), right(alibi="BH", bottom_right=True, right=3))
LIFTED["F22"] = all_of(
    right(**_capped, alibi="cudnn", right=0), right(**_capped, len_q=(20, 3), left=9)
)
LIFTED["F23"] = right(seq_q=1, sink=0.5)
LIFTED["F24"] = right(seq_q=1, dropout=0.1)
LIFTED["F25"] = all_of(right(page_k=8, page_v=16), right(page_v=4, seq_q=1))
REFUSED["F26"] = refuses(
    Forward,
    {"paged_attention_max_seq_len_kv": 64},
    "max_seq_len_kv=64 without paged_attention_k_table",
    ValueError,
)
REFUSED["F27"] = all_of(
    refuses(
        Forward,
        lambda made: {"bias": made.graph.tensor((1, 1, 8, 13), name="my bias")},
        r"my bias has dim .*; expected \(2, 4, 8, 12\)",
        ValueError,
    ),
    refuses(
        Forward,
        lambda made: {
            "dropout": (0.1, 0, 0),
            "rng_dump": made.graph.tensor((2, 4, 8, 13), name="my dump", data_type=FLOAT),
        },
        r"my dump has dim .*\(2, 4, 8, 12\)",
        ValueError,
    ),
)
LIFTED["F28"] = right(**_paged, packed_tables=True, ragged=RAGGED_Q)
LIFTED["F29"] = all_of(
    right(blocks=0.5, seq_q=140, seq_kv=300),
    same_as_plain(
        {"is_dynamic_shape_enabled": True},
        implementation=cudnn.attention_implementation.COMPOSITE,
    ),
)
LIFTED["F30"] = same_as_plain(
    {"is_dynamic_shape_enabled": True}, implementation=cudnn.attention_implementation.UNIFIED
)
LIFTED["F31"] = all_of(
    right(row_outputs=("score_max",)), right(row_outputs=("score_sum_exp",), stats=None)
)
LIFTED["F32"] = integer_scale
LIFTED["F33"] = right(batch=1, seq_kv=1100, left=9)
LIFTED["F34"] = same_as_plain({"intermediate_data_type": FLOAT})
LIFTED["F35"] = all_of(
    right(right=0, bottom_right=True, head_dim_qk=136, head_dim_v=264), right(seq_q=1, right=0)
)
LIFTED["F36"] = right(softcap=3.0, right=0)
REFUSED["F37"] = refuses(
    Forward, {"cu_seqlens_q": None}, "unexpected keyword argument 'cu_seqlens_q'", TypeError
)
LIFTED["F38"] = all_of(
    refuses(Forward, {"softmax": None}, "unexpected keyword argument 'softmax'", TypeError),
    right(dropout=0.1, rng_dump=True, debug_softmax=True),
)
LIFTED["F39"] = all_of(
    right(run_overridden, seq_q=1, right=0), right(run_overridden, seq_q=40, seq_kv=130)
)

LIFTED["B1"] = right(seq_q=1, seq_kv=1)
LIFTED["B2"] = all_of(right(**_wide, head_dim_qk=264, head_dim_v=512), takes("sm_90a", (512, 512)))
LIFTED["B3"] = all_of(
    right(**_wide, head_dim_qk=256, head_dim_v=256),
    takes("sm_80", (512, 512)),
    takes("sm_120", (480, 512)),
)
LIFTED["B4"] = all_of(right(**_wide, head_dim_qk=192, head_dim_v=192), takes("sm_100", (512, 512)))
LIFTED["B5"] = all_of(right(bias="uint8"), right(alibi="cudnn"), right(len_q=(20, 3)))
LIFTED["B6"] = all_of(
    right(bias="float16", alibi="H", right=0, bottom_right=True),
    right(seq_q=40, right=0, bottom_right=True),
)
LIFTED["B7"] = all_of(right(left=0, right=9), right(left=-3, seq_q=40))
LIFTED["B8"] = right(seq_q=40, left=9, right=2)
LIFTED["B9"] = right(**_ragged, lengths_as="offsets", left=9, right=2)
LIFTED["B10"] = all_of(
    right(**_capped, alibi="H", right=0), right(**_capped, len_kv=(33, 7), left=9)
)
LIFTED["B11"] = all_of(right(blocks=0.5, blocks_axes="h", seq_q=300, seq_kv=140), right(**_paged))
LIFTED["B12"] = right(deterministic=True)
LIFTED["B13"] = right(bias="float16", d_bias="float16")
LIFTED["B14"] = right(**_ragged, lengths_as="offsets", bias="float16", d_bias="float32")
LIFTED["B15"] = right(deterministic=True, alibi="cudnn")
LIFTED["B16"] = right(**_ragged, deterministic=True)
REFUSED["B17"] = refuses(
    Backward, {"max_total_seq_len_q": 64}, "max_total_seq_len_q without a ragged tensor"
)
REFUSED["B18"] = refuses(
    Backward, a_tensor("dSink_token"), "dSink_token without sink_token", RuntimeError
)
LIFTED["B19"] = all_of(
    refuses(Backward, dropout(None, None), r"or \(mask, scale, scale_inv\)", RuntimeError),
    inverts_a_number,
)
LIFTED["B20"] = right(seq_q=1, sink=0.5)
LIFTED["B21"] = all_of(
    *(
        right(bias="float16", bias_axes=axes, d_bias="float16")
        for axes in ("bhqk", "qk", "hk", "b", "")
    )
)
LIFTED["B22"] = right(seq_q=3, seq_kv=129)


@pytest.mark.parametrize("row", [*LIFTED, *REFUSED])
def test_row(row: str) -> None:
    """What is lifted gives right results; what is refused raises, and names the argument."""
    (LIFTED | REFUSED)[row]()


def test_the_page_says_the_same() -> None:
    """The page has each row once, in order, and says of each what is tested here."""
    page = Path(__file__).parents[2] / "docs" / "refusals.md"
    rows = re.findall(r"^\| ([FB]\d+) \| .+ \| (\w+).*\|$", page.read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [
        f"{letter}{i + 1}" for letter, count in (("F", 39), ("B", 22)) for i in range(count)
    ]
    assert LIFTED.keys().isdisjoint(REFUSED)
    assert {row for row, here in rows if here == "Lifted"} == LIFTED.keys()
    assert {row for row, here in rows if here == "Refused"} == REFUSED.keys()
