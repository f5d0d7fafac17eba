"""The Vision Transformer (Dosovitskiy et al., An Image is Worth 16x16 Words, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kronfac.runs.errors import UserError
from kronfac.train.models.transformer import TransformerBlock


class ViT(nn.Module):
    """Image patches and a class token through transformer blocks.

    ViT-Ti, S and B have a ``dim`` of 192, 384 and 768, 3, 6 and 12 heads, and 12 blocks.

    Args:
        num_classes: number of outputs.
        sample_shape: of the images, [C, H, W].
        patch: side of a square patch.
        dim: width.
        depth: number of blocks.
        heads: attention heads of a block.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        sample_shape: tuple[int, ...] = (3, 224, 224),
        patch: int = 16,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        channels, height, width = sample_shape
        if patch < 1 or height % patch or width % patch:
            raise UserError(
                f"images of {height} x {width} pixels cannot be cut into patches of {patch} x {patch}"
            )
        num_patches = (height // patch) * (width // patch)
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 1 + num_patches, dim))
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(dim, heads, causal=False, gelu="none", eps=1e-6)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, C, H, W] to logits [N, classes]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(x), -1, -1)
        x = self.blocks(torch.cat([first, patches], dim=1) + self.positions)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.class_token, std=0.02)
