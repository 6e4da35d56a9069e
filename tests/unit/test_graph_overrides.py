"""Other shapes at execution: which are right, what they take, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.graph import overrides as overrides_module
from dlattn.plans.base import Plan
from dlattn.runtime import jit
from tests.plans import ALL, put_plans

HALF = cudnn.data_type.HALF
DIM = (2, 4, 8, 16)
NotSupported = cudnn.cudnnGraphNotSupportedError


def declared(dim=DIM, stats=True, handle="cpu", **options):
    """A forward graph that takes other shapes, and its tensors."""
    handle = handle and cudnn.create_handle(device=handle)
    graph = cudnn.pygraph(
        "mine", HALF, handle=handle, **{"is_override_shape_enabled": True, **options}
    )
    tensors = [graph.tensor(dim, name=role, uid=uid) for uid, role in enumerate("qkv")]
    outputs = graph.sdpa(*tensors, attn_scale=0.25, generate_stats=stats, name="sdpa")
    tensors += [t.set_output(True) for t in outputs if t is not None]
    return graph, tensors


def pack_of(tensors, dim, seed=0):
    rng = np.random.default_rng(seed)
    made = {t: rng.standard_normal(dim).astype(np.float16) for t in tensors[:3]}
    made[tensors[3]] = np.zeros(dim, np.float16)
    if len(tensors) > 4:
        made[tensors[4]] = np.zeros((*dim[:3], 1), np.float32)
    return made


def shapes(dim, uids=(0, 1, 2)):
    return {"override_uids": [*uids], "override_shapes": [dim for _ in uids]}


def test_outputs_follow():
    """What the graph inferred of outputs is inferred again, and packs may be keyed by tensors."""
    graph, tensors = declared()
    graph.build()
    dim = (3, 2, 5, 16)
    pack = pack_of(tensors, dim)
    graph.execute(pack, **shapes(dim))
    plain, others = declared(dim)
    plain.build()
    wanted = pack_of(others, dim)
    plain.execute(wanted)
    for t, other in zip(tensors, others, strict=True):
        assert np.array_equal(pack[t], wanted[other])
    graph.execute(pack_of(tensors, DIM))  # the declared shapes are as they were
    assert tensors[3].get_dim() == list(DIM)


def test_strides():
    """Strides that are given are those of the call; without them, they have the declared order."""
    graph, tensors = declared()
    graph.build()
    dim, swapped = (2, 4, 6, 16), (384, 16, 64, 1)
    pack = pack_of(tensors, dim)
    wanted = dict(pack)
    graph.execute(pack, **shapes(dim))
    wanted[tensors[3]] = np.zeros_like(pack[tensors[3]])
    memory = np.ascontiguousarray(pack[tensors[0]].swapaxes(1, 2))
    wanted[tensors[0]] = memory.swapaxes(1, 2)
    strides = [swapped, (384, 96, 16, 1), (384, 96, 16, 1)]
    with pytest.raises(ValueError, match="q .uid 0.: expected strides"):
        graph.execute(wanted, **shapes(dim))
    # o was laid out as q; here it is as it was.
    outputs = [*shapes(dim)["override_uids"], tensors[3].get_uid()]
    graph.execute(
        wanted,
        override_uids=outputs,
        override_shapes=[dim] * 4,
        override_strides=[*strides, (384, 96, 16, 1)],
    )
    assert np.array_equal(wanted[tensors[3]], pack[tensors[3]])


@pytest.mark.parametrize(
    ("dim", "strides", "wanted"),
    [
        ((1, 4, 8, 16), (0, 128, 16, 1), (128, 16, 1)),
        ((1, 4, 8, 16), (3331333, 16, 64, 1), (16, 64, 1)),
        ((2, 1, 8, 16), (128, 0, 16, 1), (128, 16, 1)),
        ((2, 4, 1, 16), (64, 16, 99990001, 1), (128, 16, 1)),
        ((2, 4, 1, 16), (64, 16, 64, 1), (16, 64, 1)),
        ((1, 1, 1, 16), (0, 5, 0, 1), (128, 16, 1)),
    ],
)
def test_strides_of_sizes_of_one(dim, strides, wanted):
    """A stride of a size of 1 means nothing, unless it says where the rows of a layout would be, as
    that of one query of (B, S, H, D) does: else, the axis has its place in row-major order."""
    graph, tensors = declared()
    for t in tensors[:3]:
        t.set_dim(dim).set_stride(strides)
    graph.build()
    new = (3, 4, 8, 16)
    memory = pack_of(tensors, new)
    if wanted[0] < wanted[1]:  # heads within tokens
        for t in tensors[:4]:
            memory[t] = np.ascontiguousarray(memory[t].swapaxes(1, 2)).swapaxes(1, 2)
    graph.execute(memory, **shapes(new))


def test_lengths_of_one_sequence():
    """A length in host memory is a number by value; of more sequences, lengths are a tensor."""
    graph, q = cudnn.pygraph(io_data_type=HALF, is_override_shape_enabled=True), (1, 2, 4, 8)
    tensors = [graph.tensor_like(np.ones(q, np.float16)) for _ in "qkv"]
    length = graph.tensor_like(np.full((1, 1, 1, 1), 4, np.int32))
    assert length.get_is_pass_by_value()
    padding = {"use_padding_mask": True, "seq_len_kv": length}
    o, _ = graph.sdpa(*tensors, is_inference=True, **padding)
    o.set_output(True)
    graph.build()
    dims = [(3, 2, 4, 8)] * 3 + [(3, 1, 1, 1)]
    q, k, v, out = np.random.default_rng(0).standard_normal((4, *dims[0])).astype(np.float16)
    lengths = np.array([1, 0, 4], np.int32).reshape(dims[3])
    pack = {**dict(zip(tensors, (q, k, v), strict=True)), length: lengths, o: out}
    graph.execute(pack, None, None, [t.get_uid() for t in (*tensors, length)], dims)
    assert np.array_equal(out[0], np.broadcast_to(v[0, :, :1], out[0].shape)) and not out[1].any()


def test_strides_tell_calls_apart():
    """Calls of the same shapes, one after the other, each with its own strides; by addresses, which
    say nothing of theirs."""
    graph, tensors = declared(stats=False)
    graph.build()
    results = []
    for swapped in (False, True, False):
        pack, strides = pack_of(tensors, DIM), [(512, 128, 16, 1)] * 4
        if swapped:
            memory = np.ascontiguousarray(pack[tensors[0]].swapaxes(1, 2))
            pack[tensors[0]], strides[0] = memory, (512, 16, 64, 1)
        o, uids = pack[tensors[3]], [0, 1, 2, tensors[3].get_uid()]
        graph.execute(
            {t: x.ctypes.data for t, x in pack.items()},
            override_uids=uids,
            override_shapes=[DIM] * 4,
            override_strides=strides,
        )
        results.append(o)
    assert results[0].any()
    assert all(np.array_equal(results[0], o) for o in results)


def test_made_once():
    """What runs a shape is made at its first call, and kept; the oldest go."""
    graph, tensors = declared()
    graph.build()
    for dim in ((3, 4, 8, 16), (1, 4, 8, 16), (3, 4, 8, 16)):
        graph.execute(pack_of(tensors, dim), **shapes(dim))
    kept = graph._overrides._kept
    assert len(kept) == 2
    for batch in range(1, overrides_module.MOST_KEPT + 3):
        graph.get_workspace_size(**shapes((batch, 4, 8, 16)))
    assert len(kept) == overrides_module.MOST_KEPT


def test_iterators():
    """What can be read only once is what a list of the same would be, and is kept as that."""
    graph, tensors = declared()
    graph.build()
    dim, strides = (3, 2, 5, 16), (160, 80, 16, 1)
    packs = [pack_of(tensors, dim) for _ in range(2)]
    graph.execute(
        packs[0],
        override_uids=iter(range(3)),
        override_shapes=map(iter, [dim] * 3),
        override_strides=(iter(strides) for _ in range(3)),
    )
    graph.execute(packs[1], **shapes(dim), override_strides=[strides] * 3)
    assert packs[0][tensors[3]].any()
    assert np.array_equal(*(pack[tensors[3]] for pack in packs))
    assert len(graph._overrides._kept) == 1


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_tensors_of_numbers(framework):
    """Uids, shapes and strides in a tensor are what lists of the same numbers are: no call makes
    again what one with such numbers has made."""
    library = pytest.importorskip(framework)
    graph, tensors = declared()
    graph.build()
    dim, strides = (3, 2, 5, 16), (160, 80, 16, 1)
    given = {**shapes(dim), "override_strides": [strides] * 3}
    graph.execute(pack_of(tensors, dim), **given)
    for _ in range(2):
        as_tensors = {name: library.asarray(numbers) for name, numbers in given.items()}
        pack = pack_of(tensors, dim)
        graph.execute(pack, **as_tensors)
        assert pack[tensors[3]].any()
    assert len(graph._overrides._kept) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (shapes((3, 4, 8, 16), uids=(0,)), ValueError, r"k has dim .*expected \(3, 4, 8, 16\)"),
        (
            shapes((2, 4, 8, 16), uids=(0, 77)),
            ValueError,
            "has 77, which is no tensor of graph 'mi",
        ),
        (shapes((2, 4, 0, 16)), ValueError, "every size must be at least 1"),
        (shapes((2, 4, 8)), ValueError, "q needs a dim and a stride of one length"),
        ({"override_uids": [0, 1], "override_shapes": [DIM]}, ValueError, "has 1 entries for 2"),
        ({"override_uids": [0], "override_shapes": [7]}, TypeError, "sequence of integers"),
        ({"override_uids": 3, "override_shapes": []}, TypeError, "sequence of integers"),
        (shapes(DIM, uids=(0, 1, 0)), ValueError, "override_uids has 0 more than once; give one"),
        ({"override_uids": [0, 1], "override_shapes": iter([DIM, 7])}, TypeError, "uid 1 must be"),
        ({"override_uids": [0], "override_shapes": [iter([[2]])]}, TypeError, "uid 0 must be"),
        ({"override_uids": [0]}, ValueError, "without override_shapes or override_strides"),
        ({"override_shapes": [DIM]}, ValueError, "has 1 entries for 0 override_uids"),
    ],
)
def test_wrong_shapes(arguments, error, said):
    """Shapes are checked as declared ones are, and so are the tensors that come with them."""
    graph, tensors = declared()
    graph.build()
    with pytest.raises(error, match=said):
        graph.execute(pack_of(tensors, DIM), **arguments)


def test_tensors_must_have_the_shapes():
    """A tensor of another shape than the call says is refused by name."""
    graph, tensors = declared()
    graph.build()
    pack = pack_of(tensors, (3, 4, 8, 16))
    with pytest.raises(ValueError, match=r"q .uid 0.: expected shape \(4, 4, 8, 16\), got \(3,"):
        graph.execute(pack, **shapes((4, 4, 8, 16)))
    pack[tensors[4]] = np.zeros((3, 4, 7, 1), np.float32)
    with pytest.raises(ValueError, match=r"sdpa::Stats .*: expected shape \(3, 4, 8, 1\)"):
        graph.execute(pack, **shapes((3, 4, 8, 16)))


def test_only_where_enabled():
    """A graph that was made without the flag says so, and one that is not built, too."""
    graph, tensors = declared(is_override_shape_enabled=False)
    graph.build()
    with pytest.raises(RuntimeError, match="made without is_override_shape_enabled=True"):
        graph.execute(pack_of(tensors, DIM), **shapes(DIM))
    graph, tensors = declared()
    with pytest.raises(RuntimeError, match="'mine' has no built plan"):
        graph.execute(pack_of(tensors, DIM), **shapes(DIM))


# Plans and workspaces -----------------------------------------------------------------------------


def sized_plan(plan_name, most_queries):
    """A plan for some lengths, which needs 64 bytes for each query."""

    class Sized(Plan):
        name = plan_name

        @property
        def workspace_size(self):
            return 64 * self.geometry.seq_q

        @classmethod
        def supports(cls, problem, geometry, target):
            return None if geometry.seq_q <= most_queries else "there are too many queries."

        def build(self): ...

        def execute(self, pointers, workspace, stream):
            type(self).last = (self.geometry.seq_q, workspace)

    return Sized


@pytest.fixture
def plans(monkeypatch):
    """``few`` is better, for up to 2 queries; ``many`` takes any."""
    made = sized_plan("few", 2), sized_plan("many", 1000)
    put_plans(monkeypatch, *made)
    return made


def queries(count):
    """q alone has another length."""
    dim = (2, 4, count, 16)
    return {"override_uids": [0], "override_shapes": [dim]}, dim


def query_pack(tensors, dim):
    pack = pack_of(tensors, DIM)
    pack[tensors[0]], pack[tensors[3]] = (np.zeros(dim, np.float16) for _ in "qo")
    return pack


def aligned(nbytes):
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


def test_another_plan_for_few_queries(plans):
    """Each shape runs by the plan that is best for it; an index asks for a plan by name."""
    few, many = plans
    graph, tensors = declared(stats=False)
    graph.build()
    assert graph.get_plan_name_at_index(0) == "many"
    arguments, dim = queries(1)
    graph.execute(query_pack(tensors, dim), aligned(64), **arguments)
    assert few.last[0] == 1 and not hasattr(many, "last")
    graph.execute_plan_at_index(query_pack(tensors, dim), aligned(64), 0, **arguments)
    assert many.last[0] == 1
    declared_few, tensors = declared((2, 4, 1, 16), stats=False)
    declared_few.build()
    arguments = shapes(DIM)
    declared_few.execute(pack_of(tensors, DIM), aligned(512), **arguments)
    assert many.last[0] == 8
    with pytest.raises(NotSupported, match="No execution plans support"):
        declared_few.execute_plan_at_index(pack_of(tensors, DIM), aligned(512), 0, **arguments)


def test_filters_hold(plans):
    """What was deselected does not come back with other shapes."""
    few, many = plans
    graph, tensors = declared(stats=False)
    graph.deselect_engines(["few"])
    graph.build()
    arguments, dim = queries(1)
    graph.execute(query_pack(tensors, dim), aligned(64), **arguments)
    assert many.last[0] == 1 and not hasattr(few, "last")


def test_filters_hold_for_shapes_that_ran_before(plans):
    """The plan that such a shape had is dropped, too."""
    few, many = plans
    graph, tensors = declared((2, 4, 2, 16), stats=False)
    graph.build()
    arguments, dim = queries(1)
    pack = pack_of(tensors, (2, 4, 2, 16))
    pack[tensors[0]], pack[tensors[3]] = (np.zeros(dim, np.float16) for _ in "qo")
    graph.execute(pack, aligned(128), **arguments)
    assert few.last[0] == 1 and not hasattr(many, "last")
    graph.deselect_engines(["few"])
    graph.build_plans()
    graph.execute(pack, aligned(128), **arguments)
    assert many.last[0] == 1


def test_workspaces(plans):
    """An address has what was asked for; more is refused with how much, and can be asked for."""
    graph, tensors = declared(stats=False)
    graph.build()
    assert graph.get_workspace_size() == 512
    longer, dim = queries(9)
    pack, memory = query_pack(tensors, dim), aligned(640)
    for workspace in (memory.ctypes.data, None):
        with pytest.raises(ValueError, match="need 576 bytes, more than the 512 of the declared"):
            graph.execute(pack, workspace, **longer)
    with pytest.raises(ValueError, match="expected 576 .*got a tensor of 512 bytes"):
        graph.execute(pack, memory[:512], **longer)
    graph.execute(pack, memory[:576], **longer)
    assert graph.get_workspace_size(**longer) == 576
    graph.execute(pack, memory.ctypes.data, **longer)
    assert plans[1].last == (9, memory.ctypes.data)
    with pytest.raises(ValueError, match="need 640 bytes"):
        longest, dim = queries(10)
        graph.execute(query_pack(tensors, dim), memory.ctypes.data, **longest)


def test_kernels_of_a_decode(monkeypatch):
    """Across one query, the plan for decoding is made; serialised graphs take its kernels along."""
    put_plans(monkeypatch, *ALL)
    graph, _ = declared((2, 4, 256, 64), handle=None, sm_version=90)
    try:
        graph.build()
    except cudnn.CompileError as error:
        if "was not found" in str(error):
            pytest.skip("NVRTC is not installed")
        raise
    arguments = {"override_uids": [0], "override_shapes": [(2, 4, 1, 64)]}
    # Few items are a cluster's each, which needs no memory to put parts together.
    assert graph.get_workspace_size(**arguments) == 0
    assert [plan.name for plan in graph._overrides.plans] == ["decode"]
    data = graph.serialize()
    jit.forget()
    other = cudnn.pygraph(sm_version=90)
    other.deserialize(data)
    other.get_workspace_size(**arguments)
    other.get_workspace_size(override_uids=[0], override_shapes=[(2, 4, 77, 64)])
    assert (jit.statistics.compiles, jit.statistics.disk_hits) == (0, 0)
