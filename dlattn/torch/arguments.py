"""What every way through autograd passes on: tensors first, then options that can be hashed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlattn.calls.arguments import flag, integer, number
from dlattn.errors import InvalidArgumentError
from dlattn.one_call import backward as backward_pass
from dlattn.one_call import forward as forward_pass
from dlattn.one_call.arguments import check_words, pair
from dlattn.torch.rows import empty_as, movable


class Tensors(NamedTuple):
    """The tensors of :func:`dlattn.attention`, of which all but three may be ``None``.

    Attributes:
        state: seed and offset of the dropout, (2,), int64.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    block_table: Tensor | None = None
    state: Tensor | None = None

    @property
    def all(self) -> tuple[Any, ...]:
        """As :data:`dlattn.one_call.arguments.TENSORS`."""
        state = self.state
        return (*self[:-1], *((None, None) if state is None else (state[:1], state[1:])))


class Options(NamedTuple):
    """What else it takes, as PyTorch's schemas can say it.

    Attributes:
        words: see :data:`dlattn.calls.arguments.SAID`.
    """

    layout: str
    causal: bool
    left: int | None
    right: int | None
    alignment: str
    scale: float | None
    softcap: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    dropout_p: float
    shared_lengths: bool
    shared_cu_seqlens: bool
    words: str = "dlattn"


#: Two integers, of which either may be missing.
Pair = tuple[int | None, int | None]
NEITHER: Pair = (None, None)


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of options, which most programs give again and again."""
    known = lru_cache(maxsize=1024)(function)

    @wraps(function)
    def call(*given: Any) -> Any:
        if torch.compiler.is_compiling():  # which sees through functions, but not into caches
            return function(*given)
        try:
            return known(*given)
        except TypeError:  # they cannot be hashed: something is wrong with them
            return function(*given)

    return call


@_remembered
def options_of(
    layout: str,
    causal: bool,
    window: Pair | None,
    alignment: str,
    scale: float | None,
    softcap: float | None,
    max_seqlens: Pair | None,
    dropout_p: float,
    shared_lengths: bool = False,
    shared_cu_seqlens: bool = False,
    words: str = "dlattn",
) -> Options:
    """From the words of :func:`dlattn.attention`.

    Args:
        causal, window, scale, softcap, max_seqlens: as :func:`truth`, :func:`bounds` and
            :func:`real` give them: what is remembered of a number is of all that equal it, such as
            of 4 and 4.0.

    Raises:
        InvalidArgumentError: the layout or the alignment means nothing.
    """
    check_words(layout, alignment)
    return Options(
        layout, causal, *(window or NEITHER), alignment, scale, softcap, *(max_seqlens or NEITHER),
        dropout_p, shared_lengths, shared_cu_seqlens, words,
    )  # fmt: skip


@_remembered
def words(options: Options, *more: bool) -> tuple[Any, ...]:
    """As :class:`dlattn.one_call.arguments.Options`, and what follows them."""
    layout, causal, left, right, alignment, scale, softcap, most_q, most_kv, p, *last = options
    window, most, (*shared, said) = (left, right), (most_q, most_kv), last
    return layout, causal, window, alignment, scale, softcap, most, p, tuple(shared), said, *more


#: How many tensors there are.
COUNT = len(Tensors._fields)


def forward(
    tensors: Tensors, options: Options, out: Tensor | None = None, return_lse: bool = True
) -> Any:
    """The output and the log-sum-exp; in memory of its own, also rows of no sequence are 0."""
    if options.layout == "thd" and out is None:
        # Where nothing is written, there may be NaN, which a gradient of 0 would not take away.
        out = empty_as(tensors.q, tensors.v.shape[-1]).zero_()
    return forward_pass.run((*tensors.all, out), words(options, return_lse))


def backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    tensors: Tensors,
    options: Options,
    wanted: tuple[bool, bool],
    deterministic: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, the bias and the sinks.

    Args:
        wanted: of the bias, and of the sinks; without, theirs is ``None``.
    """
    q, k, v, *others = tensors.all
    dlse = None if dlse is None else dlse.resolve_neg()
    given = (q, k, v, out, lse, movable(dout), *others, dlse, None, None, None)
    return backward_pass.run(given, words(options, *wanted, deterministic))


def bounds(window: Any) -> Pair:
    """How far a query sees to the left and to the right.

    Raises:
        InvalidArgumentError: it is no pair of integers.
    """
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgumentError(
            f"window: expected a pair (left, right), or None, got {window!r:.100}."
        )
    left, right = window
    return _whole("window", left), _whole("window", right)


def longest(max_seqlens: Any) -> Pair:
    """Of q, and of k and v.

    Raises:
        InvalidArgumentError: they are no integers.
    """
    of_q, of_kv = pair(max_seqlens)
    return _whole("max_seqlens", of_q), _whole("max_seqlens", of_kv)


def _whole(name: str, value: Any) -> Any:
    if value is None or type(value) is int or isinstance(value, torch.SymInt):
        return value
    return integer(name, value)


def truth(name: str, value: Any) -> Any:
    """A flag, which may be a symbol while PyTorch traces.

    Raises:
        InvalidArgumentError: it is neither true nor false.
    """
    return value if isinstance(value, torch.SymBool) else flag(name, value)


def real(name: str, value: Any) -> Any:
    """A number, which may be a symbol while PyTorch traces; ``None`` stays it.

    Raises:
        InvalidArgumentError: it is no number.
    """
    is_symbol = value is None or isinstance(value, (torch.SymFloat, torch.SymInt))
    return value if is_symbol else number(name, value)


def expect_tensors(**given: Any) -> None:
    """Refuse what is not torch's, and not ``None``.

    Raises:
        InvalidArgumentError: one is a tensor of another framework, or none at all.
    """
    for name, it in given.items():
        if it is not None and not isinstance(it, Tensor):
            raise InvalidArgumentError(
                f"{name}: expected a torch.Tensor, got a {type(it).__module__}."
                f"{type(it).__qualname__}; convert it, such as by torch.from_dlpack, or call "
                "dlattn.attention, which takes tensors of every framework."
            )


def check_heads(of_query: int, of_key: int, of_value: int, enable_gqa: bool) -> None:
    """Refuse heads of query that share those of key and value where that is not said.

    Raises:
        InvalidArgumentError: they do.
    """
    if not (enable_gqa or (of_key in (of_query, 1) and of_value in (of_query, 1))):
        raise InvalidArgumentError(
            f"key, value: expected the {of_query} heads of query, got {of_key} and {of_value}; "
            "give enable_gqa=True if query heads share them."
        )


def probability(value: Any) -> Any:
    """``dropout_p``, which may be a symbol while PyTorch traces.

    Raises:
        InvalidArgumentError: it is no number.
    """
    return value if isinstance(value, torch.SymFloat) else number("dropout_p", value)


def split(given: tuple[Any, ...]) -> tuple[Tensors, Options, tuple[Any, ...]]:
    """Arguments one after the other, and those that follow the options."""
    end = COUNT + len(Options._fields)
    return Tensors(*given[:COUNT]), Options(*given[COUNT:end]), given[end:]
