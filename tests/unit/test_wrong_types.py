"""Every argument of every public function, given what is of no use there: the answer is a sentence
that names it, and no error from inside."""

from __future__ import annotations

import linecache
import re
from typing import Any

import numpy as np
import pytest

from dlattn.errors import DlattnError
from tests.good_calls import GOOD
from tests.surface import surface


class Stranger:
    """What no function has a use for."""


WRONG: dict[str, Any] = {
    "None": None,
    "a text": "text",
    "a number": 2.5,
    "a list": [None],
    "a dict": {"a": 1},
    "an array": np.zeros((2, 3), np.float16),
    "an array of objects": np.array([None, "x"]),
    "a stranger": Stranger(),
}

#: Functions that pass all of their arguments on to another one, or run the same code.
PASSED_ON = (
    r"scaled_dot_product_flash_attention(_backward)?$",
    r"dlattn\.Graph\.(?!set_io_tuples)",
)

#: Arguments that may be anything, and why.
UNREAD = {
    "dlattn.flash.mha_fwd": {"num_splits", "pack_gqa"},  # hints, which change no result
    "dlattn.flash.mha_varlen_fwd": {"num_splits", "pack_gqa"},
    "dlattn.flash.mha_bwd": {"philox_offset"},  # the seed has both
    "dlattn.flash.mha_varlen_bwd": {"philox_offset"},
    "dlattn.jax.dot_product_attention": {"implementation"},  # as it says
    # Looked at when the graph is lowered.
    "dlattn.pygraph": {"sm_count", "sm_version", "device_property"},
    # Of no bytes, which these graphs need.
    "dlattn.pygraph.execute": {"workspace"},
    "dlattn.pygraph.execute_plan_at_index": {"workspace"},
    "dlattn.pygraph.autotune": {"workspace"},
    # Of the CPU, which has no CUDA graphs.
    "dlattn.pygraph.populate_cuda_graph": {"workspace", "cuda_graph"},
    "dlattn.pygraph.update_cuda_graph": {"workspace", "cuda_graph"},
}

#: What needs a GPU, or another library; its right call may fail here.
NOT_HERE = (
    "dlattn.pygraph.populate_cuda_graph",
    "dlattn.pygraph.update_cuda_graph",
    "dlattn.torch.register_transformers",
)

#: What messages call an argument besides its name.
SAID = {
    "query": "q",
    "key": "k",
    "value": "v|tensor_scalar",
    "attn_mask": "bias",
    "block_table_": "num_blocks",
    "is_causal": "causal",
    "variant_pack": "variant pack",
    "local_window_size": "window",
    "query_seq_lengths": "lengths of q",
    "key_value_seq_lengths": "lengths of k and v",
    "handle": "Handle|CUDA graph",
    "source": "tensor_like",
    "args": "deserialize|data|text",
    "engine_id": "engine",
    "index": "plan",
    "device": "device",
    "dlse": "lse",
    "stream": "stream",
    "inputs": "tensor of this graph",
    "outputs": "tensor of this graph",
}


def entries() -> dict[str, Any]:
    """The public functions with arguments; of several names of one, the first."""
    found: dict[str, Any] = {}
    homes = set()
    for entry in surface():
        passed = any(re.search(pattern, entry.name) for pattern in PASSED_ON)
        if entry.parameters and not passed and entry.home not in homes:
            found[entry.name] = entry
            homes.add(entry.home)
    return found


def test_every_function_has_a_call() -> None:
    """Of each public function with arguments there is a call, and of nothing else."""
    assert entries().keys() == GOOD.keys()


@pytest.mark.parametrize("name", GOOD)
def test_wrong_types(name: str) -> None:
    """An argument of a wrong type is refused in words, or it is of a type that is taken; what
    nothing has a use for is refused wherever it is read."""
    for package in ("torch", "jax"):
        if name.startswith(f"dlattn.{package}."):
            pytest.importorskip(package)
    function, given = GOOD[name]()
    if name not in NOT_HERE:
        function(**given)
    failed = []
    for argument in given:
        for kind, value in WRONG.items():
            function, given = GOOD[name]()
            problem = _answer(name, function, {**given, argument: value}, argument, kind)
            if problem:
                failed.append(f"{argument} = {kind}: {problem}")
    assert not failed, "\n".join(failed)


def _answer(name: str, function: Any, given: dict[str, Any], argument: str, kind: str) -> str:
    """What is wrong with the answer, or nothing."""
    try:
        function(**given)
    except ImportError:
        return "" if name in NOT_HERE else "a library is missing"
    except Exception as error:
        if not isinstance(error, DlattnError) and not _is_raised_by_dlattn(error):
            return f"{type(error).__name__} from inside: {error}"
        if argument in UNREAD.get(name, ()) or "element type" in str(error):
            return ""
        names = f"{re.escape(argument.strip('_'))}|{SAID.get(argument, argument)}"
        return "" if re.search(names, str(error)) else f"not named: {error}"
    if kind == "a stranger" and argument not in UNREAD.get(name, ()):
        return "taken"
    return ""


def _is_raised_by_dlattn(error: BaseException) -> bool:
    """By a ``raise`` in one of its files, and not by what that calls."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    assert where is not None
    file = where.tb_frame.f_code.co_filename
    line = linecache.getline(file, where.tb_lineno)
    return "/dlattn/" in file.replace("\\", "/") and line.strip().startswith("raise")
