"""Other ways to run a case by graphs: those that were bytes, those declared for other sizes,
and those of one family of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import dlattn as cudnn
from dlattn.problem import offset_role
from dlattn.problem.problem import SCALAR_ROLES
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import Ready, Roles, Tensors, built, declare_graph, passes, run_graph
from tests.libraries import Library


def reloaded(case: Case, tensors: Tensors, roles: Roles) -> Ready:
    """The graph of a case, which was bytes."""
    graph, given, _ = built(case, tensors, roles)
    other = cudnn.pygraph()
    other.deserialize(graph.serialize())
    assert other.key() == graph.key()
    return other, given, {}


def overridden(
    case: Case, tensors: Tensors, roles: Roles, sizes: Mapping[str, Any] | None = None
) -> Ready:
    """The graph of a case like this one, of other sizes, or of these, and the sizes of this one."""
    other = replace(case, **{"seq_q": case.seq_q + 3} if sizes is None else sizes)
    paged = case.page_k is not None or case.page_v is not None
    lengths = case.len_q, case.len_kv, case.ragged
    if sizes is None and not paged and lengths == (None, None, ()):
        other = replace(other, batch=case.batch + 1, seq_kv=case.seq_kv + 5)
    declared = make_tensors(other, tensors["q"].library)
    graph, given = declare_graph(other, declared, roles, is_override_shape_enabled=True)
    graph.build()
    known = {role: t for role, t in given.items() if isinstance(t, cudnn.tensor)}
    for role, t in [*known.items()]:
        if offset_role(role) in tensors:
            known[offset_role(role)] = t.attributes.ragged_offset
    specs = [tensors[role].spec for role in known]
    overrides = {
        "override_uids": [t.get_uid() for t in known.values()],
        "override_shapes": [spec.dim for spec in specs],
        "override_strides": [spec.stride for spec in specs],
    }
    return graph, given, overrides


def run_serialized(case: Case, tensors: Tensors) -> None:
    """As :func:`run_graph`, by graphs that were bytes."""
    run_graph(case, tensors, reloaded)


def run_overridden(case: Case, tensors: Tensors) -> None:
    """As :func:`run_graph`, by graphs that were declared for other sizes."""
    run_graph(case, tensors, overridden)


def run_overridden_from(sizes: Mapping[str, Any], case: Case, tensors: Tensors) -> None:
    """The same, by graphs declared for these."""
    run_graph(case, tensors, partial(overridden, sizes=sizes))


def run_by_engine(engine: str, case: Case, tensors: Tensors) -> None:
    """As :func:`run_graph`, by the kernels of a family where it has some for the graph: how often
    it has, tests/unit/test_engines.py says."""
    run_graph(case, tensors, partial(_built_by, engine))


def _built_by(engine: str, case: Case, tensors: Tensors, roles: Roles) -> Ready:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLATTN_ENGINE", engine)
        try:
            ready = built(case, tensors, roles)
        except cudnn.cudnnGraphNotSupportedError as refusal:
            if "DLATTN_ENGINE" not in str(refusal):
                raise
        else:
            assert ready[0].get_plan_name_at_index(0).endswith(engine)
            return ready
    return built(case, tensors, roles)


def taken(engine: str, case: Case) -> list[bool]:
    """Of the forward and, if there is one, of the backward of a case: whether a family of kernels
    takes it on Hopper. Without a GPU, and without compiling."""
    tensors = make_tensors(case, Library())
    return [_takes(engine, case, tensors, roles) for roles in passes(case, tensors)]


def _takes(engine: str, case: Case, tensors: Tensors, roles: Roles) -> bool:
    graph, given = declare_graph(case, tensors, roles, sm_version=90)
    for t in graph._tensors:
        # As if they were on a device, where none but numbers are passed by value.
        t.attributes.device = None
    for role, t in given.items():
        if isinstance(t, cudnn.tensor) and role not in SCALAR_ROLES:
            t.set_is_pass_by_value(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLATTN_ENGINE", engine)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
        except cudnn.cudnnGraphNotSupportedError as refusal:
            assert f"_{engine}: " in str(refusal)
            return False
    return graph.get_plan_name_at_index(0).endswith(engine)
