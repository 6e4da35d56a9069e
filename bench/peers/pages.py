"""Keys and values in pages, as graphs take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.cases import Case

if TYPE_CHECKING:
    import torch


class Pages:
    """A shuffled order of pages, the same for keys and values.

    Attributes:
        table: (B, 1, Skv / page, 1) int32.
    """

    TABLES = ("paged_attention_k_table", "paged_attention_v_table")

    def __init__(self, case: Case, device: torch.device) -> None:
        import torch

        assert case.page is not None
        self._batch, self._page = case.batch, case.page
        self._order = torch.randperm(case.batch * case.seq_kv // case.page, device=device)
        self.table = self._order.int().view(case.batch, 1, -1, 1)

    def container(self, rows: torch.Tensor) -> torch.Tensor:
        """(B, H, S, D) as (pages, H, page, D), in which the rows of a token lie together."""
        _, heads, _, head_dim = rows.shape
        pages = rows.transpose(1, 2).reshape(-1, self._page, heads, head_dim)
        made = pages.new_empty(pages.shape)
        made[self._order] = pages
        return made.transpose(1, 2)

    def rows(self, container: torch.Tensor) -> torch.Tensor:
        """(pages, H, page, D) as (B, S, H, D)."""
        pages = container.transpose(1, 2)[self._order]
        return pages.reshape(self._batch, -1, *pages.shape[2:])
