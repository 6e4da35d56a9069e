"""Compiled kernels in the bytes of graphs and in kernel caches, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import dlattn as cudnn
from dlattn.plans.base import Plan
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.runtime import bundle, jit
from tests.plans import put_plans
from tests.unit.serial_graphs import declared, restored, results

NotSupported = cudnn.cudnnGraphNotSupportedError

PROGRAM = """
import sys, json
from types import SimpleNamespace
import dlattn
from dlattn.graph import placement
from dlattn.runtime import jit, launch, nvrtc, tables, target, tensormap

from dataclasses import replace
hopper = replace(target.KNOWN["sm_90a"], index=0)
placement.default_target = lambda: hopper
loaded = []

class Kernel:
    function = 1
    def __init__(self, compiled, index):
        loaded.append((compiled.name, compiled.code[:4] == b"\\x7fELF"))
    def set_shared(self, nbytes):
        pass

jit.Kernel = Kernel
tensormap.encode = lambda *a: None
tensormap.address_slot = lambda place: SimpleNamespace()
tables.to_device = lambda array, index: SimpleNamespace(data=SimpleNamespace(ptr=256), nbytes=0)
launch.driver = lambda: SimpleNamespace(cuLaunchKernelEx=None)
graph = dlattn.pygraph()
graph.deserialize(open(sys.argv[1], "rb").read())
nvrtc_loaded = "libnvrtc" in open("/proc/self/maps").read()
print(json.dumps([loaded, nvrtc_loaded, graph.get_plan_name_at_index(0), jit.statistics.compiles]))
"""


@pytest.fixture(scope="module")
def hopper_data():
    graph = declared((2, 4, 256, 64), sm_version=90)
    try:
        graph.build()
    except cudnn.CompileError as error:
        if "was not found" in str(error):
            pytest.skip("NVRTC is not installed")
        raise
    return graph.serialize()


def test_a_fresh_process_compiles_nothing(hopper_data, tmp_path):
    """Kernels come from the data: neither NVRTC nor a folder of cubins is there."""
    file = tmp_path / "graph"
    file.write_bytes(bytes(hopper_data))
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "DLATTN_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded, nvrtc_loaded, plan, compiles = json.loads(done.stdout)
    assert loaded == [["dlattn_fwd_sm90", True]] and plan == "fwd_sm90"
    assert not nvrtc_loaded and compiles == 0 and not cache.exists()


def test_kernels_of_another_source(hopper_data):
    """A graph whose plan would launch another kernel than the data has is refused."""
    outside = json.loads(bytes(hopper_data))
    facts = json.loads(outside["body"])
    del facts["headers"]
    facts["kernels"][0]["source"] += "\n"
    with pytest.raises(NotSupported, match="lacks the kernel dlattn_fwd_sm90"):
        restored(bundle.seal("graph", facts).encode(), sm_version=90)
    facts["kernels"] = [{**facts["kernels"][0], "cubin": "AAAA"}]
    with pytest.raises(RuntimeError, match="has a kernel that cannot be read"):
        restored(bundle.seal("graph", facts).encode(), sm_version=90)


def test_a_tiling_that_was_asked_for(hopper_data):
    """Of a plan's other tilings, the data says which it was."""
    graph = declared((2, 4, 256, 64), sm_version=90)
    graph.create_execution_plan(0, {cudnn.knob_type.KERNEL_CFG: 1})
    graph.build_plans()
    again = restored(graph.serialize(), sm_version=90)
    assert again.get_plan_name_at_index(0) == graph.get_plan_name_at_index(0) == "fwd_sm90#1"
    first, other = (it._planning.chosen.plan.tiling for it in (graph, again))
    plain = restored(hopper_data, sm_version=90)._planning.chosen.plan.tiling
    assert first == other != plain


def test_plans_of_plans(monkeypatch):
    """A plan that runs others takes along what they launch."""

    class Pair(Plan):
        name = "pair"
        workspace_size = 0

        def __init__(self, problem, geometry, target):
            super().__init__(problem, geometry, target)
            self.plans = [kind(problem, geometry, target) for kind in (FwdSm80, FwdSm90)]

        @classmethod
        def supports(cls, problem, geometry, target):
            return None

        def build(self): ...

        def execute(self, pointers, workspace, stream): ...

    put_plans(monkeypatch, Pair)
    graph = declared((2, 4, 256, 64), sm_version=90)
    graph.build()
    again = restored(graph.serialize(), sm_version=90)
    names = [source.name for source in again._planning.chosen.plan.sources()]
    assert names == ["dlattn_fwd_sm80", "dlattn_fwd_sm90"]


def test_other_devices_of_an_architecture(hopper_data):
    """The plan is made for the device that is there, with as many multiprocessors as it has."""
    few = {
        **json.loads(cudnn.create_device_properties("sm_90a").serialize()),
        "multiprocessors": 78,
    }
    device = cudnn.create_device_properties(json.dumps(few))
    graph = restored(hopper_data, device_property=device)
    assert graph._planning.chosen.plan.target.multiprocessors == 78
    with pytest.raises(RuntimeError, match="cannot be executed here"):
        results(graph, (2, 4, 256, 64))


def test_kernel_cache(hopper_data):
    """It holds what graphs launch, for other sizes too, goes to another process as text, and takes
    one text."""
    cache = cudnn.create_kernel_cache()
    assert (len(cache), cache.nbytes, cache.names) == (0, 0, [])
    graph = declared((2, 4, 256, 64), sm_version=90, kernel_cache=cache)
    graph.build()
    names = {"dlattn_fwd_sm90 sm_90a", "dlattn_fwd_parts sm_90a"}
    assert {*cache.names} == names and cache.nbytes > 10_000
    other = cudnn.create_kernel_cache()
    jit.forget()
    other.deserialize(cache.serialize())
    assert other.names == cache.names and other.nbytes == cache.nbytes
    declared((3, 2, 300, 64), sm_version=90).build()
    assert (jit.statistics.compiles, jit.statistics.disk_hits) == (0, 0)
    with pytest.raises(RuntimeError, match="holds . kernels already"):
        other.deserialize(cache.serialize())
    with pytest.raises(RuntimeError, match="cut off or damaged"):
        cudnn.create_kernel_cache().deserialize(cache.serialize()[:-9])
    with pytest.raises(TypeError, match="kernel_cache must be made by create_kernel_cache"):
        cudnn.pygraph(kernel_cache=1)
