"""Score programs that kernels are compiled with: what a graph makes of ``score_mod``."""

from __future__ import annotations

from functools import cache

import dlattn as cudnn
from dlattn.problem import Direction, Edit, Problem, ScoreGradient, ScoreProgram
from tests.cases import Case
from tests.score_mods import TENSORS, callback

_CAP = ("mul", ("tanh", ("mul", "s", 0.05)), "factor")
_SAME = ("cmp_eq", "documents_q", "documents_k")
_NEAR = ("binary_select", "s", ("mul", "s", 0.5), ("cmp_lt", ("abs", ("sub", "row", "col")), 64))

#: A cap; documents; documents and a table that masks; a table that is added; activations,
#: positions, slopes and rows together; a table that is added where another tensor does not mask.
MODS = {
    "capped": (_CAP, None),
    "documents": ("s", _SAME),
    "marked": ("s", ("logical_and", _SAME, ("cmp_lt", "table", 0.5))),
    "table": (("add", "s", "table"), None),
    "bent": (("add", ("sigmoid", _NEAR), ("mul", "slopes", ("sub", "col", "row"))), _SAME),
    "masked": (("add", "s", "table"), "marks"),
}


def program(name: str, direction: Direction) -> ScoreProgram:
    """What is left of a function when it is recognised."""
    return _program_of(_problem(name, direction))


def with_gradients(name: str) -> tuple[tuple[Edit, ...], tuple[ScoreGradient, ...]]:
    """What a function is in a backward that writes the gradients of all floats that it reads, and
    those."""
    problem = _problem(name, Direction.BACKWARD, gradients=True)
    return problem.edits[1:], problem.score_gradients


def _program_of(problem: Problem) -> ScoreProgram:
    (found,) = (edit for edit in problem.edits if isinstance(edit, ScoreProgram))
    return found


@cache
def _problem(name: str, direction: Direction, gradients: bool = False) -> Problem:
    mod = MODS[name]
    case = Case(batch=2, heads_q=4, heads_k=4, heads_v=4, seq_q=300, seq_kv=300, score_mod=mod)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16, handle=cudnn.create_handle(device="cpu")
    )
    dims = case.dims()
    tensors = {
        key: graph.tensor(
            dim,
            data_type=getattr(cudnn.data_type, _TYPES[TENSORS[key][1]]),
            is_pass_by_value=not TENSORS[key][0],
        )
        for key, dim in case.mod_dims().items()
    }
    q, k, v, o, d_o, stats = (
        graph.tensor(dims[role], data_type=cudnn.data_type.FLOAT if role == "stats" else None)
        for role in ("q", "k", "v", "o", "dO", "stats")
    )
    score_mod = callback(mod, tensors)
    if direction is Direction.FORWARD:
        made = graph.sdpa(q, k, v, generate_stats=False, score_mod=score_mod)[:1]
    else:
        floats = [t for key, t in tensors.items() if "float" in TENSORS[key][1]]
        made = graph.sdpa_backward(
            q, k, v, o, d_o, stats,
            score_mod=score_mod, score_mod_gradients=floats if gradients else None,
        )  # fmt: skip
    for t in made:
        t.set_output(True)
    problem = graph.lowered.problem
    assert isinstance(problem, Problem)
    return problem


_TYPES = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16", "int32": "INT32",
    "int64": "INT64", "bool": "BOOLEAN",
}  # fmt: skip
