"""Merging partial states on a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.drivers import gpu_library
from tests.states import States, check_states
from tests.strategies import states

pytestmark = pytest.mark.gpu


@settings(settings.get_profile("gpu"))
@given(states())
def test_random(case: States) -> None:
    """The union of states is that of the definition in float64."""
    check_states(case, gpu_library())


def test_many_rows() -> None:
    """More batch entries than a grid has blocks for, and many tokens."""
    check_states(States(lead=(70000,), heads=1, tokens=2, head_dim=8), gpu_library())
    check_states(States(lead=(2,), heads=8, tokens=3000, head_dim=128), gpu_library())
