"""A GPT with the parameters of GPT-2 (Radford et al., 2019), of any size."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kronfac.train.models.transformer import TransformerBlock


class GPT(nn.Module):
    """A causal language model with learned positions.

    Args:
        vocab: number of tokens.
        length: longest sequence.
        dim: width.
        depth: number of blocks.
        heads: attention heads of a block.
        tied: the head is the token embedding, as in GPT-2.
    """

    def __init__(
        self,
        vocab: int = 256,
        length: int = 128,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(dim, heads, causal=True, gelu="tanh", eps=1e-5)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self._initialise()
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers [N, S] to logits [N, S, vocab]."""
        # Expanded over samples although they are equal: K-FAC counts samples in the first dimension.
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.blocks(self.tokens(ids) + self.positions(places))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        """Normal with standard deviation 0.02, and less for layers that end in a shortcut, by depth."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_shortcut = name.endswith(("attention.out", "down"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if into_shortcut else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
