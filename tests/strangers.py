"""Objects that have one exchange protocol and nothing else, and calls that take nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import dlattn
from dlattn.flash import mha_fwd
from tests.unit.producers import Producer


class ByInterface:
    """Memory of NumPy or CuPy behind an array interface.

    Args:
        stream: the handle of the stream that writes it last, as the CUDA interface may say.
    """

    def __new__(cls, array: Any, stream: int | None = None) -> Any:
        name = (
            "__array_interface__" if isinstance(array, np.ndarray) else "__cuda_array_interface__"
        )
        interface = dict(getattr(array, name))
        if stream is not None:
            interface["stream"] = stream
        return object.__new__(type("ByInterface", (), {name: interface, "owner": array}))


#: What wraps an array, by the protocol that is left.
WRAPPERS: dict[str, Callable[[Any], Any]] = {"an array interface": ByInterface, "DLPack": Producer}


def check_calls(xp: Any, wrap: Callable[[Any], Any], dtype: Any, tolerance: float) -> None:
    """Fails unless functions and graphs take an array library's memory behind a protocol as they
    take its arrays, also to write to, and give its arrays."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return xp.asarray(rng.standard_normal(shape), dtype)

    def same(found: Any, wanted: Any) -> None:
        assert type(found) is xp.ndarray and found.dtype == wanted.dtype
        assert abs(found.astype(np.float32) - wanted.astype(np.float32)).max() <= tolerance

    q, dout = random(2, 40, 4, 64), random(2, 40, 4, 64)
    k, v = random(2, 50, 2, 64), random(2, 50, 2, 64)
    tensors = (q, k, v)
    more = {"bias": random(4, 40, 50), "sinks": xp.asarray(rng.standard_normal(4), np.float32)}
    lengths = xp.asarray([50, 30], np.int32)
    options = {"causal": True, "return_lse": True, "lengths": (None, lengths), **more}
    wrapped = {**options, **{name: wrap(x) for name, x in more.items()}}
    wrapped["lengths"] = (None, wrap(lengths))
    wanted = dlattn.attention(*tensors, **options)
    for one, other in zip(dlattn.attention(*map(wrap, tensors), **wrapped), wanted, strict=True):
        same(one, other)
    memory = xp.zeros_like(q)
    given = wrap(memory)
    out, lse = dlattn.attention(*map(wrap, tensors), **wrapped, out=given)
    assert out is given
    same(memory, wanted[0])
    options.pop("return_lse"), wrapped.pop("return_lse")
    dq = xp.zeros_like(q)
    gradients = dlattn.attention_backward(dout, *tensors, *wanted, **options)
    found = dlattn.attention_backward(*map(wrap, (dout, *tensors, *wanted)), **wrapped, dq=wrap(dq))
    for one, other in zip((dq, *found[1:3]), gradients, strict=False):
        same(one, other)
    dlattn.attention(wrap(q), *(wrap(x[:, :0]) for x in (k, v)), out=given)
    assert (memory == 0).all()
    same(mha_fwd(*map(wrap, tensors))[0], mha_fwd(*tensors)[0])
