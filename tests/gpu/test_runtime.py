"""The runtime on a real device: loading, launching, streams, and every framework's tensors."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlattn.dtypes import data_type, to_torch_name
from dlattn.errors import DlattnError
from dlattn.runtime import jit, streams, target, tensormap, tensors
from dlattn.runtime.buffers import to_device
from dlattn.runtime.launch import Launch, device_guard

pytestmark = pytest.mark.gpu

#: ``out[i] = in[i] + add`` through dynamic shared memory, one block.
TEXT = """
struct Params { const float* in; float* out; int count; float add; };
extern "C" __global__ void shift(const __grid_constant__ Params p) {
    extern __shared__ float s_in[];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < p.count; i += blockDim.x) s_in[i] = p.in[i];
    __syncthreads();
    for (int i = threadIdx.x; i < p.count; i += blockDim.x) p.out[i] = s_in[i] + p.add;
}
"""
PORTABLE = TEXT.replace('asm volatile("griddepcontrol.wait;" ::: "memory");', "")

COUNT = 40_000  # more shared memory than a kernel gets without asking, where the device has it


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def kernel() -> jit.Kernel:
    device = target.cuda_target(0)
    text = TEXT if device.capability >= (9, 0) else PORTABLE
    return jit.load(jit.compile_kernel(jit.KernelSource("shift", text), device.arch), 0)


class Shift:
    """A launch of the kernel, and the struct that it reads."""

    def __init__(self, kernel: jit.Kernel, count: int, **options: Any) -> None:
        kernel.set_shared(4 * count)
        self.count = count
        self.params = ctypes.create_string_buffer(24)
        address = ctypes.addressof(self.params)
        self.launch = Launch(kernel.function, (1, 1, 1), 128, 4 * count, address, **options)

    def __call__(self, source: int, result: int, add: float, stream: int) -> None:
        struct.pack_into("=QQif", self.params, 0, source, result, self.count, add)
        self.launch(stream)


def test_launch(cupy: Any, kernel: jit.Kernel) -> None:
    """Parameters, shared memory beyond 48 KB, and a stream of CuPy's."""
    count = min(COUNT, target.cuda_target(0).shared_memory // 4)
    shift = Shift(kernel, count)
    source = cupy.arange(count, dtype=np.float32)
    result = cupy.zeros_like(source)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    shift(source.data.ptr, result.data.ptr, 2.0, streams.stream_handle(stream))
    stream.synchronize()
    np.testing.assert_array_equal(result.get(), np.arange(count) + 2)


def test_programmatic_launches_in_order(cupy: Any, kernel: jit.Kernel) -> None:
    """Each of a chain of overlapping launches sees what its predecessor wrote."""
    if target.cuda_target(0).capability < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    shift = Shift(kernel, 1000, programmatic=True)
    data = cupy.zeros(1000, np.float32)
    for _ in range(100):
        shift(data.data.ptr, data.data.ptr, 1.0, 0)
    np.testing.assert_array_equal(data.get(), np.full(1000, 100))


def test_a_copy_waits_for_its_memory(cupy: Any) -> None:
    """What goes to the device goes there after what earlier work of its stream still writes to the
    same memory, of streams that wait for no other."""
    text = """extern "C" __global__ void fill(int* out) {
        for (long long begin = clock64(); clock64() - begin < 100000000;) {}
        out[threadIdx.x] = -1;
    }"""
    fill, numbers = cupy.RawKernel(text, "fill"), np.arange(128, dtype=np.int32)
    with cupy.cuda.Stream(non_blocking=True):
        before = cupy.empty_like(numbers)
        address = before.data.ptr
        fill((1,), (128,), (before,))
        del before
        copy = to_device(numbers, 0)
        assert copy.data.ptr == address
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(copy.get(), numbers)


def test_fresh_thread(cupy: Any, kernel: jit.Kernel) -> None:
    """A thread that has not used CUDA before can launch."""
    shift = Shift(kernel, 10)
    data = cupy.zeros(10, np.float32)
    cupy.cuda.get_current_stream().synchronize()
    thread = threading.Thread(target=shift, args=(data.data.ptr, data.data.ptr, 3.0, 0))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(data.get(), np.full(10, 3))


def test_refused_launch(kernel: jit.Kernel) -> None:
    """The driver's name of the error, and what was asked."""
    with pytest.raises(DlattnError, match="shift failed with CUDA_ERROR_INVALID_VALUE.*4096 thr"):
        Launch(kernel.function, (1, 1, 1), 4096, 0, 0, name="shift")(0)


def test_addresses_of_maps(cupy: Any) -> None:
    """An address that is assigned makes the map that the driver makes of it."""
    if target.cuda_target(0).capability < (9, 0):
        pytest.skip("tensor maps need compute capability 9.0")
    memory = [ctypes.create_string_buffer(128 + 63) for _ in range(2)]
    places = [ctypes.addressof(it) + -ctypes.addressof(it) % 64 for it in memory]
    for place in places:
        tensormap.encode(
            place, data_type.BFLOAT16, (2, 3, 40, 64), (7680, 2560, 64, 1), (1, 1, 8, 64)
        )
    tensors = cupy.zeros((4, 2, 3, 40, 64), np.uint16)
    for tensor in tensors:
        tensormap.address_slot(places[0]).value = tensor.data.ptr
        tensormap.ReplacedAddress(places[1]).value = tensor.data.ptr
        first, second = (ctypes.string_at(place, 128) for place in places)
        assert first == second
    assert first != bytes(128)


def test_device_guard(cupy: Any) -> None:
    """The device is switched for a while."""
    if target.cuda_device_count() < 2:
        pytest.skip("needs two devices")
    with device_guard(1):
        assert cupy.cuda.runtime.getDevice() == 1
    assert cupy.cuda.runtime.getDevice() == 0


def test_second_device(cupy: Any, kernel: jit.Kernel) -> None:
    """The same cubin on another device, launched under a guard."""
    if target.cuda_device_count() < 2:
        pytest.skip("needs two devices")
    compiled = jit.compile_kernel(jit.KernelSource("shift", TEXT), target.cuda_target(1).arch)
    shift = Shift(jit.load(compiled, 1), 10)
    with cupy.cuda.Device(1):
        data = cupy.zeros(10, np.float32)
        cupy.cuda.get_current_stream().synchronize()
    with device_guard(1):
        shift(data.data.ptr, data.data.ptr, 4.0, 0)
    with cupy.cuda.Device(1):
        np.testing.assert_array_equal(data.get(), np.full(10, 4))


WARM = """
import sys
from pathlib import Path
from dlattn.runtime import jit, target
device = target.cuda_target(0)
kernel = jit.compile_kernel(jit.KernelSource("shift", sys.argv[1]), device.arch)
jit.load(kernel, 0).set_shared(1024)
print(jit.statistics.compiles, "libnvrtc" in Path("/proc/self/maps").read_text())
"""


def test_warm_start_does_not_load_nvrtc(kernel: jit.Kernel) -> None:
    """Neither finding a kernel nor loading it through CuPy maps the compiler."""
    text = TEXT if target.cuda_target(0).capability >= (9, 0) else PORTABLE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WARM, text]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"]


# Frameworks ---------------------------------------------------------------------------------------


def test_torch() -> None:
    """CUDA tensors are read and allocated on their device, and run on torch's current stream."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    for dtype in (data_type.BFLOAT16, data_type.FP8_E4M3, data_type.INT64):
        element = getattr(torch, to_torch_name(dtype))
        tensor = torch.empty(2, 3, 4, dtype=element, device="cuda").transpose(0, 1)
        seen = tensors.view(tensor)
        expected = (tensor.data_ptr(), (3, 2, 4), (4, 12, 1), dtype, ("cuda", 0), True)
        assert seen == expected
        again = tensors.allocator(tensor, (3, 2, 4), (4, 12, 1), dtype)
        for made in (tensors.allocate(tensor, (3, 2, 4), (4, 12, 1), dtype), again()):
            assert tensors.view(made)[1:] == expected[1:]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert streams.current_stream([tensor], 0) == side.cuda_stream
    assert streams.current_stream([tensor], 0) == torch.cuda.current_stream().cuda_stream
    assert streams.stream_handle(side) == side.cuda_stream


def test_cupy(cupy: Any) -> None:
    """CuPy arrays likewise, fp8 included."""
    for dtype in (data_type.HALF, data_type.BFLOAT16, data_type.FP8_E5M2):
        made = tensors.allocate(cupy.zeros(1), (2, 3, 4), (1, 2, 8), dtype)
        expected = (made.data.ptr, (2, 3, 4), (1, 2, 8), dtype, ("cuda", 0), True)
        assert tensors.view(made) == expected
    with cupy.cuda.Stream() as side:
        assert streams.current_stream([made], 0) == side.ptr


def test_cuda_array_interface(cupy: Any) -> None:
    """A stranger with nothing but the CUDA array interface is read and ordered."""
    array = cupy.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]

    class Stranger:
        __cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": 1}

    assert tensors.view(Stranger()) == tensors.view(array)
    tensors.order_before([Stranger()], 0)


@pytest.fixture(scope="module")
def jax() -> Any:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return jax


@pytest.mark.parametrize("element", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32"])
def test_jax(jax: Any, cupy: Any, element: str) -> None:
    """Arrays are read on the device; buffers filled for JAX become its arrays without a copy."""
    array = jax.numpy.ones((2, 3, 4), element)
    seen = tensors.view(array)
    assert seen[1:3] == ((2, 3, 4), (12, 4, 1))
    assert seen[4:] == (("cuda", 0), False)
    assert seen.ptr == array.unsafe_buffer_pointer()
    made = tensors.allocate(array, (2, 3, 4), (12, 4, 1), seen.dtype)
    assert isinstance(made, cupy.ndarray)
    assert tensors.view(made)[1:5] == seen[1:5]
    made.view(np.uint8)[...] = 0
    handed = tensors.to_caller(made, array)
    assert isinstance(handed, jax.Array)
    assert handed.dtype == array.dtype
    assert handed.shape == (2, 3, 4)
    assert not np.asarray(handed, np.float32).any()
    if made.dtype.itemsize > 1:  # fp8 passes as bytes, which XLA may copy to change their type
        assert handed.unsafe_buffer_pointer() == made.data.ptr


def test_jax_strided(jax: Any, cupy: Any) -> None:
    """Layouts that are not row-major: read as they are, handed over by value."""
    made = tensors.allocate(jax.numpy.ones(1), (2, 3), (1, 2), data_type.FLOAT)
    made[...] = cupy.arange(6).reshape(2, 3)
    handed = tensors.to_caller(made, jax.numpy.ones(1))
    np.testing.assert_array_equal(np.asarray(handed), np.arange(6).reshape(2, 3))
    imported = jax.dlpack.from_dlpack(made)
    expected = tensors.view(made)[1:3]
    if imported.unsafe_buffer_pointer() == made.data.ptr:
        assert tensors.view(imported)[1:3] == expected


def test_jax_is_ordered_before(jax: Any, cupy: Any, kernel: jit.Kernel) -> None:
    """A kernel on another stream reads what a long JAX computation wrote."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: jax.numpy.tanh(y @ y), x))
    matrix = jax.numpy.eye(2048)
    expected = np.asarray(slow(matrix))[0, :1000]
    shift = Shift(kernel, 1000)
    stream = cupy.cuda.Stream(non_blocking=True)
    result = cupy.zeros(1000, np.float32)
    cupy.cuda.get_current_stream().synchronize()
    for handle in (stream.ptr, 0):
        produced = slow(matrix)
        tensors.order_before([produced], handle)
        shift(tensors.view(produced).ptr, result.data.ptr, 0.0, handle)
        cupy.cuda.runtime.deviceSynchronize()
        np.testing.assert_array_equal(result.get(), expected)
        result[...] = -1
        cupy.cuda.get_current_stream().synchronize()


def test_jax_callback(jax: Any) -> None:
    """Inside buffer_callback both inputs and outputs are on the device, the outputs writable."""
    module = pytest.importorskip("jax.experimental.buffer_callback")
    seen: dict[str, tensors.TensorView] = {}

    def callback(context: Any, out: Any, x: Any) -> None:
        seen.update(out=tensors.view(out), x=tensors.view(x))
        tensors.order_before([x], context.stream)

    shape = jax.ShapeDtypeStruct((2, 3), jax.numpy.bfloat16)
    call = jax.jit(module.buffer_callback(callback, shape))
    call(jax.numpy.zeros((2, 3), jax.numpy.bfloat16)).block_until_ready()
    expected = ((2, 3), (3, 1), data_type.BFLOAT16, ("cuda", 0))
    assert seen["out"][1:] == (*expected, True)
    assert seen["x"][1:] == (*expected, False)


def test_cache_is_a_folder(kernel: jit.Kernel) -> None:
    """The loaded kernel's files are there to be read."""
    text = TEXT if target.cuda_target(0).capability >= (9, 0) else PORTABLE
    compiled = jit.compile_kernel(jit.KernelSource("shift", text), target.cuda_target(0).arch)
    assert Path(compiled.cubin).with_name("kernel.cu").read_text() == text
