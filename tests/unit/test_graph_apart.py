"""``execute`` refuses memory that is written to and is another tensor's, in every pack as in the
first, and takes views that interleave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.errors import InvalidVariantPackError
from dlattn.plans.base import Plan
from tests.plans import put_plans

DOUBLE, INT32 = cudnn.data_type.DOUBLE, cudnn.data_type.INT32
DIM, ROWS = (2, 4, 6, 8), (2, 4, 6, 1)
#: Elements of a tensor.
SIZE = 384
GRADIENTS = ("dQ", "dK", "dV")


class Recording(Plan):
    """A plan for everything, which counts its calls."""

    name = "recording"
    workspace_size = 512
    calls = 0

    @classmethod
    def supports(cls, problem: Any, geometry: Any, target: Any) -> None:
        return None

    def build(self) -> None: ...

    def execute(self, pointers: Any, workspace: int, stream: int) -> None:
        self.calls += 1


class Built:
    """A graph of float64, and memory of its tensors by name."""

    def __init__(self, backward: bool, stride: Any = None, offsets: int = 0) -> None:
        self.graph = cudnn.pygraph(io_data_type=DOUBLE, handle=cudnn.create_handle(device="cpu"))
        names = ("q", "k", "v", "o", "dO") if backward else ("q", "k", "v")
        inputs = {name: self.graph.tensor(DIM, stride, name=name) for name in names}
        if backward:
            inputs["stats"] = self.graph.tensor(ROWS, name="stats", data_type=DOUBLE)
            made = self.graph.sdpa_backward(*inputs.values())
            outputs = dict(zip(GRADIENTS, made, strict=True))
        else:
            made = self.graph.sdpa(*inputs.values(), generate_stats=True)
            outputs = dict(zip(("o", "stats"), made, strict=True))
            outputs["stats"].set_data_type(DOUBLE)
        for name, t in outputs.items():
            t.set_output(True).set_name(name)
            if stride is not None and t.get_name() != "stats":
                t.set_stride(stride)
        self.tensors = {**inputs, **outputs}
        #: Of q and dQ, k and dK, v and dV: all the same, or each pair its own.
        self.offsets = [
            self.graph.tensor((3, 1, 1, 1), name=f"offsets {n}", data_type=INT32)
            for n in range(offsets)
        ]
        for n, letter in enumerate("qkv" if offsets else ""):
            for name in (letter, f"d{letter.upper()}"):
                self.tensors[name].set_ragged_offset(self.offsets[n % offsets])
        self.graph.build()
        rng = np.random.default_rng(1)
        self.memory = {name: rng.standard_normal(t.get_dim()) for name, t in self.tensors.items()}
        self.workspace = np.zeros(64)

    def __call__(self, **changes: Any) -> None:
        workspace = changes.pop("workspace", self.workspace)
        numbers = [changes.pop(t.get_name()) for t in self.offsets]
        pack = {self.tensors[name]: x for name, x in {**self.memory, **changes}.items()}
        self.graph.execute({**pack, **dict(zip(self.offsets, numbers, strict=True))}, workspace)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    put_plans(monkeypatch, Recording)


def address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


def aligned(size: int) -> Any:
    """Zeros at a multiple of 16 bytes."""
    buffer = np.zeros(size + 1)
    first = address(buffer) % 16 // 8
    return buffer[first : first + size]


def strided(x: Any, stride: tuple[int, ...]) -> Any:
    """A copy with such strides, in elements."""
    memory = np.zeros(1 + sum((n - 1) * step for n, step in zip(x.shape, stride, strict=True)))
    made = np.lib.stride_tricks.as_strided(memory, x.shape, [8 * step for step in stride])
    made[...] = x
    return made


def cut(first: int, dim: tuple[int, ...] = DIM) -> Callable[[Any], Any]:
    """A tensor at an element of a buffer."""
    return lambda buffer: buffer[first : first + int(np.prod(dim))].reshape(dim)


#: Whether it is a backward, and places in a buffer that are not apart.
WRONG: dict[str, tuple[bool, dict[str, Callable[[Any], Any]], str]] = {
    "o is q": (False, {"q": cut(0), "o": cut(0)}, "o .*: it begins where q .* does"),
    "stats in o": (False, {"o": cut(0), "stats": cut(0, ROWS)}, "begins where"),
    "stats at the end of o": (
        False,
        {"o": cut(0), "stats": cut(SIZE - 2, ROWS)},
        r"stats .*: expected memory that o \(uid \d+\) has no part of.* which overlap; give each",
    ),
    "dK is dQ": (True, {"dQ": cut(0), "dK": cut(0)}, "dK .*: it begins where dQ .* does"),
    "dK in dQ": (True, {"dQ": cut(0), "dK": cut(2)}, "dK .*: .* that dQ .* has no part of"),
    "dQ in dV": (True, {"dV": cut(0), "dQ": cut(SIZE - 2)}, "dV .*: .* that dQ .* has no part of"),
    "dV is dO": (True, {"dV": cut(0), "dO": cut(0)}, "begins where"),
    "o is the workspace": (
        False,
        {"o": cut(0), "workspace": cut(0)},
        "workspace: it begins where o .* does",
    ),
    "the workspace in o": (
        False,
        {"o": cut(0), "workspace": cut(SIZE - 2)},
        r"workspace: .* that o .* has no part of.* got 512 bytes at 0x.* of shape \(2, 4, 6, 8\)",
    ),
    "the workspace in k": (False, {"k": cut(2), "workspace": cut(0)}, "workspace: .* that k "),
}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("by", ["array", "address", "torch"])
@pytest.mark.parametrize("name", WRONG)
def test_memory_of_another_tensor_is_refused(name: str, by: str) -> None:
    """Before anything is enqueued; of tensors and of addresses, whatever calls went before."""
    backward, places, said = WRONG[name]
    torch = pytest.importorskip("torch") if by == "torch" else None
    wrap = {"array": lambda x: x, "address": address, "torch": getattr(torch, "from_numpy", None)}
    built, buffer = Built(backward), aligned(1024)
    kept = {it: place(aligned(1024)) for it, place in places.items()}
    right = {it: wrap[by](x) for it, x in kept.items()}
    wrong = {it: wrap[by](place(buffer)) for it, place in places.items()}
    if by == "torch":
        built.memory = {it: torch.from_numpy(x) for it, x in built.memory.items()}
    plan = built.graph._planning.plans[0]
    for calls in (0, 4):
        for _ in range(calls):
            built(**right)
        with pytest.raises(InvalidVariantPackError, match=said):
            built(**wrong)
        assert plan.calls == calls
        with pytest.raises(InvalidVariantPackError, match=said):
            pack = {it: x for it, x in wrong.items() if it != "workspace"}
            pack = {t: {**built.memory, **pack}[it] for it, t in built.tensors.items()}
            scratch = wrong.get("workspace", built.workspace)
            built.graph.populate_cuda_graph(None, pack, scratch, 1)


@pytest.mark.usefixtures("recorded")
def test_what_lies_side_by_side_is_apart() -> None:
    """An output may begin where another one, or the workspace, ends; inputs may be one tensor."""
    built, buffer = Built(True), aligned(4 * SIZE)
    x = np.zeros(DIM)
    places = {it: cut(n * SIZE)(buffer) for n, it in enumerate(("dK", "dQ", "dV"))}
    for _ in range(3):
        built(q=x, k=x, v=x, o=x, dO=x, **places, workspace=buffer[3 * SIZE : 3 * SIZE + 64])
    assert built.graph._planning.plans[0].calls == 3


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_gradients_in_one_tensor(axis: int) -> None:
    """Views of one (B, S, H, D) tensor with one more axis are what separate memory is."""
    batch, heads, rows, columns = DIM
    whole = np.zeros([*np.insert([batch, rows, heads, columns], axis, 3)])
    views = [x.swapaxes(1, 2) for x in np.moveaxis(whole, axis, 0)]
    stride = tuple(step // 8 for step in views[0].strides)
    plain, packed = Built(True), Built(True, stride)
    plain()
    inputs = {it: strided(plain.memory[it], stride) for it in ("q", "k", "v", "o", "dO")}
    packed(**inputs, **dict(zip(GRADIENTS, views, strict=True)))
    for it, view in zip(GRADIENTS, views, strict=True):
        assert (view == plain.memory[it]).all() and view.any()


def test_ragged_gradients_in_one_memory() -> None:
    """Where their tokens are, offsets say: gradients that interleave are given as views of their
    own, or as one memory with offsets of their own."""
    _, heads, rows, columns = DIM
    part, token = heads * columns, 3 * heads * columns
    stride = (rows * token, columns, token, 1)
    begins = np.array([0, 6, 11], np.int32).reshape(3, 1, 1, 1) * np.int32(token)
    one, own = Built(True, stride, offsets=1), Built(True, stride, offsets=3)
    # Of twelve tokens, of which eleven are used.
    flat = {it: np.random.default_rng(2).standard_normal(12 * token) for it in "qkv"}
    rest = {it: strided(one.memory[it], stride) for it in ("o", "dO")} | {
        "stats": one.memory["stats"]
    }
    found, wanted = np.zeros((12, 3, heads, columns)), np.zeros(12 * token)
    views = dict(zip(GRADIENTS, np.moveaxis(found, 1, 0), strict=True))
    one(**flat, **rest, **views, **{"offsets 0": begins})
    behind = {it: np.roll(x, n * part) for n, (it, x) in enumerate(flat.items())}
    offsets = {f"offsets {n}": begins + np.int32(n * part) for n in range(3)}
    own(**behind, **rest, **dict.fromkeys(GRADIENTS, wanted), **offsets)
    assert (found.reshape(-1) == wanted).all() and np.count_nonzero(wanted) == 11 * token
    with pytest.raises(InvalidVariantPackError, match="dK .*: it begins where dQ"):
        one(**flat, **rest, **dict.fromkeys(GRADIENTS, wanted), **{"offsets 0": begins})


def test_programs_may_write_to_their_inputs() -> None:
    """Operations that are no attention read before they write; two results are two tensors."""
    graph = cudnn.pygraph(io_data_type=DOUBLE, handle=cudnn.create_handle(device="cpu"))
    x = graph.tensor((1, 2, 3), name="x")
    results = graph.neg(x), graph.exp(x)
    for it in results:
        it.set_output(True)
    graph.build()
    memory, other = np.arange(6.0).reshape(1, 2, 3), np.zeros((1, 2, 3))
    with pytest.raises(InvalidVariantPackError, match="it begins where"):
        graph.execute({x: memory, **dict.fromkeys(results, other)})
    graph.execute(dict(zip((x, *results), (memory, memory, other), strict=True)))
    assert (memory == -np.arange(6.0).reshape(1, 2, 3)).all() and (other == np.exp(-memory)).all()
