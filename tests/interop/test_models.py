"""Models as they are on ``dlattn.torch``, on the CPU, beside their own attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlattn.errors import cudnnGraphNotSupportedError  # noqa: E402
from dlattn.torch import register_transformers, replace_sdpa  # noqa: E402
from dlattn.torch.models import attention_forward  # noqa: E402
from tests.models import (  # noqa: E402
    TRANSFORMERS,
    loss_of,
    losses,
    of_transformers,
    with_gradients,
)

LOSSES = losses(32, "cpu", torch.float64)


@pytest.mark.parametrize("name", LOSSES)
def test_of_pytorch(name: str) -> None:
    """The loss and all gradients are those that PyTorch's attention gives."""
    torch.manual_seed(0)
    model, loss = LOSSES[name]()
    wanted = with_gradients(model, loss)
    with replace_sdpa(fall_back=False):
        found = with_gradients(model, loss)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_of_transformers(name: str, padded: bool) -> None:
    """Under both ways to dlattn, the loss and all gradients are those of the model's own
    attention, up to the fp32 that some have inside."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, own = of_transformers(name, transformers, 32)
    model = model.double()
    loss = loss_of(model, padded)
    wanted = with_gradients(model, loss)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if own == "sdpa" else {"rtol": 1e-4, "atol": 1e-6}
    if own == "sdpa":
        with replace_sdpa(fall_back=False):
            found = with_gradients(model, loss)
        torch.testing.assert_close(found, wanted, **tolerance)
    register_transformers()
    model.set_attn_implementation("dlattn")
    torch.testing.assert_close(with_gradients(model, loss), wanted, **tolerance)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT-OSS"])
def test_generation(name: str) -> None:
    """Tokens that are generated, one by one from a cache, are those of the model's own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, own = of_transformers(name, transformers, 32)
    model = model.double().eval()
    register_transformers("dlattn too")
    tokens = torch.randint(3, 50, (2, 12))
    found = []
    for implementation in (own, "dlattn too"):
        model.set_attn_implementation(implementation)
        found.append(
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False
            )
        )
    assert torch.equal(*found)


def test_other_caches_are_refused() -> None:
    """Keys and values that are elsewhere are not left out silently."""
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(cudnnGraphNotSupportedError, match="cache: expected None, got a dict"):
        attention_forward(torch.nn.Module(), q, q, q, None, is_causal=True, cache={})
