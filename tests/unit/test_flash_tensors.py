"""FlashAttention's functions on tensors that have but a protocol, and on what is no tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlattn.errors import InvalidArgumentError
from dlattn.flash import mha_bwd, mha_fwd, mha_varlen_fwd


class ByInterface:
    """An array of a library that nobody knows: no attribute but NumPy's interface."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array


class ByDlpack:
    """The same by DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


BEGINS = np.array([0, 2, 5], np.int32)


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("library", [ByInterface, ByDlpack])
def test_dropout_needs_no_attributes(library: Any) -> None:
    """A tensor that has nothing but a protocol is dropped from as NumPy's array of its memory, by
    the same seed."""
    q, k, v = normal(3, 2, 5, 4, 8)
    wanted = mha_fwd(q, k, v, p_dropout=0.5, gen_=3)
    found = mha_fwd(*map(library, (q, k, v)), p_dropout=0.5, gen_=3)
    assert (found[0] == wanted[0]).all() and (found[5] == wanted[5]).all()
    assert (found[0] != mha_fwd(q, k, v)[0]).any()

    def packed(of: Any) -> Any:
        tensors = *(of(x[0]) for x in (q, k, v)), None, *[of(BEGINS)] * 2
        return mha_varlen_fwd(*tensors, None, None, None, 3, 3, 0.5, gen_=3)[0]

    assert (packed(library) == packed(np.asarray)).all()


@pytest.mark.parametrize("library", [ByInterface, ByDlpack])
def test_what_cannot_be_padded_is_refused(library: Any) -> None:
    """So is a tensor of an unknown library whose head size is no multiple of 8, in words."""
    arrays = normal(3, 2, 5, 4, 5)
    q, k, v = map(library, arrays)
    out, *_, lse, _, _, _ = mha_fwd(*arrays)
    for call in (
        lambda: mha_fwd(q, k, v),
        lambda: mha_bwd(q, q, k, v, out, lse, None, None, None),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{library.__name__} cannot be padded"):
            call()


def test_a_state_of_any_library_is_one() -> None:
    """A state with a shape of its own, not of its type, drops as NumPy's array of its memory."""
    state = np.array([3, 0], np.uint64)
    foreign = ByDlpack(state)
    foreign.shape = state.shape  # type: ignore[attr-defined]
    x = normal(3, 2, 5, 4, 8)
    wanted = mha_fwd(*x, p_dropout=0.5, gen_=state)
    assert (mha_fwd(*x, p_dropout=0.5, gen_=foreign)[0] == wanted[0]).all()


@pytest.mark.parametrize("state", [np.zeros(2, np.complex64), np.array([None]), np.zeros(3)])
def test_the_generator_goes_by_its_name(state: Any) -> None:
    """A state that is none is refused as ``gen_``, which is what the caller has given."""
    q, k, v = normal(3, 2, 5, 4, 8)
    with pytest.raises(InvalidArgumentError, match="^gen_: "):
        mha_fwd(q, k, v, p_dropout=0.5, gen_=state)
    with pytest.raises(InvalidArgumentError, match="^gen_: "):
        mha_varlen_fwd(
            *(x[0] for x in (q, k, v)), None, BEGINS, BEGINS, None, None, None, 3, 3, 0.5,
            gen_=state,
        )  # fmt: skip


def test_a_class_is_no_tensor() -> None:
    """Also where its attributes are asked for."""
    _, k, v = normal(3, 2, 5, 4, 8)
    with pytest.raises(InvalidArgumentError, match="^q: Expected a tensor"):
        mha_fwd(np.ndarray, k, v, p_dropout=0.5)
