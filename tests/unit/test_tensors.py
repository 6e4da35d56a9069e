"""Reading and allocating tensors of every framework."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from dlattn import dtypes
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.runtime import tensors
from dlattn.runtime.tensors import (
    TensorView,
    allocate,
    allocate_bytes,
    allocator,
    to_caller,
    view,
)
from tests.unit.producers import Capsules, Producer

STORABLE = [
    data_type.FLOAT,
    data_type.DOUBLE,
    data_type.HALF,
    data_type.BFLOAT16,
    data_type.INT8,
    data_type.INT32,
    data_type.INT64,
    data_type.UINT8,
    data_type.BOOLEAN,
    data_type.FP8_E4M3,
    data_type.FP8_E5M2,
]


def floats(seen: TensorView) -> np.ndarray:
    """The float32 elements of a tensor in host memory, each read at its own address."""
    result = np.empty(seen.shape, np.float32)
    for index in np.ndindex(seen.shape):
        offset = sum(i * step for i, step in zip(index, seen.stride, strict=True))
        result[index] = ctypes.c_float.from_address(seen.ptr + 4 * offset).value
    return result


# NumPy --------------------------------------------------------------------------------------------


@given(np_st.arrays(np.float32, np_st.array_shapes(min_dims=0, min_side=0, max_side=4)), st.data())
def test_numpy(array: np.ndarray, data: st.DataObject) -> None:
    """Any slicing, reversal and transposition of an array reads back element by element."""
    if array.ndim:
        array = array[data.draw(np_st.basic_indices(array.shape, allow_newaxis=True))]
    array = np.transpose(array, data.draw(st.permutations(range(np.ndim(array)))))
    if not isinstance(array, np.ndarray):
        return
    seen = view(array)
    assert seen[1:] == (
        array.shape,
        tuple(stride // 4 for stride in array.strides),
        data_type.FLOAT,
        ("cpu", 0),
        True,
    )
    np.testing.assert_array_equal(floats(seen), array)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_numpy_types(dtype: data_type) -> None:
    """Every element type, those of ml_dtypes too."""
    assert view(np.zeros(3, dtypes.to_numpy(dtype))).dtype is dtype


def test_numpy_read_only() -> None:
    """Read-only arrays are read, and marked."""
    array = np.zeros(3, np.float16)
    array.flags.writeable = False
    assert not view(array).writable


def test_numpy_strides_between_elements() -> None:
    """A field of a record has strides that elements cannot express."""
    records = np.zeros(3, np.dtype([("a", np.float32), ("b", np.int16)]))
    with pytest.raises(InvalidVariantPackError, match="no multiples of its 4-byte"):
        view(records["a"])


@pytest.mark.parametrize(
    "thing",
    [None, 3, 2.5, "q", b"q", [1.0], np.float32(1), object()],
    ids=lambda thing: type(thing).__name__,
)
def test_not_a_tensor(thing: Any) -> None:
    """The sentence says what was expected and what came."""
    with pytest.raises(InvalidVariantPackError, match=f"Expected a tensor.*{type(thing).__name__}"):
        view(thing)


@pytest.mark.parametrize("dtype", [np.complex64, np.uint16, np.dtype(">f4"), np.dtype("U3")])
def test_foreign_element_type(dtype: Any) -> None:
    """Types that no graph can declare are refused, byte-swapped ones among them."""
    with pytest.raises(InvalidVariantPackError, match="element type"):
        view(np.zeros(3, dtype))


# torch --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_torch(torch: Any, dtype: data_type) -> None:
    """Address, shape, strides and type of a transposed slice."""
    tensor = torch.empty(4, 5, 6, dtype=getattr(torch, dtypes.to_torch_name(dtype)))
    part = tensor[1:, ::2].transpose(0, 2)
    offset = 30 * dtypes.itemsize(dtype)
    expected = TensorView(
        tensor.data_ptr() + offset, (6, 3, 3), (1, 12, 30), dtype, ("cpu", 0), True
    )
    assert view(part) == expected
    assert type(view(part).shape) is tuple


def test_torch_subclasses_and_gradients(torch: Any) -> None:
    """Parameters and other subclasses are read like tensors, requires_grad or not."""

    class Mine(torch.Tensor):
        pass

    plain = torch.zeros(2, 3)
    for tensor in (torch.nn.Parameter(plain), plain.as_subclass(Mine), plain.requires_grad_()):
        assert view(tensor).ptr == plain.data_ptr()
        assert tensors.framework(tensor).name == "torch"


def test_torch_without_memory(torch: Any) -> None:
    """Meta and sparse tensors have no address to give."""
    for tensor in (torch.zeros(3, device="meta"), torch.zeros(3, 3).to_sparse()):
        with pytest.raises(InvalidVariantPackError, match="has no memory"):
            view(tensor)
    assert view(torch.zeros(0, 3)).shape == (0, 3)


def test_torch_negated_on_read(torch: Any) -> None:
    """Memory that torch negates as it reads it is refused, also where a tensor like it was seen."""
    plain = torch.zeros(2, 3)
    negated = torch._neg_view(plain)
    assert tensors.matcher(plain)(plain) == plain.data_ptr()
    assert tensors.matcher(plain)(negated) == 0
    for read in (view, lambda x: tensors.signatures([x])):
        read(plain)
        with pytest.raises(InvalidVariantPackError, match="pass its resolve_neg()"):
            read(negated)
    other = torch.zeros(2, 3)
    look = tensors.lookalikes([plain, other])
    assert look is None or (look(plain, other) and look(other, negated) is None)


def test_torch_on_cuda_is_read_without_a_device_object(torch: Any) -> None:
    """The ordinal comes from ``get_device``, which makes no torch.device."""
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    tensors.framework(tensor)
    twin = SimpleNamespace(
        data_ptr=lambda: 4096,
        is_neg=lambda: False,
        stride=tensor.stride,
        shape=tensor.shape,
        dtype=tensor.dtype,
        is_cuda=True,
        get_device=lambda: 3,
    )
    seen = tensors.framework(tensor).view(twin)
    assert seen == (4096, (2, 3), (3, 1), data_type.BFLOAT16, ("cuda", 3), True)


# CuPy, over host memory: no GPU needed ------------------------------------------------------------


def test_cupy() -> None:
    """Address, shape, strides in elements, type and device of an array."""
    cupy = pytest.importorskip("cupy")
    host = np.zeros(64, np.uint8)
    unowned = cupy.cuda.UnownedMemory(host.ctypes.data, 64, host, 2)
    for element, dtype in ((np.float16, data_type.HALF), (ml_dtypes.bfloat16, data_type.BFLOAT16)):
        array = cupy.ndarray((3, 4), element, cupy.cuda.MemoryPointer(unowned, 8), strides=(2, 6))
        expected = (host.ctypes.data + 8, (3, 4), (1, 3), dtype, ("cuda", 2), True)
        assert view(array) == expected


# JAX ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.mark.parametrize("element", ["bfloat16", "float32", "float8_e4m3fn", "int32", "bool"])
def test_jax(jax: Any, element: str) -> None:
    """Arrays are read in place, and are not writable."""
    array = jax.numpy.zeros((2, 3, 4), element)
    expected = TensorView(
        array.unsafe_buffer_pointer(),
        (2, 3, 4),
        (12, 4, 1),
        dtypes.from_any(np.dtype(array.dtype)),
        ("cpu", 0),
        False,
    )
    assert view(array) == expected


@given(st.permutations(range(4)))
def test_jax_layouts(order: list[int]) -> None:
    """An array whose XLA layout is not row-major is read with its true strides."""
    jax = pytest.importorskip("jax")
    memory = np.zeros(120 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # JAX copies what is not aligned to 64 bytes
    array = memory[start : start + 120].reshape(2, 3, 4, 5)
    array[...] = np.arange(120).reshape(array.shape)
    array = np.transpose(array, order)
    imported = jax.dlpack.from_dlpack(array)
    assert view(imported).stride == view(array).stride
    np.testing.assert_array_equal(floats(view(imported)), array)


def test_jax_tracer(jax: Any) -> None:
    """Inside jit there is no memory, and the sentence says where to go."""

    def function(x: Any) -> Any:
        with pytest.raises(InvalidVariantPackError, match=r"use dlattn\.jax"):
            view(x)
        return x

    jax.jit(function)(jax.numpy.zeros(3))


def test_jax_deleted(jax: Any) -> None:
    """A donated array has no buffer left."""
    array = jax.numpy.zeros(3)
    array.delete()
    with pytest.raises(InvalidVariantPackError, match="no single buffer"):
        view(array)


def test_jax_without_private_attributes(jax: Any) -> None:
    """A jaxlib that hides its layouts is read through DLPack, still as read-only."""
    array = jax.numpy.zeros((2, 3))
    expected = view(array)

    class Stranger(Producer):
        def unsafe_buffer_pointer(self) -> int:
            return int(self.tensor.unsafe_buffer_pointer())

    assert tensors.framework(array).view(Stranger(array)) == expected


def test_jax_callback_buffers(jax: Any) -> None:
    """Inside buffer_callback outputs are writable, inputs are not, and nothing waits."""
    module = pytest.importorskip("jax.experimental.buffer_callback")
    seen = {}

    def callback(context: Any, out: Any, x: Any) -> None:
        seen.update(out=view(out), x=view(x), name=type(tensors.framework(x)).__name__)
        tensors.order_before([x, out], 0)

    shape = jax.ShapeDtypeStruct((2, 3), jax.numpy.bfloat16)
    out = module.buffer_callback(callback, shape)(jax.numpy.zeros((2, 3), jax.numpy.bfloat16))
    out.block_until_ready()
    assert seen["out"][1:] == ((2, 3), (3, 1), data_type.BFLOAT16, ("cpu", 0), True)
    assert not seen["x"].writable
    assert seen["name"] == "_JaxBuffer"


# Ordering -----------------------------------------------------------------------------------------


def test_order_before_asks_the_producer() -> None:
    """Strangers on CUDA order themselves before our stream; the legacy stream is spelled 1."""
    producer, host = Capsules(), Producer(np.zeros(3))
    tensors.order_before([producer, host, np.zeros(3)], 77)
    tensors.order_before([producer], 0)
    assert [stream for stream in producer.streams if stream != -1] == [77, 1]
    assert all(call["stream"] is None for call in host.calls)


def test_order_before_waits_for_jax_on_the_cpu(jax: Any) -> None:
    """JAX computes asynchronously on the CPU too, where there is no stream to order by."""
    array = jax.numpy.ones((300, 300))
    for _ in range(5):
        array = array @ array / 300
    tensors.order_before([array], 0)
    assert array.is_ready()


# Allocating ---------------------------------------------------------------------------------------


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and strides in any order of dimensions, with or without padding."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    strides, step = [0] * len(shape), 1
    for dimension in draw(st.permutations(range(len(shape)))):
        strides[dimension] = step
        step = step * max(shape[dimension], 1) + draw(st.integers(0, 2))
    return shape, tuple(strides)


@pytest.mark.parametrize("name", ["numpy", "torch"])
@given(strided(), st.sampled_from(STORABLE))
def test_allocate(
    name: str, geometry: tuple[tuple[int, ...], tuple[int, ...]], dtype: data_type
) -> None:
    """The result has the asked shape, strides and type, and all of it is memory we own, made once
    or again and again."""
    framework = pytest.importorskip(name)
    shape, stride = geometry
    like = framework.zeros(1)
    again = allocator(like, shape, stride, dtype)
    for tensor in (allocate(like, shape, stride, dtype), again(), again()):
        seen = view(tensor)
        assert (seen.shape, seen.dtype, seen.writable) == (shape, dtype, True)
        if 0 not in shape:
            assert seen.stride == stride
        tensor[...] = 1


def test_allocate_for_jax(jax: Any) -> None:
    """JAX arrays cannot be written to: the buffer is NumPy's until it is handed over."""
    like = jax.numpy.zeros(1)
    for element in ("float32", "bfloat16", "float8_e5m2", "int32"):
        buffer = allocate(like, (2, 3), (1, 2), dtypes.from_any(np.dtype(element)))
        assert type(buffer) is np.ndarray
        buffer[...] = np.arange(6).reshape(2, 3)
        array = to_caller(buffer, like)
        assert isinstance(array, jax.Array)
        assert array.dtype == element
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.arange(6).reshape(2, 3))


def test_to_caller_is_the_identity_elsewhere(torch: Any) -> None:
    """torch, NumPy and strangers get what was allocated."""
    for like in (torch.zeros(1), np.zeros(1), Producer(np.zeros(1))):
        buffer = allocate_bytes(like, 64)
        assert view(buffer)[1:4] == ((64,), (1,), data_type.UINT8)
        assert to_caller(buffer, like) is buffer


@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (3,)), ((2,), (-1,)), ((-2,), (1,))], ids=str
)
def test_allocate_nonsense(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Shape and strides must describe a tensor."""
    with pytest.raises(InvalidArgumentError, match="Cannot allocate"):
        allocate(np.zeros(1), shape, stride, data_type.HALF)


# Imports ------------------------------------------------------------------------------------------


def test_no_framework_is_imported() -> None:
    """Reading NumPy arrays loads no other framework."""
    program = (
        "import sys, numpy\n"
        "from dlattn.runtime import streams, tensors\n"
        "tensors.view(numpy.zeros(3))\n"
        "assert not {'torch', 'jax', 'cupy'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
