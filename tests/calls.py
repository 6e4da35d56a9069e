"""Ways to run a case through functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dlattn
from tests import oracle
from tests.builders import Guarded, check_poison_intact, make_tensors
from tests.cases import Case
from tests.drivers import Tensors
from tests.libraries import Library


@dataclass(frozen=True)
class Called:
    """A case that ``dlattn.attention`` runs."""

    case: Case

    def __repr__(self) -> str:
        return f"Called({self.case!r})"


#: What a call writes, its log-sum-exp included.
WRITTEN = ("o", "stats")

#: Where b, h, s and d are in a case's tensors.
_AXES = {"b": 0, "h": 1, "s": 2, "d": 3}


def check_attention(case: Case, library: Library) -> None:
    """Fails unless ``dlattn.attention`` gives what the case should, and writes nothing else."""
    try:
        tensors = make_tensors(case, library)
        run_attention(case, tensors)
        check_poison_intact(tensors)
        arrays = {role: it.padded() for role, it in tensors.items()}
        oracle.assert_close(case, arrays, {x: arrays[x] for x in WRITTEN if x in arrays})
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{Called(case)!r}"')
        raise


def run_attention(case: Case, tensors: Tensors) -> None:
    """Runs a case in one of the layouts, into memory of its own or of the call's."""
    layout = ("bshd", "bhsd", "sbhd")[case.seed % 3]

    def seen(role: str) -> Any:
        return permuted(tensors[role], layout)

    left, right = case.left, case.right
    dropout = None
    if case.dropout:
        seed, offset = case.philox()
        if case.dropout_as == "device":
            seed, offset = (tensors[f"dropout_{x}"].tensor for x in ("seed", "offset"))
        dropout = (case.dropout, seed, offset)
    lengths = [
        tensors[role].tensor[:, 0, 0, 0] if role in tensors else None
        for role in ("seq_len_q", "seq_len_kv")
    ]
    into = case.seed % 2 == 0
    found = dlattn.attention(
        *(seen(role) for role in "qkv"),
        layout=layout,
        causal=left is None and right == 0,
        window=None if left is None and right == 0 else (None if left is None else left - 1, right),
        alignment="bottom_right" if case.bottom_right else "top_left",
        scale=case.scale_value,
        softcap=case.softcap,
        bias=tensors["bias"].tensor if case.bias else None,
        alibi_slopes=tensors["alibi_slopes"].tensor if case.alibi else None,
        sinks=tensors["sink_token"].tensor[0, :, 0, 0] if case.sink is not None else None,
        lengths=tuple(lengths) if case.length_tensors() else None,
        dropout=dropout,
        return_lse=case.stats is not None,
        out=seen("o") if into else None,
    )
    o, lse = found if case.stats else (found, None)
    if not into:
        seen("o")[...] = o
    if case.stats:
        tensors["stats"].tensor[..., 0] = lse


def permuted(it: Guarded, layout: str) -> Any:
    """A (B, H, S, D) tensor with its dimensions in another order."""
    return (
        it.tensor.permute(*axes_of(layout))
        if it.library.is_torch
        else it.tensor.transpose(axes_of(layout))
    )


def axes_of(layout: str) -> tuple[int, ...]:
    return tuple(_AXES[letter] for letter in layout)
