"""Other ways to run a case by graphs: those that were bytes, those declared for other sizes,
and those of one family of kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import dlattn as cudnn
from dlattn.problem import offset_role
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import Ready, Roles, Tensors, built, declare_graph, run_graph


def reloaded(case: Case, tensors: Tensors, roles: Roles) -> Ready:
    """The graph of a case, which was bytes."""
    graph, given, _ = built(case, tensors, roles)
    other = cudnn.pygraph()
    other.deserialize(graph.serialize())
    assert other.key() == graph.key()
    return other, given, {}


def overridden(case: Case, tensors: Tensors, roles: Roles) -> Ready:
    """The graph of a case like this one, of other sizes, and the sizes of this one."""
    other = replace(case, seq_q=case.seq_q + 3)
    paged = case.page_k is not None or case.page_v is not None
    if not paged and (case.len_q, case.len_kv, case.ragged) == (None, None, ()):
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


def run_by_engine(engine: str, case: Case, tensors: Tensors) -> None:
    """As :func:`run_graph`, by the kernels of a family where it has some for the graph."""
    run_graph(case, tensors, partial(_built_by, engine))


def _built_by(engine: str, case: Case, tensors: Tensors, roles: Roles) -> Ready:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLATTN_ENGINE", engine)
        try:
            return built(case, tensors, roles)
        except cudnn.cudnnGraphNotSupportedError as refusal:
            if "DLATTN_ENGINE" not in str(refusal):
                raise
    return built(case, tensors, roles)
