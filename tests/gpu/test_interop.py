"""CuPy's arrays, streams and memory, and whatever has an exchange protocol, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dlattn
from tests.strangers import WRAPPERS, ByInterface, check_calls
from tests.unit.producers import Producer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


def random(cupy: Any, *shape: int, seed: int = 0) -> Any:
    return cupy.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


@pytest.mark.parametrize("protocol", WRAPPERS)
def test_strangers(cupy: Any, protocol: str) -> None:
    """What has one protocol alone is as good as CuPy's arrays, and gets those as results."""
    check_calls(cupy, WRAPPERS[protocol], np.float16, 1e-2)


def written_late(cupy: Any, values: Any, stream: Any) -> Any:
    """Memory of zeros that gets its values behind a long kernel of a stream."""
    memory = cupy.zeros_like(values)
    cupy.cuda.Device().synchronize()
    with stream:
        busy = cupy.ones((6000, 6000), np.float32)
        for _ in range(4):
            busy = busy @ busy * np.float32(1e-4)
        memory[...] = values + (busy[0, 0] * 0).astype(np.float16)
    return memory


def test_runs_in_the_current_stream(cupy: Any) -> None:
    """Kernels wait for what the stream does before, and what it does next waits for them."""
    q = random(cupy, 2, 256, 4, 64)
    wanted = dlattn.attention(q, q, q, causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    late = written_late(cupy, q, stream)
    with stream:
        total = dlattn.attention(late, late, late, causal=True) * 1
    stream.synchronize()
    assert (total == wanted).all()


@pytest.mark.parametrize("protocol", ["an array interface", "DLPack"])
def test_waits_for_the_stream_of_a_stranger(cupy: Any, protocol: str) -> None:
    """What a stranger's stream writes is read behind that, in another stream."""
    q = random(cupy, 2, 256, 4, 64)
    wanted = dlattn.attention(q, q, q, causal=True)
    theirs, own = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    late = written_late(cupy, q, theirs)

    class Ordered(Producer):
        def __dlpack__(self, stream: Any = None, **arguments: Any) -> Any:
            with theirs:
                return self.tensor.__dlpack__(stream=stream)

    stranger = Ordered(late) if protocol == "DLPack" else ByInterface(late, theirs.ptr)
    with own:
        found = dlattn.attention(*(stranger,) * 3, causal=True)
    own.synchronize()
    assert (found == wanted).all()


def test_workspaces_are_of_the_memory_pool(cupy: Any) -> None:
    """Results and workspaces come from CuPy's allocator of the moment; workspaces go back, and are
    used again."""
    q, k, v, dout = (random(cupy, 2, 300, 4, 64, seed=i) for i in range(4))
    out, lse = dlattn.attention(q, k, v, return_lse=True)
    dlattn.attention_backward(dout, q, k, v, out, lse)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        kept = dlattn.attention_backward(dout, q, k, v, out, lse)
        held, whole = pool.used_bytes(), pool.total_bytes()
        assert sum(x.nbytes for x in kept[:3]) <= held <= whole
        for _ in range(5):
            again = dlattn.attention_backward(dout, q, k, v, out, lse)
        del again
        assert pool.used_bytes() == held
        # The results of one call while those of the one before are still there.
        assert pool.total_bytes() <= 3 * whole


def test_numba(cupy: Any) -> None:
    """Arrays of Numba are read and written; results become Numba's without a copy."""
    numba = pytest.importorskip("numba")
    cuda: Any = pytest.importorskip("numba.cuda")
    assert numba
    if not cuda.is_available():
        pytest.skip("Numba has no CUDA")
    host = [np.random.default_rng(i).standard_normal((2, 40, 4, 64)) for i in range(3)]
    q, k, v = (cuda.to_device(x.astype(np.float16)) for x in host)
    wanted = dlattn.attention(*(cupy.asarray(x, np.float16) for x in host), causal=True)
    out = cuda.device_array_like(q)
    assert dlattn.attention(q, k, v, causal=True, out=out) is out
    np.testing.assert_array_equal(out.copy_to_host(), wanted.get())
    found = dlattn.attention(q, k, v, causal=True)
    shared = cuda.as_cuda_array(found)
    assert shared.device_ctypes_pointer.value == found.data.ptr
    np.testing.assert_array_equal(shared.copy_to_host(), wanted.get())


def test_graphs_of_cupy(cupy: Any) -> None:
    """A stream that is captured has the call in its graph, which reads new numbers."""
    q = random(cupy, 2, 256, 4, 64)
    out = cupy.zeros_like(q)

    def run() -> Any:
        return dlattn.attention(q, q, q, causal=True, out=out)

    run()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    q[...] = random(cupy, 2, 256, 4, 64, seed=1)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (out == dlattn.attention(q, q, q, causal=True)).all()
