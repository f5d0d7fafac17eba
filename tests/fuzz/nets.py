"""What random nets may have, and the net itself: pieces in a row and a head."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from tests.fuzz import blocks


@dataclass(frozen=True)
class Features:
    """What nets may have. ``FUZZ_WITHOUT=inplace,tokens`` turns some of it off, to narrow a failure."""

    inplace: bool = True
    idle: bool = True
    discarded: bool = True
    broadcast: bool = True
    tokens: bool = True
    tied: bool = True
    frozen: bool = True
    attention: bool = True
    ungrouped: bool = True
    batch_norm: bool = True

    @staticmethod
    def chosen(**off: bool) -> Features:
        """All of them, without those that the caller or the environment turns off."""
        named = [name for name in os.environ.get("FUZZ_WITHOUT", "").split(",") if name]
        unknown = set(named) - {field.name for field in fields(Features)}
        assert not unknown, f"FUZZ_WITHOUT names {unknown}, which is no feature"
        return replace(Features(), **dict.fromkeys(named, False), **off)


class Net(nn.Module):
    """Pieces in a row and a linear head on each position, or on their mean."""

    def __init__(
        self, pieces: list[nn.Module], head: nn.Module, pooled: bool, unused: nn.Module | None
    ) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)
        self.pooled = pooled
        self.head = head
        self.unused = unused

    def forward(self, h: Tensor) -> Tensor:
        for piece in self.pieces:
            h = piece(h)
        if self.pooled and h.dim() > 2:
            h = h.mean(list(range(1, h.dim() - 1)))
        return self.head(h)

    def set_moment(self, step: int, micro: int) -> None:
        """Say which forward comes, for pieces that are not always used."""
        for module in self.modules():
            if isinstance(module, blocks.Sometimes):
                module.moment = (step, micro)


def out_of_place(net: nn.Module) -> nn.Module:
    """Let the net compute the same without overwriting anything."""
    for module in net.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return net


@dataclass(frozen=True)
class Inputs:
    """What a net reads: numbers of a shape, or token numbers."""

    shape: tuple[int, ...]
    tokens: int = 0

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        if self.tokens:
            return torch.randint(self.tokens, (samples, *self.shape), generator=generator)
        return torch.randn(samples, *self.shape, generator=generator)
