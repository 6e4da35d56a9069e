"""The kernels' argument: where the addresses of a problem's tensors go."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.argument import Divisor
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.params import address_slot, few_terms, params_for
from dlattn.problem import Direction, Geometry, Padding, Problem, Scale, TensorSpec
from dlattn.runtime.target import KNOWN
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


@given(cases())
def test_numbers_are_those_of_the_geometry(case: Case) -> None:
    """Each in its own field: sizes, groups of heads, bounds, strides; without a GPU, nothing else
    would see another's."""
    geometry = geometry_of(case, make_tensors(case, Library()))
    params = params_for(geometry)
    sizes = (case.batch, case.heads_q, case.seq_q, case.seq_kv)
    assert (params.batch, params.heads_q, params.seq_q, params.seq_kv) == sizes
    groups = (case.heads_q // case.heads_k, case.heads_q // case.heads_v)
    assert (params.heads_per_k.number, params.heads_per_v.number) == groups
    bounds = case.left or 0, case.right or 0
    if None not in (case.left, case.right) and sum(bounds) <= 0:  # without a key, whatever they are
        bounds = -4096, -4096
    assert (params.band_left, params.band_right, params.bottom_right) == (
        *bounds,
        case.bottom_right,
    )
    assert params.attn_scale == np.float32(case.scale_value)
    assert params.softcap == np.float32(case.softcap or 0)
    for role in ("q", "k", "v", "o", "dO", "dQ", "dK", "dV"):
        ref, (batch, head, row, _) = getattr(params, role), geometry.tensors[role].stride
        assert (ref.batch, ref.head, ref.row) == (batch, head, row), role


def test_addresses_begin_where_plans_say() -> None:
    """Maps of ragged tensors begin before them, parts of a tensor behind: what is added to an
    address is, in a call whose roles are known and in one that names them."""
    like = TensorSpec("x", (1, 1, 64, 64), (4096, 4096, 64, 1), data_type.HALF)
    geometry = Geometry(dict.fromkeys("qkvo", like))
    problem = Problem(Direction.FORWARD, data_type.HALF, 64, 64, (Scale(),), (Padding(),))
    plan = FwdSm80(problem, geometry, KNOWN["sm_90a"])
    plan._operations, field = [], ctypes.c_uint64()
    plan._slots.append(("k", field, -256))
    plan.bind({role: (at, 32) for at, role in enumerate("qkvo")})([4096, 8192, 12288, 16384], 0, 0)
    assert (plan._params.q.data, plan._params.k.data, field.value) == (4128, 8224, 8224 - 256)
    plan.execute(dict(zip("qkvo", (4096, 65536, 12288, 16384), strict=True)), 0, 0)
    assert (plan._params.q.data, plan._params.k.data, field.value) == (4096, 65536, 65536 - 256)


@given(exponent=st.floats(-20, 10), sign=st.sampled_from((-1, 1)))
def test_a_short_series_is_the_hyperbolic_tangent(exponent: float, sign: int) -> None:
    """In float32, as kernels compute it, wherever its variable has the one exponent that they look
    at; and it is of use: up to a fifth of the cap."""
    slope = sign * 2.0**exponent
    terms, below = few_terms(slope)
    assert np.log2(below) % 1 == 0
    reach = np.sqrt(below) * abs(slope)
    assert 0.19 < reach <= 0.27
    x = np.linspace(-0.9999, 0.9999, 2000, dtype=np.float32) * np.float32(np.sqrt(below))
    variable = np.float32(x.astype(float) ** 2 + below)
    assert (np.frexp(variable)[1] == np.frexp(np.float32(below))[1]).all()
    low, middle, high = map(np.float32, terms)
    inner = np.float32(high.astype(float) * variable + middle)
    ratio = inner.astype(float) * variable + low
    angle = x.astype(float) * slope
    np.testing.assert_allclose(np.float32(ratio) * angle, np.tanh(angle), rtol=2.0**-20.3)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_divisor_divides(number: int, other: int) -> None:
    """A factor of 32 bits and a shift give the quotient of every number below 2**31, as the kernels
    compute it (``cuda_src/base/divisor.cuh``); so do multiples and their neighbours, where a
    rounded factor would be off first."""
    divisor = Divisor.of(number)
    assert (divisor.number, 0 <= divisor.factor < 2**32, divisor.shift < 64) == (number, True, True)
    multiple = other // number * number
    for of in (other, multiple, max(0, multiple - 1), 2**31 - 1):
        assert of * divisor.factor >> divisor.shift == of // number


@given(
    rows=st.tuples(st.integers(1, 600), st.integers(1, 600)), left=st.integers(-300, 300),
    right=st.integers(-300, 300), shift=st.integers(-600, 600),
    tiles=st.sampled_from([(64, 64), (64, 128), (128, 128)]),
)  # fmt: skip
def test_tiles_of_keys_and_of_queries_agree_who_sees_whom(
    rows: tuple[int, int], left: int, right: int, shift: int, tiles: tuple[int, int]
) -> None:
    """A backward counts tiles of keys that add to a tile of queries (``keys`` of a ``Band``), and
    items visit those that are left them (``queries``): also where no query has a key."""
    dims = {"q": (1, 1, rows[0], 8), "k": (1, 1, rows[1], 8), "v": (1, 1, rows[1], 8)}
    tensors = {
        role: TensorSpec(role, dim, (0, 0, 8, 1), data_type.HALF) for role, dim in dims.items()
    }
    params = params_for(Geometry(tensors, band_left=left, band_right=right))
    left, right = params.band_left, params.band_right

    def seen(first: int, of: int, other: int) -> range:
        """Tiles of the other side that meet positions from ``first`` on."""
        return range(max(0, first) // other, -(-of // other)) if max(0, first) < of else range(0)

    visited, counted = set(), set()
    for tile in range(-(-rows[1] // tiles[1])):
        first, last = tile * tiles[1], min((tile + 1) * tiles[1], rows[1])
        queries = seen(first - shift - right, min(rows[0], last - 1 - shift + left), tiles[0])
        visited |= {(other, tile) for other in queries}
    for tile in range(-(-rows[0] // tiles[0])):
        first, last = tile * tiles[0], min((tile + 1) * tiles[0], rows[0])
        keys = seen(first + shift - left + 1, min(rows[1], last + shift + right), tiles[1])
        counted |= {(tile, other) for other in keys}
    assert visited == counted
