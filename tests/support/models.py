"""One tiny model for each row of the support table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import kronfac
from kronfac.layers import Rows
from kronfac.layers.linear import LinearLayer
from tests.training import CLASSES

SAMPLES, VOCABULARY, WIDTH, LENGTH = 8, 7, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Words(nn.Module):
    """What stands before a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(self.embedding(tokens).tanh()).mean(1)


class CentredLinear(nn.Module):
    """A module of the user's own: a linear layer that takes the mean off its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 2)
        self.bias = nn.Parameter(torch.randn(outputs) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x - x.mean(-1, keepdim=True), self.weight, self.bias)


@kronfac.register_layer(CentredLinear)
class CentredLayer(LinearLayer):
    def inputs(self, args: tuple[Any, ...]) -> Rows:
        return super().inputs((args[0] - args[0].mean(-1, keepdim=True),))


@dataclass(frozen=True)
class Model:
    """How to make the layer, and the shape of one sample; tokens if there is none."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None
    tied: bool = False


MODELS: dict[str, Model] = {
    "Linear": Model(lambda: nn.Linear(WIDTH, 5), (LENGTH, WIDTH)),
    "Conv1d": Model(lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 4)),
    "Conv2d": Model(lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 4, 4)),
    "Conv2d, grouped": Model(lambda: nn.Conv2d(4, 4, 2, groups=2), (4, 3, 3)),
    "Conv3d": Model(lambda: nn.Conv3d(1, 2, 2), (1, 3, 2, 3)),
    "Embedding": Model(lambda: nn.Embedding(VOCABULARY, WIDTH), None),
    "BatchNorm": Model(lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "LayerNorm": Model(lambda: nn.LayerNorm(WIDTH), (LENGTH, WIDTH)),
    "GroupNorm": Model(lambda: nn.GroupNorm(2, 4), (4, 3)),
    "InstanceNorm": Model(lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 2)),
    "RMSNorm": Model(lambda: nn.RMSNorm(WIDTH), (LENGTH, WIDTH)),
    "MultiheadAttention": Model(Attention, (LENGTH, WIDTH)),
    "Conv1D (GPT-2)": Model(lambda: Conv1D(5, WIDTH), (LENGTH, WIDTH)),
    "head tied to an embedding": Model(Words, None, tied=True),
    "registered layer": Model(lambda: CentredLinear(WIDTH, 5), (LENGTH, WIDTH)),
}


class Net(nn.Module):
    """The layer, perhaps under an activation checkpoint, a nonlinearity and a head.

    Weights are numbers that bfloat16 can hold, so that they are the same in every precision.
    """

    def __init__(self, layer: str, checkpoints: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        model = MODELS[layer]
        self.checkpoints = checkpoints
        self.body = model.make()
        for name, parameter in self.body.named_parameters():
            if (
                parameter.dim() == 1
            ):  # not the ones of a norm or a bias of zeros, which hide mistakes
                nn.init.uniform_(parameter, *((-0.5, 0.5) if "bias" in name else (0.5, 1.5)))
        with torch.no_grad():
            width = self.body(batch(layer, 0)[0]).flatten(1).shape[1]
        self.head = nn.Linear(width, VOCABULARY if model.tied else CLASSES, bias=not model.tied)
        if model.tied:
            self.head.weight = self.body.embedding.weight
        self.one = torch.ones((), requires_grad=True)
        self.bfloat16().float()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.checkpoints == "none":
            z = self.middle(self.one, x)
        else:
            reentrant = self.checkpoints == "reentrant"
            z = checkpoint(self.middle, self.one, x, use_reentrant=reentrant)
        scores = self.head(z)
        return scores if labels is None else {"loss": loss_of(scores, labels), "scores": scores}

    def middle(self, one: Tensor, x: Tensor) -> Tensor:
        # A reentrant checkpoint wants an input with a gradient, which tokens have not.
        return (self.body(x) * one).tanh().flatten(1)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), labels)


def batch(layer: str, number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and labels: the same whenever the number is the same, and in every precision."""
    generator = torch.Generator().manual_seed(100 + number)
    shape = MODELS[layer].shape
    if shape is None:
        x = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    else:
        x = torch.randn(SAMPLES, *shape, generator=generator).bfloat16().to(dtype)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)
