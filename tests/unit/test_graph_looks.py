"""``execute`` of torch's tensors: one test of all of them must never see less than each one's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.errors import InvalidVariantPackError
from dlattn.graph import execution
from dlattn.plans.base import Plan
from tests.plans import put_plans

torch = pytest.importorskip("torch")

DIM = (2, 3, 8, 16)


class Recording(Plan):
    """A plan for everything, which keeps what it was executed with."""

    name = "recording"
    workspace_size = 0

    @classmethod
    def supports(cls, problem: Any, geometry: Any, target: Any) -> None:
        return None

    def build(self) -> None: ...

    def execute(self, pointers: Any, workspace: int, stream: int) -> None:
        self.executed = dict(pointers), stream


class Graph:
    """A built forward graph, whose tensors need no alignment beyond their elements'."""

    def __init__(self, alignment: int) -> None:
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.HALF, handle=cudnn.create_handle(device="cpu")
        )
        self.tensors = [self.graph.tensor(DIM, name=name) for name in "qkv"]
        for t in self.tensors:
            t.set_alignment(alignment)
        out, _ = self.graph.sdpa(*self.tensors, generate_stats=False, name="sdpa")
        self.tensors.append(out.set_output(True).set_alignment(alignment))
        self.graph.build()

    def outcome(self, values: list[Any], by_uid: Sequence[int] = ()) -> Any:
        """What the plan got, or why it got nothing, from a pack that names some tensors by uid."""
        keys = [t.get_uid() if at in by_uid else t for at, t in enumerate(self.tensors)]
        try:
            self.graph.execute(dict(zip(keys, values, strict=True)))
        except InvalidVariantPackError as error:
            return str(error)
        return self.graph._planning.plans[0].executed


@pytest.fixture(autouse=True, scope="module")
def _plans() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        put_plans(patch, Recording)
        yield


#: How a tensor may differ from the plain ones, all but the first ways that graphs may not take.
WAYS = (
    "learned",
    "after 8",
    "after 1",
    "moved",
    "turned",
    "gaps",
    "type",
    "shape",
    "nested",
    "numpy",
    "int",
)


def memory(way: str = "") -> Any:
    """A tensor, of float16 and aligned to 64 bytes but for the way in which it is not."""
    buffer = torch.zeros(2048, dtype=torch.float16)
    after = int(way.removeprefix("after")) if way.startswith("after") else 0
    first = -(buffer.data_ptr() // 2) % 32 + after
    x = buffer[first : first + 768]
    if way == "moved":
        return x.view(2, 8, 3, 16).transpose(1, 2)
    if way == "turned":
        return x.view(2, 3, 16, 8).transpose(2, 3)
    if way == "gaps":
        return buffer[first : first + 1536].view(*DIM[:3], 32)[..., ::2]
    if way == "shape":
        return x.view(2, 3, 16, 8)
    x = x.view(DIM)
    if way == "nested":
        return torch.nested.nested_tensor(list(x))
    if way == "type":
        return x.bfloat16()
    if way == "numpy":
        return x.numpy()
    return x.data_ptr() if way == "int" else x.requires_grad_(way == "learned")


@st.composite
def packs(draw: st.DrawFn) -> Any:
    """Tensors, most of them plain, which of them the pack names by uid, and grad mode."""
    values = [memory() for _ in range(4)]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        values[draw(st.integers(0, 3))] = memory(draw(st.sampled_from(WAYS)))
    if draw(st.integers(0, 15)) == 15:
        values[2] = values[1]
    by_uid = draw(st.sampled_from([(), (), (), (0, 1, 2, 3), (1,), (3,)]))
    return values, by_uid, draw(st.integers(0, 3)) > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:An input requires a gradient:UserWarning")
@given(st.sampled_from([2, 16, 64]), st.lists(packs(), min_size=3, max_size=12))
def test_a_pack_is_never_taken_for_the_last_one(alignment: int, calls: Any) -> None:
    """Whatever was executed before, the plan gets this pack's addresses, or the pack is refused in
    the same words."""
    quick, plain = Graph(alignment), Graph(alignment)
    plain.graph._built("execute")._may_look = False
    for values, by_uid, learns in calls:
        with torch.set_grad_enabled(learns):
            assert quick.outcome(values, by_uid) == plain.outcome(values, by_uid)


def test_tensors_are_looked_at_together(monkeypatch: Any) -> None:
    """From the third call with tensors that look alike, each one is not; of others it is again."""
    graph, looked = Graph(16), []
    checked = execution.Execution.addresses
    monkeypatch.setattr(
        execution.Execution, "addresses", lambda it, pack: looked.append(1) or checked(it, pack)
    )
    for _ in range(5):
        before = [torch.zeros(DIM, dtype=torch.float16) for _ in range(4)]
        pointers, _ = graph.outcome(before)
        assert sorted(pointers.values()) == sorted(x.data_ptr() for x in before)
    assert len(looked) == 2
    for _ in range(2 * execution.MOST_LESSONS):  # which cannot be learned: another framework's
        graph.outcome([*before[:2], before[2].numpy(), before[3]])
        looked.clear()
        graph.outcome(before)
        assert not looked
    with pytest.raises(InvalidVariantPackError, match="expected elements of"):
        graph.graph.execute(dict(zip(graph.tensors, [x.float() for x in before], strict=True)))
    assert looked
