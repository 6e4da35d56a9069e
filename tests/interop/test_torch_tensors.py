"""Tensors of torch that have no rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import scaled_dot_product_attention  # noqa: E402


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tensors_without_rows(name: str, masked: bool) -> None:
    """Sparse tensors and numbers are refused by name, beside a mask too."""
    good = {role: torch.zeros(2, 3, 4, 8) for role in ("query", "key", "value")}
    mask = torch.ones(4, 4, dtype=torch.bool) if masked else None
    for wrong, said in ((good[name].to_sparse(), "dense"), (torch.tensor(1.0), "two dimensions")):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected .*{said}"):
            scaled_dot_product_attention(**{**good, name: wrong}, attn_mask=mask)
