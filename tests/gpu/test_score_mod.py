"""Functions of scores on a GPU, against the oracle."""

from __future__ import annotations

import pytest

from tests.drivers import check, gpu_library, run_graph
from tests.score_mod_examples import assert_gradients_are_as_given, examples

pytestmark = pytest.mark.gpu

EXAMPLES = {dtype: examples(dtype) for dtype in ("bfloat16", "float16")}


@pytest.mark.parametrize("dtype", EXAMPLES)
@pytest.mark.parametrize("name", EXAMPLES["bfloat16"])
def test_example(name: str, dtype: str) -> None:
    """Every function is right with everything that it may meet, in every kernel."""
    check(EXAMPLES[dtype][name], gpu_library(), run_graph)


def test_gradients_are_as_given() -> None:
    """See :func:`tests.score_mod_examples.assert_gradients_are_as_given`."""
    assert_gradients_are_as_given(gpu_library(), "half")
