"""The kernels' argument: where the addresses of a problem's tensors go."""

from __future__ import annotations

import ctypes

from hypothesis import given

from dlattn.plans.params import address_slot, params_for
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import geometry_of
from tests.libraries import Library
from tests.strategies import cases


@given(cases())
def test_each_tensor_has_a_place_of_its_own(case: Case) -> None:
    """Whatever tensors a call has, no two addresses go to one place, and none beside the struct."""
    geometry = geometry_of(case, make_tensors(case, Library()))
    params = params_for(geometry)
    first, size = ctypes.addressof(params), ctypes.sizeof(params)
    places = [
        ctypes.addressof(address_slot(params, geometry, role)) - first
        for role, spec in geometry.tensors.items()
        if not spec.by_value
    ]
    assert len(set(places)) == len(places)
    assert all(0 <= place <= size - 8 for place in places)
