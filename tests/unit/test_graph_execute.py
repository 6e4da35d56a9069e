"""``execute``: what packs may hold, and every difference from the graph that is caught."""

from __future__ import annotations

import ctypes
import enum

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.graph import execution, placement, slots
from dlattn.plans.base import Plan
from dlattn.runtime.target import Target
from dlattn.runtime.tensors import view
from tests.plans import put_plans

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
DIM = (2, 4, 8, 16)


class Recording(Plan):
    """A plan for everything, which keeps what it was executed with."""

    name = "recording"
    workspace_size = 512

    @classmethod
    def supports(cls, problem, geometry, target):
        return None

    def build(self): ...

    def execute(self, pointers, workspace, stream):
        self.pointers, self.workspace, self.stream = pointers, workspace, stream


class Call:
    """A built forward graph with a scale on the host, and memory that fits it."""

    def __init__(self, handle=None):
        self.graph = cudnn.pygraph(
            io_data_type=HALF, handle=handle or cudnn.create_handle(device="cpu")
        )
        self.q, self.k, self.v = (self.graph.tensor(DIM, name=name) for name in "qkv")
        self.scale = self.graph.tensor(
            (1, 1, 1, 1), data_type=FLOAT, is_pass_by_value=True, name="scale"
        )
        self.o, self.stats = self.graph.sdpa(
            self.q, self.k, self.v, attn_scale=self.scale, generate_stats=True, name="sdpa"
        )
        self.o.set_output(True)
        self.stats.set_output(True)
        self.graph.build()
        self.memory = {
            **{t: np.zeros(DIM, np.float16) for t in (self.q, self.k, self.v, self.o)},
            self.scale: np.ones((1, 1, 1, 1), np.float32),
            self.stats: np.zeros((2, 4, 8, 1), np.float32),
        }
        self.workspace = aligned_bytes(512)

    def __call__(self, changes=None, workspace=..., **arguments):
        pack = {**self.memory, **(changes or {})}
        workspace = self.workspace if workspace is ... else workspace
        self.graph.execute(pack, workspace, **arguments)
        return self.plan

    @property
    def plan(self):
        return self.graph._planning.plans[0]


def aligned_bytes(nbytes, extra=0):
    memory = np.empty(nbytes + 512, np.uint8)
    start = -memory.ctypes.data % 256 + extra
    return memory[start : start + nbytes]


@pytest.fixture
def call(monkeypatch):
    put_plans(monkeypatch, Recording)
    return Call()


def address(x):
    return x.__array_interface__["data"][0]


def test_the_plan_gets_every_address_by_role(call):
    """Tensors become addresses under their roles, the workspace one too; the CPU's stream is 0."""
    plan = call()
    roles = {"q": call.q, "k": call.k, "v": call.v, "o": call.o, "stats": call.stats}
    expected = {role: address(call.memory[t]) for role, t in roles.items()}
    assert plan.pointers == {**expected, "attn_scale": address(call.memory[call.scale])}
    assert (plan.workspace, plan.stream) == (address(call.workspace), 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (np.zeros(DIM, np.complex64), "element type is complex64"),
        (np.zeros(DIM, object), "element type is object"),
        (np.ndarray(DIM, np.float16, bytearray(4096), 0, (2048, 256, 32, 1)), "no multiples"),
    ],
)
def test_what_is_wrong_has_a_name(call, wrong, said):
    """An array that cannot be read is refused under its tensor's name, after good calls too: those
    leave a quick test of arrays like theirs, which cannot read it either."""
    for _ in range(3):
        with pytest.raises(ValueError, match=f"^q \\(uid 1\\): .*{said}"):
            call({call.q: wrong})
        call()


def test_keys_may_be_uids(call):
    """ints, IntEnum members and copies of tensors are keys like the tensors themselves."""
    members = {t.get_name().replace("::", "_"): t.get_uid() for t in call.memory}
    uids = enum.IntEnum("uids", members)
    by_number = {t.get_uid(): x for t, x in call.memory.items()}
    by_member = {uids(number): x for number, x in by_number.items()}
    by_copy = {
        call.graph.query_tensor_attributes_of_uid(number): x for number, x in by_number.items()
    }
    expected = call().pointers
    for pack in (by_number, by_member, by_copy):
        call.graph.execute(pack, call.workspace)
        assert call.plan.pointers == expected


def test_unused_entries_are_skipped(call):
    """None keys and unknown uids are ignored, as programs with optional features rely on."""
    call({None: None, 999: np.zeros(3), cudnn.pygraph().tensor((1,)): None})


def test_raw_addresses(call):
    """An int is taken as an address."""
    x = aligned_bytes(DIM[0] * 1024)
    assert call({call.q: address(x)}).pointers["q"] == address(x)
    for wrong in (0, -4096, 2**64):
        with pytest.raises(ValueError, match=f"q .*expected a tensor or an address, got {wrong}"):
            call({call.q: wrong})


def test_alignment_is_looked_at_every_time(call):
    """Also of a tensor that is laid out as the last one."""
    for extra, fits in ((0, True), (2, False), (16, True), (8, False)):
        x = aligned_bytes(DIM[0] * 1024, extra).view(np.float16).reshape(DIM)
        if fits:
            assert call({call.q: x}).pointers["q"] == address(x)
        else:
            with pytest.raises(ValueError, match="q .*expected an address aligned to 16 bytes"):
                call({call.q: x})


def test_a_number_for_a_host_scalar(call):
    """A Python float is read like a host scalar of the declared type."""
    pointers = {}

    def execute(given, workspace, stream):
        pointers.update(given)
        pointers["value"] = ctypes.c_float.from_address(given["attn_scale"]).value

    call.plan.execute = execute
    for number in (0.5, np.float32(0.25)):
        call({call.scale: number})
        assert pointers["value"] == number
    with pytest.raises(ValueError, match="scale .* expected a tensor or an address, got 2"):
        call({call.scale: 2})
    with pytest.raises(ValueError, match=r"scale .* expected a number that .*FLOAT holds, got 1e"):
        call({call.scale: 1e39})


def test_host_scalars_may_have_any_shape(call):
    """One element is one element: a 0-dimensional scale is a scale."""
    call({call.scale: np.array(0.5, np.float32)})


def strided(dim, strides, dtype=np.float16):
    size = sum((d - 1) * s for d, s in zip(dim, strides, strict=True)) + 1
    memory = aligned_bytes(size * np.dtype(dtype).itemsize).view(dtype)
    return np.lib.stride_tricks.as_strided(memory, dim, [s * memory.itemsize for s in strides])


def read_only():
    x = np.zeros(DIM, np.float16)
    x.flags.writeable = False
    return x


WRONG = {
    "shape": (lambda: np.zeros((2, 4, 9, 16), np.float16), r"expected shape \(2, 4, 8, 16\)"),
    "rank": (lambda: np.zeros((2, 4, 128), np.float16), r"got \(2, 4, 128\)"),
    "dtype": (lambda: np.zeros(DIM, np.float32), "expected elements of data_type.HALF, got"),
    "strides": (lambda: strided(DIM, (512, 16, 64, 1)), r"expected strides \(512, 128, 16, 1\)"),
    "last stride": (lambda: strided(DIM, (1024, 256, 32, 2)), r"got \(1024, 256, 32, 2\)"),
    "alignment": (lambda: aligned_bytes(2048, extra=2).view(np.float16).reshape(DIM), "aligned"),
    "no tensor": (lambda: [1, 2, 3], "Expected a tensor"),
    "address 0": (lambda: 0, "expected a tensor or an address, got 0"),
    "negative address": (lambda: -16, "an address, got -16"),
    "a number": (lambda: 16, "an address, got 16"),
    "odd address": (lambda: 4097, "aligned to 16 bytes, got 0x1001"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("role", ["q", "o"])
def test_what_differs_from_the_graph(call, role, what):
    """Each difference is a ValueError with the tensor, its uid, what was expected and what got."""
    make, said = WRONG[what]
    t = getattr(call, role)
    with pytest.raises(ValueError, match=said) as caught:
        call({t: make()})
    assert f"{t.get_name()} (uid {t.get_uid()})" in str(caught.value)


def test_outputs_must_be_writable(call):
    """A read-only array is fine as an input, and refused as an output."""
    call({call.q: read_only()})
    with pytest.raises(ValueError, match="sdpa::O .* read-only"):
        call({call.o: read_only()})


def test_other_devices(call, monkeypatch):
    """Memory of another device is refused with both devices."""
    monkeypatch.setattr(slots, "view", lambda x: view(x)._replace(device=("cuda", 1)))
    with pytest.raises(ValueError, match="q .* expected memory on cpu, got cuda:1"):
        call()


def test_missing_memory(call):
    """A tensor without memory, or with None, is named with its uid."""
    said = rf"k \(uid {call.k.get_uid()}\) is missing from the variant pack"
    with pytest.raises(ValueError, match=said):
        call({call.k: None})
    del call.memory[call.k]
    with pytest.raises(ValueError, match=said):
        call()


def test_differences_without_a_meaning(call, monkeypatch):
    """Strides of size-1 dimensions may be anything, at every call."""
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    dim = (1, 4, 1, 16)
    q, k, v = (graph.tensor(dim, (3331333, 16, 99990001, 1)) for _ in "qkv")
    o, _ = graph.sdpa(q, k, v, attn_scale=0.5, generate_stats=False)
    o.set_output(True)
    graph.build()
    x = np.zeros(dim, np.float16)
    wild = np.lib.stride_tricks.as_strided(x, dim, (2 * 77, 32, 2 * 5, 2))
    for first, second in ((x, wild), (wild, x)):
        graph.execute({q: first, k: second, v: first, o: second.copy()}, call.workspace)


def test_a_refused_tensor_is_not_remembered(call):
    """What was refused once is refused again, and what fits still fits."""
    wrong = np.zeros((2, 4, 9, 16), np.float16)
    for _ in range(2):
        with pytest.raises(ValueError):
            call({call.q: wrong})
        call()


# Workspace ----------------------------------------------------------------------------------------


def test_workspaces(call):
    """Addresses and tensors of any type and shape will do, larger ones too."""
    for workspace in (
        address(call.workspace),
        call.workspace.view(np.float32).reshape(2, 64),
        aligned_bytes(4096),
    ):
        call(workspace=workspace)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: None, "expected 512 .* got address 0x0"),
        (lambda: 0, "got address 0x0"),
        (lambda: 8, "aligned to 16, got address 0x8"),
        (lambda: aligned_bytes(511), "got a tensor of 511 bytes"),
        (lambda: aligned_bytes(512, extra=8), "aligned to 16, got address"),
        (lambda: aligned_bytes(2048)[::2], "with gaps"),
        (lambda: np.broadcast_to(aligned_bytes(512), (1, 512)), "got a read-only tensor"),
        (lambda: "text", "Expected a tensor .* got 'text'"),
        (lambda: np.int64(1 << 20), "Expected a tensor .* got np.int64"),
    ],
)
def test_wrong_workspaces(call, make, said):
    """Too little, misaligned, strided or read-only workspace is refused with the size needed, and
    what is neither memory nor an address by its name."""
    with pytest.raises(ValueError, match=f"^workspace: .*{said}"):
        call(workspace=make())


def test_workspace_of_another_device(call, monkeypatch):
    """A workspace elsewhere is refused."""
    real = view

    def moved(x):
        return real(x)._replace(device=("cuda", 0)) if x is call.workspace else real(x)

    monkeypatch.setattr(execution, "view", moved)
    with pytest.raises(ValueError, match="workspace: .* on cpu, .* got a tensor on cuda:0"):
        call()


def test_no_workspace_needed(monkeypatch):
    """A plan without workspace takes 0, None and empty tensors."""
    put_plans(monkeypatch, Recording)
    monkeypatch.setattr(Recording, "workspace_size", 0)
    call = Call()
    for workspace in (0, None, np.empty(0, np.uint8)):
        assert call(workspace=workspace).workspace == 0


# Streams and life ---------------------------------------------------------------------------------


def test_explicit_streams_win(call):
    """The stream of execute's handle wins over that of the graph's, and both over the default."""
    graphs = cudnn.create_handle(device="cpu")
    cudnn.set_stream(handle=graphs, stream=11)
    other = cudnn.create_handle()
    own = Call(graphs)
    assert own().stream == 11
    assert own(handle=other).stream == 0
    cudnn.set_stream(handle=other, stream=22)
    assert own(handle=other).stream == 22


def test_current_stream_of_the_device(call, monkeypatch):
    """On CUDA without an explicit stream, the frameworks of the inputs say which one is current."""
    gpu = Target("cuda", 1, (9, 0))
    monkeypatch.setattr(placement, "default_target", lambda: gpu)
    for module in (execution, slots):
        monkeypatch.setattr(module, "view", lambda x: view(x)._replace(device=("cuda", 1)))
    asked = []
    monkeypatch.setattr(execution, "current_stream", lambda objs, index: asked.append(index) or 33)
    ordered = []
    monkeypatch.setattr(execution, "ORDERED_TYPES", set())
    monkeypatch.setattr(
        execution,
        "order_before",
        lambda objs, stream: ordered.extend((id(x), stream) for x in objs),
    )
    graph = cudnn.pygraph(io_data_type=HALF)
    tensors = [graph.tensor(DIM) for _ in "qkv"]
    o, _ = graph.sdpa(*tensors, generate_stats=False)
    o.set_output(True)
    graph.build()
    pack = {t: np.zeros(DIM, np.float16) for t in (*tensors, o)}
    graph.execute(pack, call.workspace)
    assert graph._planning.plans[0].stream == 33 and asked == [1]
    assert ordered == [(id(pack[t]), 33) for t in tensors]
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, 0)
    graph.execute(pack, call.workspace, handle=handle)
    assert graph._planning.plans[0].stream == 0 and asked == [1]


def test_a_destroyed_handle(call):
    """A handle that is gone is an error, not the default stream."""
    gone = cudnn.create_handle()
    cudnn.destroy_handle(gone)
    with pytest.raises(RuntimeError, match="unknown or destroyed"):
        call(handle=gone)


def test_execute_before_build(monkeypatch):
    """Executing what is not built says what to call."""
    graph = cudnn.pygraph()
    with pytest.raises(RuntimeError, match=r"no built plan to execute; call build\(\)"):
        graph.execute({})


def test_backward_and_shared_tensors(monkeypatch):
    """One tensor in several roles is one entry of the pack and an address in each role."""
    put_plans(monkeypatch, Recording)
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    x = graph.tensor(DIM, name="x")
    stats = graph.tensor((2, 4, 8, 1), data_type=FLOAT, name="stats")
    gradients = graph.sdpa_backward(x, x, x, x, x, stats)
    for gradient in gradients:
        gradient.set_output(True)
    graph.build()
    memory = np.zeros(DIM, np.float16)
    outputs = {t: np.zeros(DIM, np.float16) for t in gradients}
    pack = {x: memory, stats: np.zeros((2, 4, 8, 1), np.float32), **outputs}
    graph.execute(pack, aligned_bytes(512))
    pointers = graph._planning.plans[0].pointers
    assert {pointers[role] for role in ("q", "k", "v", "o", "dO")} == {address(memory)}
    assert len({pointers[role] for role in ("dQ", "dK", "dV")}) == 3
