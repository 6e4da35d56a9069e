"""Graphs on a GPU that were bytes, that were declared for other sizes, or compiled elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn as cudnn
from dlattn.runtime import jit
from dlattn.runtime.target import cuda_target
from tests.callers import Caller
from tests.cases import Case
from tests.drivers import check, gpu_library
from tests.mha import Mha, arrays, primitives
from tests.serial import run_overridden, run_serialized
from tests.strategies import families

pytestmark = pytest.mark.gpu

HALF = cudnn.data_type.HALF

CASE = Case(
    dtype="float16", batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=150, seq_kv=150, right=0,
    head_dim_qk=64, head_dim_v=64, scale=0.125,
)  # fmt: skip
CASES = {
    "causal": CASE,
    "one query": replace(CASE, seq_q=1, seq_kv=700, bottom_right=True),
    "slopes of cuDNN, padding": replace(CASE, alibi="cudnn", len_q=(150, 33), len_kv=(7, 150)),
    "bias and its gradient": replace(CASE, bias="float16", d_bias="float16", bias_axes="qk"),
    "dropout": replace(CASE, dropout=0.2),
    "wide heads": replace(CASE, head_dim_qk=128, head_dim_v=128, seq_q=300, seq_kv=517),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", [run_serialized, run_overridden])
def test_cases(name: str, run: Any) -> None:
    """Forward and backward are right, and write nothing but their outputs."""
    check(CASES[name], gpu_library(), run)


@settings(settings.get_profile("gpu"), max_examples=15)
@given(families("gpu", size=3))
def test_random(family: tuple[Case, ...]) -> None:
    """So are those of every case."""
    for case in family:
        check(case, gpu_library(), run_serialized)
        check(case, gpu_library(), run_overridden)


def test_primitive_operations() -> None:
    """Attention of primitive operations comes back, too."""
    sizes = {"seq_q": 64, "seq_kv": 64, "head_dim_qk": 64, "head_dim_v": 64}
    case = Mha(dtype="bfloat16", scale="scores", causal=0, **sizes)
    caller = Caller("cupy")
    given = {role: caller.tensor(x) for role, x in arrays(case).items()}
    built = primitives(case, given)
    wanted = built.run(caller)
    again = cudnn.pygraph()
    again.deserialize(built.graph.serialize())
    built.graph = again
    got = built.run(caller)
    assert all(np.array_equal(got[role], wanted[role]) for role in wanted)


def declared(dim: tuple[int, ...], **options: Any) -> cudnn.pygraph:
    graph = cudnn.pygraph(io_data_type=HALF, **options)
    tensors = [graph.tensor(dim, uid=uid) for uid in (1, 2, 3)]
    o, _ = graph.sdpa(*tensors, attn_scale=0.125, generate_stats=False, use_causal_mask=True)
    o.set_output(True).set_uid(4)
    return graph


def pack(dim: tuple[int, ...]) -> dict[int, Any]:
    import cupy

    rng = np.random.default_rng(0)
    made = {uid: cupy.asarray(rng.standard_normal(dim).astype(np.float16)) for uid in (1, 2, 3)}
    return {**made, 4: cupy.zeros(dim, np.float16)}


def run(graph: cudnn.pygraph, dim: tuple[int, ...], **overrides: Any) -> Any:
    import cupy

    given = pack(dim)
    size = graph.get_workspace_size(**overrides)
    graph.execute(given, cupy.empty(size, np.uint8) if size else None, **overrides)
    return given[4].get()


PROGRAM = """
import sys
import numpy as np
import cupy
inputs = np.load(sys.argv[2])
given = {uid: cupy.asarray(inputs[f"arr_{uid - 1}"]) for uid in (1, 2, 3)}
given[4] = cupy.zeros_like(given[1])
import dlattn
graph = dlattn.pygraph()
graph.deserialize([*open(sys.argv[1], "rb").read()])
size = graph.get_workspace_size()
graph.execute(given, cupy.empty(size, np.uint8) if size else None)
np.save(sys.argv[3], given[4].get())
from dlattn.runtime import jit
print(jit.statistics.compiles, "libnvrtc" in open("/proc/self/maps").read())
"""


def test_a_fresh_process(tmp_path: Path) -> None:
    """A process without NVRTC and without a cache gets the same bits."""
    dim = (2, 4, 300, 64)
    graph = declared(dim)
    graph.build()
    wanted = run(graph, dim)
    data, inputs, out = tmp_path / "graph", tmp_path / "inputs.npz", tmp_path / "out.npy"
    data.write_bytes(bytes(graph.serialize()))
    np.savez(inputs, *[pack(dim)[uid].get() for uid in (1, 2, 3)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(data), str(inputs), str(out)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "DLATTN_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "False"] and not (tmp_path / "cache").exists()
    assert np.array_equal(np.load(out), wanted)


def of_device_with(multiprocessors: int) -> Any:
    """The description of this device, with another number of them."""
    text = cudnn.create_device_properties(0).serialize()
    here = f'"multiprocessors": {cuda_target(0).multiprocessors}'
    changed = text.replace(here, f'"multiprocessors": {multiprocessors}')
    assert changed != text
    return cudnn.create_device_properties(changed)


def test_compiled_without_the_device() -> None:
    """What was compiled for a description runs on the device, with its own multiprocessors."""
    # Of 256 there is one tiling, however many multiprocessors there are.
    dim = (2, 4, 300, 256)
    elsewhere = declared(dim, device_property=of_device_with(3))
    elsewhere.build()
    with pytest.raises(RuntimeError, match="cannot be executed here"):
        elsewhere.execute(pack(dim))
    graph = cudnn.pygraph()
    graph.deserialize(elsewhere.serialize())
    plain = declared(dim)
    plain.build()
    assert np.array_equal(run(graph, dim), run(plain, dim))


@pytest.mark.parametrize("multiprocessors, heads", [(3, 4), (500, 40)])
def test_compiled_with_and_without_an_order(multiprocessors: int, heads: int) -> None:
    """So it does where tiles of a block mask have an order on one of them only."""
    import cupy

    dim = (2, heads, 300, 128)
    mask = cupy.asarray([3, 5, 6], np.uint8).reshape(1, 1, 3, 1)

    def of_blocks(**options: Any) -> cudnn.pygraph:
        graph = cudnn.pygraph(io_data_type=HALF, **options)
        tensors = [graph.tensor(dim, uid=uid) for uid in (1, 2, 3)]
        bits = graph.tensor(mask.shape, uid=5, data_type=cudnn.data_type.UINT8)
        o, _ = graph.sdpa(*tensors, attn_scale=0.125, generate_stats=False, block_mask=bits)
        o.set_output(True).set_uid(4)
        graph.build()
        return graph

    elsewhere = of_blocks(device_property=of_device_with(multiprocessors))
    data, plain = elsewhere.serialize(), of_blocks()
    graph, before = cudnn.pygraph(), jit.statistics.compiles
    graph.deserialize(data)
    outputs = []
    for it in (graph, plain):
        given = {**pack(dim), 5: mask}
        size = it.get_workspace_size()
        it.execute(given, cupy.empty(size, np.uint8) if size else None)
        outputs.append(given[4].get())
    assert np.array_equal(*outputs) and outputs[0].any()
    assert jit.statistics.compiles == before
    assert elsewhere.get_workspace_size() != plain.get_workspace_size()


def test_shapes_across_one_query_compile_once() -> None:
    """Each shape is right, on whichever plan; those seen before, and others, compile nothing."""
    graph = declared((2, 4, 128, 64), is_override_shape_enabled=True)
    graph.build()

    def check_shape(length: int) -> None:
        dim = (3, 4, length, 64)
        shapes = {"override_uids": [1, 2, 3], "override_shapes": [dim] * 3}
        plain = declared(dim)
        plain.build()
        assert np.array_equal(run(graph, dim, **shapes), run(plain, dim)), length

    for length in (1, 128, 300):
        check_shape(length)
    before = jit.statistics.compiles
    for length in (1, 2, 16, 17, 127, 300, 1, 511):
        check_shape(length)
    assert jit.statistics.compiles == before


def test_threads() -> None:
    """Shapes that several threads ask for at once are made once each, and right in each."""
    graph = declared((2, 4, 128, 64), is_override_shape_enabled=True)
    graph.build()
    lengths = (1, 40, 128, 200)
    wanted = {}
    for length in lengths:
        plain = declared((1, 4, length, 64))
        plain.build()
        wanted[length] = run(plain, (1, 4, length, 64))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for length in lengths:
                dim = (1, 4, length, 64)
                shapes = {"override_uids": [1, 2, 3], "override_shapes": [dim] * 3}
                assert np.array_equal(run(graph, dim, **shapes), wanted[length])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
