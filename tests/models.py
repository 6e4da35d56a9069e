"""Small models, of PyTorch alone and of ``transformers``, that call PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Of a sequence, and how many tokens of the second one are no padding; no window is all padding.
ROWS, USED = 24, 20
VOCABULARY = 50


class Block(nn.Module):
    """A layer of a GPT whose query heads share keys and values."""

    def __init__(self, width: int, heads: int, heads_kv: int) -> None:
        super().__init__()
        self.heads, self.heads_kv, size = heads, heads_kv, width // heads
        self.qkv = nn.Linear(width, width + 2 * heads_kv * size)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Any) -> Any:
        made = self.qkv(self.norms[0](x)).unflatten(-1, (self.heads + 2 * self.heads_kv, -1))
        q, k, v = made.transpose(1, 2).split((self.heads, self.heads_kv, self.heads_kv), 1)
        found = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.heads_kv
        )
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A language model of tokens, (B, S); gives the loss of the next ones."""

    def __init__(self, width: int, heads: int, heads_kv: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(ROWS, width)
        self.blocks = nn.Sequential(*(Block(width, heads, heads_kv) for _ in range(2)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        scores = self.head(self.blocks(x))[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(device: str) -> Any:
    return torch.randint(VOCABULARY, (2, ROWS), device=device)


def _states(device: str, width: int, dtype: Any) -> Any:
    return torch.randn(2, ROWS, width, device=device, dtype=dtype)


def _padding(device: str) -> Any:
    """True where there is padding."""
    return torch.arange(ROWS, device=device) >= torch.tensor([[ROWS], [USED]], device=device)


def losses(width: int, device: str, dtype: Any) -> dict[str, Callable[[], Any]]:
    """By name, what makes a model; that returns it and a function of its loss."""
    heads = 4
    options = {"batch_first": True, "device": device, "dtype": dtype}

    def gpt(heads_kv: int) -> Any:
        model, tokens = Gpt(width, heads, heads_kv).to(device, dtype), _tokens(device)
        return model, lambda: model(tokens)

    def attention() -> Any:
        model, x = nn.MultiheadAttention(width, heads, **options), _states(device, width, dtype)
        return model, lambda: model(x, x, x, need_weights=False)[0].square().mean()

    def encoder() -> Any:
        model = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, **options)
        x, padding = _states(device, width, dtype), _padding(device)

        def loss() -> Any:
            found = model(x, src_key_padding_mask=padding)
            return found.masked_fill(padding[..., None], 0).sin().mean()

        return model, loss

    def decoder() -> Any:
        model = nn.TransformerDecoderLayer(width, heads, 2 * width, 0.0, **options)
        x, memory = _states(device, width, dtype), _states(device, width, dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(ROWS, device=device, dtype=dtype)
        return model, lambda: model(x, memory, mask, tgt_is_causal=True).sin().mean()

    return {
        "a GPT": lambda: gpt(heads),
        "a GPT of shared heads": lambda: gpt(2),
        "multi-head attention": attention,
        "an encoder and padding": encoder,
        "a decoder and a mask": decoder,
    }


def of_transformers(name: str, transformers: Any, width: int) -> tuple[Any, str]:
    """A model of random weights, and which of its own implementations knows all its options."""
    size = {"num_key_value_heads": 2, "head_dim": width // 4, "sliding_window": 5}
    small = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    }  # fmt: skip
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made: dict[str, Callable[[], tuple[Any, Any, str]]] = {
        "Llama": lambda: (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**small, num_key_value_heads=2),
            "sdpa",
        ),
        "Mistral": lambda: (
            transformers.MistralForCausalLM,
            transformers.MistralConfig(**small, num_key_value_heads=2, sliding_window=5),
            "sdpa",
        ),
        "GPT-2": lambda: (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=width, n_layer=2, n_head=4, n_positions=ROWS,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
            ),
            "sdpa",
        ),
        "BERT": lambda: (
            transformers.BertForMaskedLM,
            transformers.BertConfig(**small, **quiet),
            "sdpa",
        ),
        "T5": lambda: (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=width, d_kv=width // 4, d_ff=width, num_layers=2,
                num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
            ),
            "sdpa",
        ),
        "Gemma 2": lambda: (
            transformers.Gemma2ForCausalLM,
            transformers.Gemma2Config(**small, **size, attn_logit_softcapping=5.0),
            "eager",
        ),
        "GPT-OSS": lambda: (
            transformers.GptOssForCausalLM,
            transformers.GptOssConfig(
                **small, **size, num_local_experts=2, num_experts_per_tok=1,
                experts_implementation="eager",
            ),
            "eager",
        ),
    }  # fmt: skip
    kind, config, own = made[name]()
    config._attn_implementation = own
    return kind(config), own


TRANSFORMERS = ("Llama", "Mistral", "GPT-2", "BERT", "T5", "Gemma 2", "GPT-OSS")


def loss_of(model: Any, padded: bool) -> Callable[[], Any]:
    """The loss of a model of ``transformers``, of the same tokens each time."""
    device = next(model.parameters()).device.type
    tokens, used = _tokens(device).clamp(3), torch.ones(2, ROWS, dtype=torch.long, device=device)
    if padded:
        used = (~_padding(device)).long()
    labels = tokens.masked_fill(used == 0, -100)
    return lambda: model(input_ids=tokens, attention_mask=used, labels=labels).loss


def with_gradients(model: Any, loss: Callable[[], Any]) -> list[Any]:
    """The loss, and the gradients of the parameters that have any."""
    model.zero_grad()
    value = loss()
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
