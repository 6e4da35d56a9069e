"""Models as they are on ``dlattn.torch`` on a GPU, beside their own attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlattn.torch import register_transformers, replace_sdpa  # noqa: E402
from tests.models import (  # noqa: E402
    TRANSFORMERS,
    loss_of,
    losses,
    of_transformers,
    with_gradients,
)

pytestmark = pytest.mark.gpu

LOSSES = losses(256, "cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")


def assert_near(found: list[Any], wanted: list[Any]) -> None:
    """Within what sums of bf16 in another order make of gradients; of a bias of keys, whose
    gradient is 0 by itself, within that of its neighbours."""
    largest = max(float(x.float().abs().max()) for x in wanted[1:])
    for one, other in zip(found, wanted, strict=True):
        error = (one - other).float().norm()
        assert error <= 5e-2 * other.float().norm() + 1e-3 * largest * other.numel() ** 0.5


@pytest.mark.parametrize("name", LOSSES)
def test_of_pytorch(name: str) -> None:
    """The loss and all gradients are near those that PyTorch's attention gives."""
    torch.manual_seed(0)
    model, loss = LOSSES[name]()
    wanted = with_gradients(model, loss)
    with replace_sdpa(fall_back=False):
        found = with_gradients(model, loss)
    assert_near(found, wanted)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_of_transformers(name: str, padded: bool) -> None:
    """Registered with ``transformers``, the loss and all gradients are near those of the model's
    own attention."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, _ = of_transformers(name, transformers, 256)
    model = model.cuda().bfloat16()
    loss = loss_of(model, padded)
    wanted = with_gradients(model, loss)
    register_transformers()
    model.set_attn_implementation("dlattn")
    assert_near(with_gradients(model, loss), wanted)
