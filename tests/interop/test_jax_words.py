"""Errors of ``dot_product_attention`` name the arguments that it has."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.jax import attention, dot_product_attention  # noqa: E402


def x(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


Q = x(2, 5, 4, 8)

#: Arguments, and what is said of them.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mask's shape": ({"mask": x(3, 5, dtype=bool)}, "mask: expected a shape that"),
    "mask's rank": ({"mask": x(1, 1, 1, 5, 5, dtype=bool)}, "mask: expected a shape that"),
    "mask's shape beside a bias": (
        {"mask": x(3, 5, 5, dtype=bool), "bias": x(5, 5)}, "mask: expected a shape that",
    ),
    "type": ({"query": x(2, 5, 4, 8, dtype=np.int32)}, "query: expected elements"),
    "types": ({"key": x(2, 5, 4, 8, dtype=np.float16)}, "key: .* FLOAT, as query has"),
    "dimensions": ({"query": x(5, 8)}, "query: expected shape"),
    "columns": ({"key": x(2, 5, 4, 9)}, "key: expected shape .* as of query, got"),
    "rows": ({"value": x(2, 6, 4, 8)}, "value: expected shape .* as of key, got"),
    "heads": ({"key": x(2, 5, 3, 8), "value": x(2, 5, 3, 8)}, "key: .* the 4 of query, got 3"),
    "lengths": ({"query_seq_lengths": x(3, dtype=np.int32)}, "query_seq_lengths: expected shape"),
    "lengths of keys": (
        {"key_value_seq_lengths": x(2)}, "key_value_seq_lengths: expected elements",
    ),
    "a window": ({"local_window_size": (1.5, 2)}, "local_window_size: expected an integer"),
    "a window's sign": ({"local_window_size": (-3, 2)}, "local_window_size: expected 0 or more"),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_arguments_have_their_names(name: str, compiled: bool) -> None:
    """What is wrong with an argument is said of the name that it has here; and nothing of names
    that it has elsewhere."""
    wrong, said = WRONG[name]
    given = {"query": Q, "key": Q, "value": Q, **wrong}
    window = {n: given.pop(n) for n in ("local_window_size",) if n in given}

    def run(given: Any) -> Any:
        return dot_product_attention(**given, **window)

    call = jax.jit(run) if compiled else run
    with pytest.raises(InvalidArgumentError, match=f"^{said}") as caught:
        call(given)
    words = re.sub(r"\([^()]*\)", "", str(caught.value))
    assert not re.search(r"\b(q|k|v|bias|window|lengths)\b", words), words


def test_attention_has_its_own() -> None:
    """The same call by other words is refused in those, before and after."""
    half = Q.astype(np.float16)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"^k: expected elements of .* as q has"):
            attention(Q, half, Q)
        with pytest.raises(InvalidArgumentError, match=r"^key: expected .* as query has"):
            dot_product_attention(Q, half, Q)
        with pytest.raises(InvalidArgumentError, match=r"^bias: expected a shape"):
            attention(Q, Q, Q, bias=x(3, 5))
