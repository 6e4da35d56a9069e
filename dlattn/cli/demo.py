"""``demo``: GPT-2's attention, forward and backward, checked against float64 and timed."""

from __future__ import annotations

import argparse
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn.cli.machine import cuda_devices, install_hint
from dlattn.cli.progress import step
from dlattn.cli.sizes import size
from dlattn.dtypes import data_type, to_numpy

Array = NDArray[Any]

_DTYPES = {"fp16": data_type.HALF, "bf16": data_type.BFLOAT16}

#: Bounds, in units of ``eps(dtype)``: on the largest error over the largest exact element, and on
#: the root mean square of both. Rounding a result alone costs 0.5 of the first, 0.2 of the second;
#: kernels also round the probabilities, their gradient, and o before the backward pass uses it.
_LARGEST, _TYPICAL = 2.0, 1.0

_GPU_RUNS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """GPT-2's sizes are the defaults."""
    add = parser.add_argument
    add("--dtype", choices=_DTYPES, default="fp16", help="element type (default: fp16)")
    add("--device", choices=("auto", "cpu"), default="auto", help="cpu: leave the GPU alone")
    add("--batch", type=size, default=4, help="(default: 4)")
    add("--heads", type=size, default=12, help="(default: 12)")
    add("--seq", type=size, default=1024, help="sequence length (default: 1024)")
    add("--head-dim", type=size, default=64, help="(default: 64)")


def run(arguments: argparse.Namespace) -> int:
    """Run both passes, compare them with the definition, time them.

    Returns:
        0 when every tensor is within its bound, else 1.
    """
    dtype = _DTYPES[arguments.dtype]
    shape = (arguments.batch, arguments.heads, arguments.seq, arguments.head_dim)
    scale = arguments.head_dim**-0.5
    batch, heads, seq, width = shape
    print(f"dlattn {dlattn.__version__}: causal attention, forward and backward, {arguments.dtype}")
    print(f"batch {batch}, heads {heads}, sequence {seq}, head dim {width}")
    machine = _machine(arguments.device)
    print(f"device: {machine.description}")

    given = _inputs(shape, to_numpy(dtype))
    arrays = {name: machine.put(array) for name, array in given.items()}
    blank = np.full_like(given["q"], np.nan)  # what a kernel fails to write stays visible
    arrays |= {name: machine.put(blank.copy("K")) for name in ("o", "dQ", "dK", "dV")}
    arrays["stats"] = machine.put(np.full((*shape[:3], 1), np.nan, np.float32))
    with step("building the plans"):
        passes = [_forward(arrays, scale, machine), _backward(arrays, scale, machine)]
    print(f"engines: {', '.join(attention.engine for attention in passes)}")
    times = []
    for attention in passes:
        with step(f"running the {attention.name} pass"):
            times.append(machine.time(attention))
    with step("computing both again in float64 NumPy"):
        exact = _exact(**given, scale=scale)

    results = {name: machine.get(arrays[name]) for name in exact}
    within = _report(results, exact, float(ml_dtypes.finfo(given["q"].dtype).eps))
    print("\n".join(f"{p.name:<10}{t}" for p, t in zip(passes, times, strict=True)))
    return 0 if within else 1


# The attention ------------------------------------------------------------------------------------


class _Pass:
    """A built graph with its memory.

    Attributes:
        name: forward or backward.
        engine: the name of the plan that runs it.
    """

    def __init__(
        self,
        name: str,
        graph: dlattn.pygraph,
        tensors: Mapping[str, dlattn.tensor],
        arrays: Mapping[str, Any],
        machine: _Machine,
    ) -> None:
        for role, tensor in tensors.items():
            if tensor.get_is_virtual():  # an output that nobody has asked for yet
                _lay_out_like(tensor, arrays[role])
        graph.build()
        self.name = name
        self.engine = graph.get_plan_name_at_index(0)
        self._graph = graph
        self._pack = {tensor: arrays[role] for role, tensor in tensors.items()}
        self._workspace = machine.put(np.empty(graph.get_workspace_size(), np.uint8))

    def __call__(self) -> None:
        self._graph.execute(self._pack, self._workspace)


def _forward(arrays: Mapping[str, Any], scale: float, machine: _Machine) -> _Pass:
    graph = dlattn.pygraph(intermediate_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor_like(arrays[role], role) for role in ("q", "k", "v"))
    o, stats = graph.sdpa(q, k, v, attn_scale=scale, use_causal_mask=True, generate_stats=True)
    tensors = {"q": q, "k": k, "v": v, "o": o, "stats": stats}
    return _Pass("forward", graph, tensors, arrays, machine)


def _backward(arrays: Mapping[str, Any], scale: float, machine: _Machine) -> _Pass:
    graph = dlattn.pygraph(intermediate_data_type=data_type.FLOAT)
    roles = ("q", "k", "v", "o", "dO", "stats")
    q, k, v, o, dO, stats = (graph.tensor_like(arrays[role], role) for role in roles)
    dQ, dK, dV = graph.sdpa_backward(q, k, v, o, dO, stats, attn_scale=scale, use_causal_mask=True)
    tensors = dict(
        zip((*roles, "dQ", "dK", "dV"), (q, k, v, o, dO, stats, dQ, dK, dV), strict=True)
    )
    return _Pass("backward", graph, tensors, arrays, machine)


def _lay_out_like(output: dlattn.tensor, array: Any) -> None:
    stride = [step // array.dtype.itemsize for step in array.strides]
    output.set_output(True).set_dim(array.shape).set_stride(stride).set_data_type(array.dtype)


def _inputs(shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> dict[str, Array]:
    """q, k, v and dO, (B, H, S, D) over memory in the order (B, S, H, D), as projections give."""
    batch, heads, seq, width = shape
    random = np.random.default_rng(42)
    return {
        name: random.standard_normal((batch, seq, heads, width)).astype(dtype).swapaxes(1, 2)
        for name in ("q", "k", "v", "dO")
    }


def _exact(q: Array, k: Array, v: Array, dO: Array, scale: float) -> dict[str, Array]:
    """Causal attention and its gradients from their definition, one head at a time, in float64."""
    exact = {name: np.empty(q.shape) for name in ("o", "dQ", "dK", "dV")}
    future = ~np.tri(q.shape[2], dtype=bool)
    for head in np.ndindex(q.shape[:2]):
        q_h, k_h, v_h, dO_h = (x[head].astype(np.float64) for x in (q, k, v, dO))
        scores = q_h @ k_h.T * scale
        scores[future] = -np.inf
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dP = dO_h @ v_h.T
        dS = p * (dP - (p * dP).sum(axis=1, keepdims=True)) * scale
        exact["o"][head] = p @ v_h
        exact["dQ"][head], exact["dK"][head], exact["dV"][head] = dS @ k_h, dS.T @ q_h, p.T @ dO_h
    return exact


def _report(results: Mapping[str, Array], exact: Mapping[str, Array], eps: float) -> bool:
    """Print each tensor's errors beside their bounds; whether all are within."""
    print(f"{'':<10}{'largest error (bound)':>24}{'typical error (bound)':>26}")
    all_within = True
    for name, expected in exact.items():
        error = results[name].astype(np.float64) - expected
        largest, typical = np.abs(error).max(), _rms(error)
        # What is exactly 0, as gradients of one key are, is the rest of terms that are not.
        largest_bound = _LARGEST * eps * max(eps, np.abs(expected).max())
        typical_bound = _TYPICAL * eps * max(eps, _rms(expected))
        within = bool(largest <= largest_bound and typical <= typical_bound)  # False for NaN
        all_within &= within
        columns = f"{largest:>13.2e} ({largest_bound:.2e}){typical:>15.2e} ({typical_bound:.2e})"
        print(f"{name:<10}{columns}{'' if within else '  OUT OF BOUNDS'}")
    return all_within


def _rms(array: Array) -> float:
    return float(np.sqrt(np.square(array).mean()))


# Machines -----------------------------------------------------------------------------------------


class _Machine(ABC):
    """Where the arrays live.

    Attributes:
        description: for people.
    """

    description: str

    @abstractmethod
    def put(self, array: Array) -> Any:
        """The array on the device, in the same memory order."""

    @abstractmethod
    def get(self, array: Any) -> Array:
        """The array on the host."""

    @abstractmethod
    def time(self, call: Callable[[], None]) -> str:
        """Run it, and say how long it took."""


class _Cpu(_Machine):
    description = "CPU"

    def put(self, array: Array) -> Array:
        return array

    def get(self, array: Array) -> Array:
        return array

    def time(self, call: Callable[[], None]) -> str:
        started = time.perf_counter()
        call()
        return f"{time.perf_counter() - started:.2f} s of wall time, one run"


class _Gpu(_Machine):
    def __init__(self, description: str) -> None:
        import cupy

        self._cupy: Any = cupy
        self.description = description

    def put(self, array: Array) -> Any:
        # By way of the dense array beneath: CuPy does not promise to keep an order of axes.
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        dense = self._cupy.asarray(array.transpose(order))
        return dense.transpose([order.index(axis) for axis in range(array.ndim)])

    def get(self, array: Any) -> Array:
        host: Array = self._cupy.asnumpy(array)
        return host

    def time(self, call: Callable[[], None]) -> str:
        for _ in range(_GPU_RUNS // 5):
            call()
        marks = [self._cupy.cuda.Event() for _ in range(_GPU_RUNS + 1)]
        for mark in marks[:-1]:
            mark.record()
            call()
        marks[-1].record()
        marks[-1].synchronize()
        times = map(self._cupy.cuda.get_elapsed_time, marks[:-1], marks[1:])
        return f"{1e3 * statistics.median(times):.1f} us on the GPU, median of {_GPU_RUNS} runs"


def _machine(wanted: str) -> _Machine:
    hint = install_hint()
    if hint:
        print(hint)
    devices = cuda_devices() if wanted == "auto" else []
    return _Gpu(f"{devices[0].target}, {devices[0].description}") if devices else _Cpu()
