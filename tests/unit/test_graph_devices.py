"""Graphs for devices that are not here."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.graph import devices, placement
from dlattn.runtime.target import CPU, KNOWN, Target

HALF = cudnn.data_type.HALF
HERE = Target("cuda", 0, (9, 0), 227 * 1024, 132)
NotSupported = cudnn.cudnnGraphNotSupportedError


def declared(source=None, **options):
    graph = cudnn.pygraph(io_data_type=HALF, **options)
    dim = (2, 4, 128, 64)
    like = None if source is None else source(dim)
    q, k, v = (graph.tensor(dim) if like is None else graph.tensor_like(like) for _ in "qkv")
    graph.sdpa(q, k, v, generate_stats=False)[0].set_output(True)
    return graph


@pytest.fixture
def hopper_here(monkeypatch):
    """A machine with a Hopper GPU."""
    monkeypatch.setattr(placement, "default_target", lambda: HERE)
    monkeypatch.setattr(devices, "cuda_target", lambda index: replace(HERE, index=index))


@pytest.mark.parametrize("arch", [*KNOWN])
def test_named_architectures(arch):
    """A named device is described as compile tests describe it."""
    graph = declared(device_property=cudnn.create_device_properties(arch))
    target = graph.lowered.target
    assert target.arch == arch and not target.is_here and str(target) == f"{arch} (described)"
    assert replace(target, index=0) == KNOWN[arch]
    assert graph.get_plan_name_at_index(0) == ("fwd_sm90" if arch == "sm_90a" else "fwd_sm80")


@pytest.mark.parametrize(("version", "arch"), [(80, "sm_80"), (89, "sm_89"), (120, "sm_120")])
def test_sm_version(version, arch):
    """A compute capability is enough; ``sm_count`` is the number of multiprocessors."""
    target = declared(sm_version=version, sm_count=7).lowered.target
    assert (target.arch, target.multiprocessors) == (arch, 7)
    with pytest.raises(NotSupported, match="sm_version is 75; dlattn compiles for 80, 86"):
        declared(sm_version=75).validate()
    with pytest.raises(NotSupported, match=r"sm_version is 90\.0; dlattn compiles for"):
        declared(sm_version=90.0).validate()
    for wrong in (0, -1, 1.5, "7", 2**31):
        with pytest.raises(RuntimeError, match="sm_count must be an int of at least 1; got"):
            declared(sm_version=90, sm_count=wrong).validate()


def test_a_device_that_is_here(hopper_here):
    """What describes the current device is that device; anything else is not here."""
    assert declared(sm_version=90).lowered.target == HERE
    assert declared(sm_version=80).lowered.target.arch == "sm_80"
    properties = cudnn.create_device_properties(0)
    assert declared(device_property=properties).lowered.target == HERE
    fewer = {**json.loads(properties.serialize()), "multiprocessors": 78}
    fewer = cudnn.create_device_properties(json.dumps(fewer))
    assert not declared(device_property=fewer).lowered.target.is_here


def test_tensors_of_the_machine():
    """Arrays on the host tell shapes to a graph with ``device_property``; with ``sm_version`` they
    say, as before, where it runs."""
    source = lambda dim: np.zeros(dim, np.float16)  # noqa: E731
    described = declared(source, device_property=cudnn.create_device_properties("sm_80"))
    assert described.lowered.target.arch == "sm_80"
    assert declared(source, sm_version=80).lowered.target == CPU
    pinned = declared(sm_version=80, handle=cudnn.create_handle(device="cpu"))
    assert pinned.lowered.target == CPU


def test_a_text_describes_a_device():
    """What one machine serialised is the same device on another."""
    first = cudnn.create_device_properties("sm_100")
    again = cudnn.create_device_properties(first.serialize())
    assert again.target == first.target and repr(again) == repr(first)
    assert json.loads(first.serialize())["compute_capability"] == [10, 0]


@pytest.mark.parametrize(
    "wrong",
    ["sm_12", "{}", "[", '{"compute_capability": [9, 0], "shared_memory": 1}', None, 1.5, "[[[["]
    + ['{"compute_capability": [9, -1], "shared_memory": 1, "multiprocessors": 1}'],
)
def test_what_describes_no_device(wrong):
    """Anything else is refused with what is taken."""
    with pytest.raises(RuntimeError, match="takes a device's ordinal, one of sm_80"):
        cudnn.create_device_properties(wrong)
    with pytest.raises(TypeError, match="made by create_device_properties"):
        declared(device_property=wrong or 5).validate()


def test_a_device_that_is_missing():
    """An ordinal needs the device."""
    with pytest.raises(RuntimeError, match="CUDA device 99 cannot be described here"):
        cudnn.create_device_properties(99)


def test_nothing_runs_there():
    """Building compiles and loads nothing; executing is an error that says what to do."""
    graph = declared(sm_version=80)
    try:
        graph.build()
    except cudnn.CompileError as error:
        if "was not found" in str(error):
            pytest.skip("NVRTC is not installed")
        raise
    with pytest.raises(RuntimeError, match="only described, sm_80, and cannot be executed here"):
        graph.execute({})
    assert graph.get_workspace_size() == 0
    assert cudnn.behavior_note.RUNTIME_COMPILATION in graph.get_behavior_notes()


@pytest.mark.parametrize("deterministic", [False, True])
def test_numeric_notes(deterministic):
    """CUDA plans use tensor cores; a backward has a fixed order of additions where it was asked."""
    notes, dim = cudnn.numerical_note, (2, 4, 128, 64)
    forward = declared(sm_version=90)
    forward.select_numeric_notes([notes.TENSOR_CORE])
    forward.deselect_numeric_notes([notes.NONDETERMINISTIC, notes.DOWN_CONVERT_INPUTS])
    forward.check_support()
    backward = cudnn.pygraph(io_data_type=HALF, sm_version=90)
    tensors = [backward.tensor(dim) for _ in range(5)]
    stats = backward.tensor((2, 4, 128, 1), data_type=cudnn.data_type.FLOAT)
    for gradient in backward.sdpa_backward(
        *tensors, stats, use_deterministic_algorithm=deterministic
    ):
        gradient.set_output(True)
    backward.select_numeric_notes([notes.TENSOR_CORE])
    backward.check_support()
    backward.deselect_numeric_notes([notes.NONDETERMINISTIC])
    if deterministic:
        backward.check_support()
    else:
        with pytest.raises(NotSupported, match="No execution plans support the graph"):
            backward.check_support()
