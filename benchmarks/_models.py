"""The models that benchmarks run on, each with a random batch and its loss.

`WORKLOADS[name](batch_size=..., seed=...)` returns `(model, batch, loss_fn)`; the loss of a step is
`loss_fn(model(inputs), targets)` with `inputs, targets = batch`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Workload(NamedTuple):
    """What one training step needs."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a parameter-free shortcut (He et al. 2016, option A)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C_in, H, W] to [N, C_out, H / stride, W / stride]."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        half = self.new_channels // 2
        shortcut = F.pad(shortcut, (0, 0, 0, 0, half, self.new_channels - half))
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)) + shortcut)


class ResNet20(nn.Sequential):
    """The CIFAR ResNet with 20 layers: 3 stages of 3 blocks with 16, 32 and 64 channels."""

    def __init__(self, num_classes: int = 10) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ]
        previous = 16
        for channels in (16, 32, 64):
            for _ in range(3):
                layers.append(ResidualBlock(previous, channels, 1 if channels == previous else 2))
                previous = channels
        super().__init__(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, num_classes)
        )


class SelfAttention(nn.Module):
    """Causal multi-head attention with one fused projection for queries, keys and values."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, S, d_model] to [N, S, d_model]."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and a residual sum."""

    def __init__(self, d_model: int, num_heads: int, d_mlp: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = SelfAttention(d_model, num_heads)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_mlp), nn.GELU(), nn.Linear(d_mlp, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, S, d_model] to [N, S, d_model]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small GPT-like language model with learned positions and an untied head."""

    def __init__(
        self,
        vocab: int = 256,
        length: int = 64,
        d_model: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        d_mlp: int = 512,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(length, d_model)
        self.blocks = nn.Sequential(
            *(TransformerBlock(d_model, num_heads, d_mlp) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers [N, S] to logits [N, S, vocab]."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(places))))


def mlp(num_inputs: int = 784, d_hidden: int = 1024, num_classes: int = 10) -> nn.Sequential:
    """A perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Linear(num_inputs, d_hidden),
        nn.ReLU(),
        nn.Linear(d_hidden, d_hidden),
        nn.ReLU(),
        nn.Linear(d_hidden, num_classes),
    )


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens; logits [N, S, vocab], targets [N, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def resnet20_workload(batch_size: int = 128, seed: int = 0) -> Workload:
    """ResNet-20 on random 32x32 images in 10 classes."""
    torch.manual_seed(seed)
    batch = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    return Workload(ResNet20(), batch, F.cross_entropy)


def transformer_workload(batch_size: int = 32, seed: int = 0) -> Workload:
    """The transformer on random sequences of 64 tokens, predicting the next one."""
    torch.manual_seed(seed)
    text = torch.randint(256, (batch_size, 65))
    return Workload(Transformer(), (text[:, :-1], text[:, 1:]), token_cross_entropy)


def mlp_workload(batch_size: int = 128, seed: int = 0) -> Workload:
    """The perceptron on random vectors of 784 numbers in 10 classes."""
    torch.manual_seed(seed)
    batch = torch.randn(batch_size, 784), torch.randint(10, (batch_size,))
    return Workload(mlp(), batch, F.cross_entropy)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "resnet20": resnet20_workload,
    "transformer": transformer_workload,
    "mlp": mlp_workload,
}
