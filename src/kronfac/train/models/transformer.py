"""The block that the ViT and the GPT share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from kronfac.runs.errors import UserError


class SelfAttention(nn.Module):
    """Multi-head attention with one projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise UserError(f"the width {dim} cannot be shared by {heads} attention heads")
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, S, dim] to [N, S, dim]."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool,
        gelu: Literal["none", "tanh"],
        eps: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attention = SelfAttention(dim, heads, causal)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.up = nn.Linear(dim, 4 * dim)
        self.gelu = nn.GELU(approximate=gelu)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, S, dim] to [N, S, dim]."""
        x = x + self.attention(self.norm1(x))
        mixed: Tensor = x + self.down(self.gelu(self.up(self.norm2(x))))
        return mixed
