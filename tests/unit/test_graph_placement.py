"""Where graphs run."""

from __future__ import annotations

import pytest

import dlattn as cudnn
from dlattn.graph import placement
from dlattn.plans.base import Plan
from dlattn.runtime.target import CPU, Target
from tests.plans import put_plans

DIM = (2, 4, 8, 16)


class Anywhere(Plan):
    """A plan that runs everything."""

    name = "anywhere"
    workspace_size = 0

    @classmethod
    def supports(cls, problem, geometry, target):
        return None

    def build(self): ...

    def execute(self, pointers, workspace, stream): ...


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """A machine with two CUDA devices, of which 0 is the current one."""
    monkeypatch.setattr(placement, "cuda_target", lambda index: Target("cuda", index, (9, 0)))
    monkeypatch.setattr(placement, "default_target", lambda: Target("cuda", 0, (9, 0)))
    put_plans(monkeypatch, Anywhere)


def graph_on(devices, handle=None, scale=None, **arguments):
    """A forward graph whose q, k and v were seen on these devices."""
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, handle=handle, **arguments)
    tensors = [graph.tensor(DIM, name=name) for name in "qkv"]
    for t, device in zip(tensors, devices, strict=True):
        t.attributes.device = device
    if scale is not None:
        scale = graph.tensor((1, 1, 1, 1), data_type=cudnn.data_type.FLOAT, name="scale")
        scale.set_is_pass_by_value(True).attributes.device = ("cpu", 0)
    o, _ = graph.sdpa(*tensors, attn_scale=scale, generate_stats=False)
    o.set_output(True)
    return graph


GPU0, GPU1, HOST, UNSEEN = ("cuda", 0), ("cuda", 1), ("cpu", 0), None


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((GPU1, GPU1, GPU1), "cuda:1"),
        ((UNSEEN, GPU1, UNSEEN), "cuda:1"),
        ((HOST, HOST, HOST), "cpu"),
        ((UNSEEN, UNSEEN, UNSEEN), "cuda:0"),
    ],
)
def test_tensors_decide(devices, expected):
    """A graph runs where its tensors were seen, and on the current device if none was."""
    assert str(graph_on(devices).lowered.target) == expected


def test_host_scalars_do_not_decide():
    """A scale on the host goes with tensors on a device."""
    assert str(graph_on((GPU1, GPU1, GPU1), scale=True).lowered.target) == "cuda:1"


def test_a_pinned_handle_decides_for_unseen_tensors():
    """A graph of declared shapes runs where its handle says."""
    handle = cudnn.create_handle(device="cpu")
    assert graph_on((UNSEEN,) * 3, handle).lowered.target == CPU
    assert graph_on((HOST,) * 3, handle).lowered.target == CPU


def test_a_pinned_handle_and_tensors_elsewhere():
    """A handle of one device and tensors of another are a contradiction."""
    with pytest.raises(
        ValueError, match="q is on cuda:1, but the graph's handle was created for cpu"
    ):
        graph_on((GPU1,) * 3, cudnn.create_handle(device="cpu")).validate()


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ((GPU0, GPU1, GPU0), "q on cuda:0, k on cuda:1"),
        ((GPU0, GPU0, HOST), "q on cuda:0, v on cpu:0"),
        ((("mps", 0),) * 3, "q is on a mps device"),
    ],
)
def test_devices_that_do_not_go_together(devices, said):
    """Tensors of several devices, or of one that dlattn does not know, are refused by name."""
    with pytest.raises(ValueError, match=said):
        graph_on(devices).validate()


def test_sm_version_is_checked():
    """A graph made for one compute capability does not silently run on another."""
    graph_on((GPU0,) * 3, sm_version=90).validate()
    with pytest.raises(ValueError, match="sm_version 100, but its device has 90"):
        graph_on((GPU0,) * 3, sm_version=100).validate()


def test_lengths_on_the_host_are_refused_on_a_device():
    """A one-entry length tensor on the host would be read from device memory."""
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF)
    tensors = [graph.tensor((1, 4, 8, 16)) for _ in "qkv"]
    length = graph.tensor((1, 1, 1, 1), data_type=cudnn.data_type.INT32, name="length")
    length.set_is_pass_by_value(True)
    o, _ = graph.sdpa(*tensors, generate_stats=False, use_padding_mask=True, seq_len_q=length)
    o.set_output(True)
    with pytest.raises(ValueError, match="length is passed by value from the host, but cuda:0"):
        graph.validate()


def test_notes_of_device_plans():
    """CUDA plans are compiled at run time, and can be deselected for it."""
    graph = graph_on((GPU0,) * 3)
    graph.create_execution_plans([cudnn.heur_mode.A])
    note = cudnn.behavior_note.RUNTIME_COMPILATION
    assert graph.get_behavior_notes() == [note]
    graph.select_behavior_notes([note])
    graph.deselect_numeric_notes([cudnn.numerical_note.NONDETERMINISTIC])
    graph.check_support()
    graph.deselect_behavior_notes([note])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="No execution plans"):
        graph.check_support()
