"""A tiny causal language model on random weights, and sentences for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

VOCABULARY, TOKENS = 11, 6


def tiny_config(**options: Any) -> LlamaConfig:
    """Two blocks, no dropout."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **options,
    )


def llama() -> LlamaForCausalLM:
    """The same weights at each call, in the default dtype."""
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).to(torch.get_default_dtype())


def opt() -> OPTForCausalLM:
    """One that works in the model's own precision, except for its loss."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        word_embed_proj_dim=8,
        ffn_dim=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        dropout=0.0,
        enable_bias=False,  # the gradient of a key's bias is rounding only, which Adam would follow
    )
    return OPTForCausalLM(config).to(torch.get_default_dtype())


def bert_config() -> BertConfig:
    """An encoder with biases, norms and a pooler."""
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )


def sentences(number: int) -> list[dict[str, Tensor]]:
    """Random ones; the first 0 to 3 labels of each are masked."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(number):
        words = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        labels = words.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
