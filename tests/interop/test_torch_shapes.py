"""Shapes that ``dlattn.torch.scaled_dot_product_attention`` broadcasts, as PyTorch does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import assert_same, by_definition, gradients, random  # noqa: E402

#: Dimensions in front of queries, keys and values.
FRONTS = [
    ((3,), (3, 1), (3, 1)),
    ((3,), (2, 3), (3,)),
    ((4,), (2, 4), (2, 4)),
    ((), (3,), (3,)),
    ((3,), (), (3,)),
    ((2, 2, 4), (4,), (2, 4)),
    ((2, 4), (1,), ()),
    ((2, 4), (2, 1), (2, 4)),
    ((1, 4), (3, 4), ()),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fronts", FRONTS, ids=str)
def test_missing_dimensions_are_in_front(fronts: tuple[tuple[int, ...], ...], masked: bool) -> None:
    """Whatever the others have, outputs and gradients are PyTorch's."""
    shapes = ((5, 8), (7, 8), (7, 6))
    inputs = [random(*a, *b, seed=i) for i, (a, b) in enumerate(zip(fronts, shapes, strict=True))]
    if masked:
        inputs.append(random(*max(fronts, key=len)[-1:], 5, 7, seed=3))
    found, wanted = (
        gradients(function, tuple(inputs))
        for function in (scaled_dot_product_attention, by_definition)
    )
    assert found[0].shape == wanted[0].shape
    assert_same(found, wanted)


@pytest.mark.parametrize(
    ("front", "masks"),
    [((3,), (2, 3)), ((3,), (1, 1, 3)), ((2, 2, 3), (3, 2, 3)), ((2, 2, 3), (1, 2, 2, 3))],
)
def test_masks_that_do_not_broadcast(front: tuple[int, ...], masks: tuple[int, ...]) -> None:
    """Whatever dimensions are in front, a mask of others is refused by its name."""
    x, mask = random(*front, 5, 8, grad=False), random(*masks, 5, 5, grad=False)
    with pytest.raises(InvalidArgumentError, match="attn_mask: expected"):
        scaled_dot_product_attention(x, x, x, mask)


def test_heads_of_nested_tensors_are_shared_only_if_that_is_said() -> None:
    """As those of dense ones; then results are those of each sequence."""
    parts = [[random(n, heads, 8, grad=False) for n in (3, 6)] for heads in (4, 2)]
    q, k = (torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in parts)
    k = torch.nested.nested_tensor_from_jagged(
        k.transpose(1, 2).values(), q.transpose(1, 2).offsets()
    ).transpose(1, 2)
    with pytest.raises(InvalidArgumentError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
    found = scaled_dot_product_attention(q, k, k, enable_gqa=True).transpose(1, 2).unbind()
    for out, one, other in zip(found, *parts, strict=True):
        x, y = (part.transpose(0, 1)[None] for part in (one, other))
        assert_same([out.transpose(0, 1)[None]], [by_definition(x, y, y, enable_gqa=True)])
