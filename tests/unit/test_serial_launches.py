"""What serialised graphs, and graphs with other shapes, ask of the driver; without a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn as cudnn
from dlattn.graph import placement, serial
from dlattn.plans import decode, fwd_sm90
from dlattn.runtime import jit, tables
from dlattn.runtime.target import KNOWN
from tests import drivers
from tests import serial as sources
from tests.builders import make_tensors
from tests.cases import Case
from tests.cuda_driver import Done, Driver, install
from tests.drivers import Ready, Roles, Source, Tensors, declare_graph, run_graph
from tests.libraries import Library
from tests.strategies import cases

HOPPER = replace(KNOWN["sm_90a"], index=0)
STREAM, WORKSPACE, MEMORY = 5, 1 << 40, 1 << 41


def on_device(*arguments: Any, **options: Any) -> tuple[cudnn.pygraph, dict[str, Any]]:
    """As ``declare_graph``, of tensors in device memory."""
    graph, given = declare_graph(*arguments, **options)
    for t in graph._tensors:
        t.attributes.device = None
        t.set_is_pass_by_value(False)
    return graph, given


def to_device(array: Any, index: int) -> Any:
    """An address that says what is there."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    address = int.from_bytes(digest[:5], "little") << 8
    return SimpleNamespace(data=SimpleNamespace(ptr=address), nbytes=0)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """A Hopper GPU; kernels travel as their sources."""
    with pytest.MonkeyPatch.context() as patch:
        driver = install(patch)
        patch.setattr(placement, "default_target", lambda: HOPPER)
        patch.setattr(jit, "compile_kernels", lambda sources, arch, companions=None: [*sources])
        patch.setattr(jit, "remember", lambda source, kernel: None)
        patch.setattr(serial, "write_kernels", lambda them: [[s.name, s.text] for s, _ in them])
        patch.setattr(
            serial,
            "read_kernels",
            lambda them: [(jit.KernelSource(*it), SimpleNamespace(arch="sm_90a")) for it in them],
        )
        for module in (decode, fwd_sm90):
            patch.setattr(module, "drawn_mark", lambda: 0x1235)
        patch.setattr(tables, "to_device", to_device)
        for module in (drivers, sources):
            patch.setattr(module, "declare_graph", on_device)
        yield driver


def launches(driver: Driver, graph: cudnn.pygraph, overrides: dict[str, Any]) -> list[Done]:
    """What one call enqueues, with addresses in the place of tensors."""
    uids = sorted(t.get_uid() for t in graph._tensors if not t.get_is_virtual())
    pack = {uid: MEMORY + (place << 32) for place, uid in enumerate(uids)}
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, STREAM)
    before = len(driver.done)
    if overrides:
        graph.get_workspace_size(**overrides)
    graph.execute(pack, WORKSPACE, handle, **overrides)
    return driver.done[before:]


def compare(driver: Driver, source: Source) -> Source:
    """Fails unless a source's graphs enqueue what those that were declared as such do."""

    def both(case: Case, tensors: Tensors, roles: Roles) -> Ready:
        plain, given, _ = drivers.built(case, tensors, roles)
        graph, _, overrides = source(case, tensors, roles)
        wanted = launches(driver, plain, {})
        assert wanted and launches(driver, graph, overrides) == wanted
        idle = SimpleNamespace(
            get_plan_name_at_index=lambda index: "idle",
            get_workspace_size=lambda **options: 0,
            execute=lambda *arguments, **options: None,
        )
        return idle, given, {}  # type: ignore[return-value]

    return both


def check(driver: Driver, case: Case, source: Source) -> None:
    try:
        run_graph(case, make_tensors(case, Library()), compare(driver, source))
    except cudnn.cudnnGraphNotSupportedError:
        return
    except BaseException:
        print(repr(case))
        raise


@settings(max_examples=100)
@given(case=cases("gpu"))
def test_serialized(driver: Driver, case: Case) -> None:
    """A deserialised graph launches the same kernels, with the very same arguments."""
    check(driver, case, sources.reloaded)


@settings(max_examples=100)
@given(case=cases("gpu"))
def test_overridden(driver: Driver, case: Case) -> None:
    """A graph with other shapes launches what a graph that was declared with them does."""
    # The bounds that ragged backwards are told are numbers, which stay as they were declared.
    check(driver, replace(case, bounded=False), sources.overridden)


def test_what_is_compared(driver: Driver) -> None:
    """The test sees another length, and another plan."""
    case = Case(dtype="float16", seq_q=40, seq_kv=90, head_dim_qk=64, head_dim_v=64, stats=None)
    seen = []
    for it in (case, replace(case, seq_kv=91), replace(case, seq_q=1)):
        tensors = make_tensors(it, Library())
        graph, _, _ = drivers.built(it, tensors, Roles(("q", "k", "v"), ("o",), ()))
        seen.append(launches(driver, graph, {}))
    assert seen[0] != seen[1] != seen[2] != seen[0]
