"""Reading tensors through DLPack and the array interfaces."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlattn.dtypes import data_type
from dlattn.errors import InvalidVariantPackError
from dlattn.runtime import frameworks, protocols
from dlattn.runtime.tensors import view
from tests.unit.producers import Capsules, OldProducer, Producer


@pytest.mark.parametrize("kind", [Producer, OldProducer])
@pytest.mark.parametrize("reverse", [False, True])
def test_dlpack(kind: type[Producer], reverse: bool) -> None:
    """Both capsule versions, negative strides and byte offsets."""
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    array = array[::-1, :, 1:] if reverse else array.transpose(2, 0, 1)
    assert view(kind(array)) == view(array)


def test_dlpack_read_only() -> None:
    """The flag of versioned capsules is honoured."""
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    assert view(Producer(array)) == view(array)


def test_dlpack_gives_everything_back() -> None:
    """Borrowing a capsule leaves no reference behind."""
    torch = pytest.importorskip("torch")
    array, tensor = np.zeros(3, np.float32), torch.zeros(3)
    for thing in (array, tensor):
        before = sys.getrefcount(thing)
        for _ in range(10):
            view(Producer(thing))
        gc.collect()
        assert sys.getrefcount(thing) == before


def test_dlpack_null_strides_on_cuda() -> None:
    """NULL strides mean row-major; the offset counts; reading an address orders nothing (-1)."""
    producer = Capsules()
    expected = (4096 + 32, (2, 3, 4), (12, 4, 1), data_type.BFLOAT16, ("cuda", 1), True)
    assert view(producer) == expected
    assert producer.streams == [-1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"major": 2}, "version 2.0"),
        ({"flags": 2}, "exported a copy"),
        ({"lanes": 4}, "4 lanes"),
        ({"code": 5, "bits": 64}, "code 5, 64 bits"),
        ({"device": 10}, "DLPack device type 10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dlpack_refused(fields: dict[str, int], sentence: str) -> None:
    """Whatever cannot be used in place is refused with its reason."""
    with pytest.raises(InvalidVariantPackError, match=sentence):
        view(Capsules(**fields))


@pytest.mark.parametrize(
    ("device", "expected"), [(1, ("cpu", 0)), (3, ("cpu", 0)), (13, ("cuda", 1))]
)
def test_dlpack_devices(device: int, expected: tuple[str, int]) -> None:
    """Pinned memory counts as the host's, managed memory as the device's."""
    assert view(Capsules(device=device)).device == expected


def test_dlpack_consumed() -> None:
    """A capsule that somebody has taken is not read."""
    array = np.zeros(3, np.float32)
    capsule = array.__dlpack__()
    np.from_dlpack(
        SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))
    )
    with pytest.raises(InvalidVariantPackError, match="unused DLPack capsule"):
        protocols.view_capsule(capsule)


def test_dlpack_refusal_of_the_producer() -> None:
    """What the producer says reaches the user."""

    class Angry(Producer):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(InvalidVariantPackError, match="Angry refused.*not today"):
        view(Angry(np.zeros(3)))


def test_array_interface() -> None:
    """The oldest protocol, for whoever has nothing else."""
    array = np.zeros((3, 4), np.float32)[:, ::2]

    class Old:
        __array_interface__ = array.__array_interface__

    assert view(Old()) == view(array)


@pytest.mark.parametrize(
    ("name", "device"), [("__array_interface__", "cpu"), ("__cuda_array_interface__", "cuda")]
)
def test_interface_of_an_object_alone(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrappers of addresses set the attribute on an object, where NumPy and CuPy find it, too; a
    type that has it for its objects is no tensor."""
    monkeypatch.setattr(frameworks, "cuda_ordinal", lambda pointer: 0)
    array = np.zeros((3, 4), np.float32)
    assert view(SimpleNamespace(**{name: array.__array_interface__})) == view(array)._replace(
        device=(device, 0)
    )
    kind = type("Stranger", (), {name: property(lambda self: array.__array_interface__)})
    assert view(kind()).ptr == view(array).ptr
    with pytest.raises(InvalidVariantPackError, match="Expected a tensor"):
        view(kind)


def test_array_interfaces_that_say_less_or_more() -> None:
    """A mask would be left out, and memory without an address cannot be read."""
    interface = np.zeros((3, 4), np.float32).__array_interface__
    without = {name: value for name, value in interface.items() if name != "data"}
    cases = (({**interface, "mask": np.ones((3, 4), bool)}, "mask"), (without, "no address"))
    for said, message in cases:
        kind = type("Stranger", (), {"__array_interface__": said})
        with pytest.raises(InvalidVariantPackError, match=message):
            view(kind())
    with pytest.raises(InvalidVariantPackError, match="MaskedArray has a mask"):
        view(np.ma.masked_array(np.zeros(3), [True, False, True]))


def test_cuda_array_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device is asked of the driver, because the interface does not tell."""
    monkeypatch.setattr(frameworks, "cuda_ordinal", lambda pointer: {4096: 5}[pointer])

    class Numba:
        __cuda_array_interface__ = {
            "data": (4096, True),
            "typestr": "<f2",
            "shape": (3, 4),
            "strides": None,
            "version": 3,
        }

    expected = (4096, (3, 4), (4, 1), data_type.HALF, ("cuda", 5), False)
    assert view(Numba()) == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1)])
def test_strides_as(order: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """As NumPy's ``empty_like`` orders what has no gaps, whatever gaps there are; sizes of 1 mean
    nothing, and memory that repeats is row-major."""
    back = sorted(range(3), key=order.__getitem__)
    x = np.zeros([*(sizes[i] + 2 for i in order), 8])
    x = x[tuple(slice(sizes[i]) for i in order)].transpose(*back, 3)
    steps = [step // x.itemsize for step in x.strides]
    found = protocols.strides_as((*sizes, 5), x.shape, steps)
    expected = np.empty_like(x[..., :5]).strides
    used = [i for i, size in enumerate((*sizes, 5)) if size > 1]
    assert [found[i] for i in used] == [expected[i] // x.itemsize for i in used]
    repeated = np.broadcast_to(x[:1], (7, *x.shape[1:]))
    steps = [step // x.itemsize for step in repeated.strides]
    assert protocols.strides_as((7, *sizes[1:], 5), repeated.shape, steps) == (
        protocols.compact_strides((7, *sizes[1:], 5))
    )
