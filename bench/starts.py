"""What a fresh process takes until its first result: the preset ``start`` of ``bench.run``.

Beyond importing CuPy and creating the CUDA context: with an empty cache, where kernels are
compiled; with a warm one; and from a serialised graph, with neither NVRTC nor a cache.
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cases import FORWARD
from bench.jobs import Effort, Job, Named
from bench.measure import Measured, sentence
from bench.peers import Peer

START = "start"

#: What every process does first, and last.
FIRST = """
import sys, time
import cupy
cupy.zeros(1).sum().get()  # the context, and CuPy's own kernels
memory = cupy.zeros(5 * 16384, dtype=cupy.float32)
begun = time.perf_counter()
import dlattn
imported = time.perf_counter()
"""
LAST = """
g.execute({uid: memory.data.ptr + (uid - 1) * 65536 for uid in range(1, 6)}, 0)
cupy.cuda.get_current_stream().synchronize()
seconds = time.perf_counter() - begun
from dlattn.runtime import jit
loaded = "libnvrtc" in open("/proc/self/maps").read()
print(f"{seconds:.4f} {imported - begun:.4f} {jit.statistics.compiles} {loaded}")
"""
WARM = """
g = dlattn.pygraph(io_data_type=dlattn.data_type.BFLOAT16,
                   intermediate_data_type=dlattn.data_type.FLOAT,
                   compute_data_type=dlattn.data_type.FLOAT)
dim, stride = (1, 2, 128, 64), (16384, 8192, 64, 1)
q, k, v = (
    g.tensor(dim=dim, stride=stride, data_type=dlattn.data_type.BFLOAT16, uid=uid)
    for uid in (1, 2, 3)
)
o, stats = g.sdpa(q, k, v, attn_scale=0.125, generate_stats=True, use_causal_mask=True)
o.set_output(True).set_dim(dim).set_stride(stride).set_uid(4)
stats.set_output(True).set_uid(5)
g.build([dlattn.heur_mode.A])
"""
SAVE = """
open(sys.argv[1], "wb").write(bytes(g.serialize()))
"""
LOAD = """
g = dlattn.pygraph()
g.deserialize([*open(sys.argv[1], "rb").read()])
"""


@dataclass(frozen=True)
class Start:
    """A fresh process until its first result.

    Attributes:
        seconds: beyond importing CuPy and creating the CUDA context.
        importing: of these, to import dlattn.
        compiles: kernels that were compiled.
        nvrtc: whether NVRTC was loaded.
    """

    seconds: float
    importing: float
    compiles: int
    nvrtc: bool

    def __str__(self) -> str:
        return (
            f"first result after {1e3 * self.seconds:.0f} ms, of which importing dlattn takes "
            f"{1e3 * self.importing:.0f}; {self.compiles} compiles, NVRTC loaded: {self.nvrtc}"
        )


def start(program: str, cache: str, *arguments: str) -> Start:
    """Run a program that makes the graph, and executes it.

    The package is byte-compiled first, as pip leaves an installed one.
    """
    compileall.compile_dir(Path(__file__).parent.parent / "dlattn", quiet=1)
    output = subprocess.run(
        [sys.executable, "-c", FIRST + program + LAST, *arguments],
        env={**os.environ, "DLATTN_CACHE_DIR": cache},
        cwd=Path(__file__).parent.parent,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return Start(float(output[0]), float(output[1]), int(output[2]), output[3] == "True")


def starts(repeats: int) -> Iterator[tuple[str, list[Start]]]:
    """Each way to start, and processes that did."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
        yield "empty cache", [start(WARM, cache)]
        yield "warm cache", [start(WARM, cache) for _ in range(repeats)]
        data = str(Path(empty) / "graph")
        start(WARM + SAVE, cache, data)
        yield "deserialised graph", [start(LOAD, empty, data) for _ in range(repeats)]


class StartJob(Job):
    """Milliseconds of the median process, and of the median import of dlattn."""

    cases = ("empty cache", "warm cache", "deserialised graph", "import")
    passes = (FORWARD,)

    @property
    def name(self) -> str:
        return "fresh processes"

    def measure(
        self, directions: Sequence[str], peers: Sequence[Peer], effort: Effort
    ) -> Iterable[Measured]:
        imports = []
        try:
            for case, processes in starts(max(1, effort.rounds)):
                yield _measured(case, [it.seconds for it in processes], str(processes[-1]))
                imports += [it.importing for it in processes]
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as raised:
            failed = Measured(Named(self.cases[0]), FORWARD)
            said = getattr(raised, "stderr", None)
            last = f": {said.strip().splitlines()[-1]}" if said and said.strip() else ""
            failed.left_out["dlattn"] = f"{sentence(raised)}{last}"
            yield failed
        if imports:
            yield _measured("import", imports)


def _measured(case: str, seconds: Sequence[float], note: str = "") -> Measured:
    ms = 1e3 * statistics.median(seconds)
    notes = {"dlattn": f"{case}: {note}"} if note else {}
    return Measured(Named(case), FORWARD, {START: {"dlattn": ms}}, notes=notes)
