"""A tiny causal language model on random weights, and sentences for it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, TOKENS = 11, 6


def llama() -> LlamaForCausalLM:
    """Two blocks, no dropout, the same weights at each call, in the default dtype."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).to(torch.get_default_dtype())


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
