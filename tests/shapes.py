"""The shapes of three well-known models, without anything else of them.

On the meta device they cost nothing: only shapes are computed, every read of a number raises, and so does
every tensor that is on another device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


class Bottleneck(nn.Module):
    """Three convolutions with norms, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, outputs, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, outputs))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y if index == 0 else F.relu(y, inplace=True)))
        return F.relu(y + self.shortcut(x))


def resnet(
    blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
) -> nn.Module:
    """ResNet-50: 53 convolutions, 53 norms and a head."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if index == 0 and stage > 0 else 1
            layers.append(Bottleneck(inputs, width * 2**stage, stride))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class VisionBlock(nn.Module):
    """Attention and a feed-forward part, with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        packed = self.qkv(self.norms[0](x)).view(samples, length, 3, self.heads, -1)
        attended = F.scaled_dot_product_attention(*packed.permute(2, 0, 3, 1, 4))
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nn.Module):
    """ViT-B: twelve blocks, the embedding of patches, a norm and a head."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.Sequential(*(VisionBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class DecoderBlock(nn.Module):
    """Attention of grouped queries and a gated feed-forward part, without biases."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        shared = width // heads * groups
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        rows = self.norms[0](x)

        def split(projection: nn.Module, heads: int) -> Tensor:
            return projection(rows).view(samples, length, heads, -1).transpose(1, 2)

        query = split(self.query, self.heads)
        key, value = split(self.key, self.groups), split(self.value, self.groups)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        rows = self.norms[1](x)
        return x + self.down(F.silu(self.gate(rows)) * self.up(rows))


class Decoder(nn.Module):
    """A Llama of 12 blocks: an embedding, a norm and a head."""

    def __init__(self, width: int = 768, depth: int = 12, hidden: int = 2048) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32000, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, 12, 4, hidden) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 32000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


MODELS = {"ResNet-50": resnet, "ViT-B": VisionTransformer, "Llama": Decoder}
#: A Llama of three blocks.
SMALL = "small Llama"


def on_meta(name: str) -> tuple[nn.Module, Data]:
    """One of the models, and a batch for it, as shapes."""
    with torch.device("meta"):
        model = Decoder(depth=3) if name == SMALL else MODELS[name]()
        if name.endswith("Llama"):
            tokens = torch.zeros(8, 64, dtype=torch.long)
            return model, (tokens, tokens)
        return model, (torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long))


def loss_of(model: nn.Module, data: Data) -> Tensor:
    """The mean loss over all that is predicted."""
    scores = model(data[0])
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), data[1].reshape(-1))
