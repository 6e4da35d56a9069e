"""``replace_sdpa``: dlattn in the place of PyTorch's attention, in models as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.overrides import has_torch_function

from dlattn.calls.arguments import flag
from dlattn.errors import DlattnError
from dlattn.runtime.log import log
from dlattn.torch.causal import is_causal_bias
from dlattn.torch.sdpa import scaled_dot_product_attention

#: What the blocks that are open have put there, the latest last: those of threads end in any order.
_open: list[Any] = []
_lock = Lock()


@contextmanager
def replace_sdpa(*, fall_back: bool = True) -> Iterator[None]:
    """``with replace_sdpa():``, ``torch.nn.functional.scaled_dot_product_attention`` is dlattn's.

    Models that call it by that name, as ``torch.nn.MultiheadAttention`` does in training and
    ``transformers`` with ``attn_implementation="sdpa"``, run on dlattn without a change. For the
    whole process, and all its threads, until the block ends. Tensors of classes with a
    ``__torch_function__`` of their own get what that makes of PyTorch's function. What
    ``torch.compile`` makes of PyTorch's own layers keeps the attention of its first call, as the
    compiler takes for granted that nobody replaces it: run a model always inside, or always
    outside.

    Args:
        fall_back: what dlattn cannot run (fp32 on a GPU, say, or forward-mode derivatives) goes to
            PyTorch, with the reason in dlattn's log; else it raises. Under ``torch.compile`` only
            the element type decides; what else dlattn cannot run raises when the graph runs.

    Raises:
        InvalidArgumentError: ``fall_back`` is neither true nor false.
    """
    fall_back = flag("fall_back", fall_back)
    functional = torch.nn.functional
    with _lock:
        own = functional.scaled_dot_product_attention
        own = own.__wrapped__ if own in _open else own

    @functools.wraps(own)
    def replaced(*given: Any, **named: Any) -> Any:
        tensors = given[:4] if not named else (*given[:4], *named.values())
        if has_torch_function(tensors) and any(map(_is_overridden, tensors)):
            return own(*given, **named)  # which asks their classes
        if fall_back and torch.compiler.is_compiling() and not _has_kernels(*given, **named):
            return _by_pytorch(own, given, named)
        try:
            return scaled_dot_product_attention(*given, **named)
        except (DlattnError, NotImplementedError) as error:  # the latter of forward mode
            if not fall_back:
                raise
            log(1, f"PyTorch's scaled_dot_product_attention runs instead: {error}")
            return _by_pytorch(own, given, named)

    with _lock:
        _open.append(replaced)
        functional.scaled_dot_product_attention = replaced
    try:
        yield
    finally:
        with _lock:
            _open.remove(replaced)
            functional.scaled_dot_product_attention = _open[-1] if _open else own


def _is_overridden(x: Any) -> bool:
    """Whether it is a tensor of a class that does with PyTorch's functions what it likes."""
    ask = getattr(type(x), "__torch_function__", None)
    own = getattr(ask, "__func__", None)  # of a class that asks for nothing, there is none
    return own not in (None, torch.Tensor.__torch_function__.__func__) and not is_causal_bias(x)


def _by_pytorch(own: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What PyTorch's function gives. A causal bias knows it by its name alone, which is taken."""
    mask = given[3] if len(given) > 3 else named.get("attn_mask")
    if mask is None or not is_causal_bias(mask):
        return own(*given, **named)
    replaced = torch.nn.functional.scaled_dot_product_attention
    return type(mask).__torch_function__(replaced, (), given, named)


def _has_kernels(query: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Whether there are kernels for the element type that a call has, or that autocasting gives."""
    device = query.device.type
    cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if cast else query.dtype
    return device == "cpu" or dtype in (torch.float16, torch.bfloat16)
