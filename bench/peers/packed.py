"""Sequences packed one behind the other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from bench.cases import Case

if TYPE_CHECKING:
    import torch


class Packed:
    """Where the rows of a ragged case lie.

    Attributes:
        starts: (B + 1,) int32: the first token of each batch entry, and the number of all.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        import torch

        assert case.lengths is not None
        self._lengths, self._seq = case.lengths, case.seq_q
        starts = [0, *itertools.accumulate(case.lengths)]
        self.starts = torch.tensor(starts, device=device, dtype=torch.int32)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """(B, S, ...) as (tokens, ...)."""
        import torch

        return torch.cat([entry[:n] for entry, n in zip(rows, self._lengths, strict=True)])

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, ...) as (B, S, ...), 0 beyond the lengths."""
        made = tokens.new_zeros(len(self._lengths), self._seq, *tokens.shape[1:])
        for entry, n, part in zip(
            made, self._lengths, tokens.split(list(self._lengths)), strict=True
        ):
            entry[:n] = part
        return made
