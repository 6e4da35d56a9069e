"""What ``import dlattn`` does, and what it leaves alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dlattn as cudnn
from tests.unit.serial_graphs import declared

PUBLIC = """
    data_type heur_mode build_plan_policy diagonal_alignment attention_implementation
    tensor_reordering reduction_mode scalar_type reshape_mode numerical_note behavior_note knob
    knob_type pygraph tensor Graph graph jit graph_cache create_handle destroy_handle set_stream
    get_stream
    backend_version backend_version_string get_last_error_string create_kernel_cache
    create_device_properties cudnnGraphNotSupportedError
""".split()


def printed(program: str, *arguments: str) -> str:
    """What a program prints in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_framework_is_imported():
    """``import dlattn`` loads neither CuPy, torch nor JAX, whichever are installed."""
    program = (
        "import sys, dlattn\n"
        "print([name for name in ('cupy', 'torch', 'jax') if name in sys.modules])"
    )
    assert printed(program) == "[]"


def test_names_of_cudnn_are_there():
    """Every name of cuDNN's Python module that attention programs use is in dlattn."""
    assert [name for name in PUBLIC if not hasattr(cudnn, name)] == []


def test_versions():
    """Programs that ask for cuDNN 9.20 and later go on, and the two spellings agree."""
    assert cudnn.backend_version() >= 92000
    major, minor, patch = map(int, cudnn.backend_version_string().split("."))
    assert cudnn.backend_version() == major * 10000 + minor * 100 + patch
    assert isinstance(cudnn.__version__, str) and cudnn.__file__


def test_enumerations_behave_as_cudnn_does():
    """Members reach their siblings, print with their class, and are hashable."""
    member = cudnn.diagonal_alignment.TOP_LEFT
    assert member.BOTTOM_RIGHT is cudnn.diagonal_alignment.BOTTOM_RIGHT
    assert str(member) == "diagonal_alignment.TOP_LEFT"
    assert len({*cudnn.heur_mode}) == 5


def test_not_supported_error_is_no_runtime_error():
    """Callers that catch RuntimeError around a graph do not swallow "not supported"."""
    assert not issubclass(cudnn.cudnnGraphNotSupportedError, (RuntimeError, ValueError))


def test_import_loads_next_to_nothing():
    """What a program does not name costs it nothing, NumPy included."""
    program = """
import sys
before = {*sys.modules}
import dlattn
print(*sorted({*sys.modules} - before - {"importlib", "typing"}))
"""
    loaded = {*printed(program).split()}
    assert {name for name in loaded if name.startswith("dlattn")} == {"dlattn", "dlattn.lazy"}
    assert "numpy" not in loaded


def test_names_are_imported_when_they_are_asked_for():
    """They are there under every usual import, and errors are those of any module."""
    program = """
import sys, dlattn
assert {"flash", "graph", "attention", "merge_states", "pygraph"} <= {*dir(dlattn)}
from dlattn import attention, merge_states
assert callable(attention) and attention is dlattn.attention
assert not [name for name in sys.modules if name.startswith(("dlattn.flash", "dlattn.graph"))]
assert callable(dlattn.merge_states) and callable(dlattn.flash.mha_fwd)
import dlattn.flash
from dlattn import *
assert pygraph is dlattn.pygraph and heur_mode.A is dlattn.heur_mode.A
try:
    from dlattn import nothing
except ImportError as error:
    assert "cannot import name 'nothing' from 'dlattn'" in str(error)
try:
    dlattn.nothing
except AttributeError as error:
    print(error)
"""
    assert printed(program) == "module 'dlattn' has no attribute 'nothing'"


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_subpackages_of_frameworks_are_imported_when_they_are_named(name):
    """``import dlattn`` is enough to use them; without the framework, the error is that of
    importing it."""
    pytest.importorskip(name)
    program = f"""
import sys, dlattn
assert callable(dlattn.{name}.attention) and dlattn.{name} is sys.modules["dlattn.{name}"]
from dlattn import {name}
assert {name} is dlattn.{name}
"""
    printed(program)
    without = f"""
import sys
sys.modules["{name}"] = None
import dlattn
try:
    dlattn.{name}
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert printed(without) == name


def test_asking_for_all_names_imports_no_framework():
    """Neither star imports nor what lists, reads and documents every name."""
    program = """
import inspect, pydoc, sys
from dlattn import *
import dlattn
found = {name for name, _ in inspect.getmembers(dlattn)}
assert {*dlattn.__all__} <= {*dir(dlattn)} == found
pydoc.plaintext.document(dlattn)
print([name for name in ("cupy", "torch", "jax") if name in sys.modules])
"""
    assert printed(program) == "[]"


@pytest.mark.parametrize("package", ["dlattn", "dlattn.problem"])
def test_type_checkers_see_the_names_that_there_are(package):
    """The imports that only they read name what asking finds, from where it is found."""
    found = import_module(package)
    tree = ast.parse(Path(found.__file__).read_text(encoding="utf-8"))
    imports = [it for it in ast.walk(tree) if isinstance(it, ast.ImportFrom) and it.level == 0]
    seen = {alias.name: it.module for it in imports for alias in it.names if alias.asname}
    subpackages = {name for name, module in seen.items() if module == package == "dlattn"}
    assert {*found.__all__} == {*seen} - (subpackages - {"flash"})
    for name, module in seen.items():
        if name not in {*subpackages, "graph"}:
            assert getattr(found, name) is getattr(import_module(module), name)


def test_the_graph_function_is_there_whatever_was_imported():
    """cuDNN has a function ``graph``; here modules of a package of that name are imported, too."""
    program = """
import dlattn
made = [dlattn.graph]
import dlattn.graph.vocabulary
from dlattn import graph
import dlattn.graph.pygraph
for function in (*made, graph, dlattn.graph):
    with function(name="mine") as (it, uids):
        assert type(it) is dlattn.graph.pygraph.pygraph is dlattn.pygraph and uids == []
"""
    printed(program)


def test_threads_ask_at_once():
    """All get the same objects."""
    program = """
import threading, dlattn
names, found = dlattn.__all__, []
barrier = threading.Barrier(8)
def ask(first):
    barrier.wait()
    order = names[first:] + names[:first]
    found.append({name: getattr(dlattn, name) for name in order})
threads = [threading.Thread(target=ask, args=(5 * n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8
assert all(it[name] is getattr(dlattn, name) for it in found for name in names)
"""
    printed(program)


#: What a graph that was built before does without: rooms that declare, differentiate, choose or
#: compile, and functions.
DONE_WITHOUT = """
    dlattn.graph.helpers dlattn.graph.wrapper dlattn.graph.autotune dlattn.graph.score_mod
    dlattn.graph.primitives.nodes dlattn.graph.primitives.translate dlattn.graph.primitives.fuse
    dlattn.problem.derivative dlattn.problem.expressions dlattn.problem.activations
    dlattn.problem.pointwise dlattn.problem.primitives dlattn.problem.program
    dlattn.plans.chain dlattn.plans.decode dlattn.plans.interpreter
    dlattn.plans.bwd_sm80 dlattn.plans.bwd_sm90 dlattn.plans.bwd_dbias dlattn.plans.backward
    dlattn.calls dlattn.flash dlattn.one_call concurrent.futures
""".split()


@pytest.mark.parametrize(
    ("device", "others"),
    [
        ("cpu", ["cuda", "argument", "fwd_sm80", "fwd_sm90", "mapped", "params", "source"]),
        (80, ["fwd_sm90", "mapped", "reference", "schedule"]),
        (90, ["fwd_sm80", "reference"]),
    ],
)
def test_a_deserialised_graph_loads_its_plan_alone(tmp_path, device, others):
    """Of what only other graphs need, nothing is imported until it has run; nor is NVRTC loaded."""
    place = {"handle": cudnn.create_handle("cpu")} if device == "cpu" else {"sm_version": device}
    graph = declared((2, 4, 256, 64), **place)
    try:
        graph.build()
    except cudnn.CompileError as error:
        if "was not found" in str(error):
            pytest.skip("NVRTC is not installed")
        raise
    data = tmp_path / "graph"
    data.write_bytes(bytes(graph.serialize()))
    program = """
import sys
import numpy as np, dlattn
device = sys.argv[2]
place = {"handle": dlattn.create_handle("cpu")} if device == "cpu" else {"sm_version": int(device)}
g = dlattn.pygraph(**place)
g.deserialize([*open(sys.argv[1], "rb").read()])
if device == "cpu":
    pack = {uid: np.ones((2, 4, 256, 64), np.float16) for uid in (10, 11, 12, 20)}
    pack[21] = np.zeros((2, 4, 256, 1), np.float32)
    g.execute(pack)
    assert (pack[20] == 1).all() and (pack[21] > 0).all()
print(*sys.modules, "libnvrtc" if "libnvrtc" in open("/proc/self/maps").read() else "")
"""
    loaded = {*printed(program, str(data), str(device)).split()}
    plans = {f"dlattn.plans.{name}" for name in others}
    assert loaded & {*DONE_WITHOUT, *plans, "libnvrtc"} == set()
