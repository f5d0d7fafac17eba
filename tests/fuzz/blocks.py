"""The pieces that random nets are made of: small modules, each one way to use a layer.

Every piece that works in place has a flag ``inplace``; with the flag off it computes the same numbers
out of place. Rows are ``[N, *shared, d]``, features last; maps are ``[N, C, *spatial]``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A piece that prints its flags."""

    inplace = False

    def extra_repr(self) -> str:
        shown = {n: v for n, v in vars(self).items() if isinstance(v, int | str | tuple)}
        return ", ".join(
            f"{n}={v}" for n, v in shown.items() if not n.startswith(("_", "training"))
        )


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it: the weight is transposed, and the output is a view."""

    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.nf = width
        self.weight = nn.Parameter(torch.randn(inputs, width) / inputs**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


class Use(Block):
    """A layer, then an activation."""

    def __init__(self, layer: nn.Module, activation: str, inplace: bool) -> None:
        super().__init__()
        self.activation, self.inplace = activation, inplace
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return activate(self.layer(h), self.activation, self.inplace)


def activate(h: Tensor, name: str, inplace: bool) -> Tensor:
    if name == "relu":
        return F.relu(h, inplace=inplace)
    if name == "tanh":
        return h.tanh_() if inplace else h.tanh()
    if name == "scale":
        return h.mul_(0.7) if inplace else h * 0.7
    assert name == "none", name
    return h


class Residual(Block):
    """``h + layer(h)``."""

    def __init__(self, layer: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        y = self.layer(h)
        if self.inplace:
            y += h
            return y
        return y + h


class Repeat(Block):
    """One layer, several times."""

    def __init__(self, layer: nn.Module, times: int, inplace: bool) -> None:
        super().__init__()
        self.times, self.inplace = times, inplace
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.times):
            h = activate(self.layer(h), "tanh", self.inplace)
        return h


class Fork(Block):
    """Two layers that share their input."""

    def __init__(self, left: nn.Module, right: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.left, self.right = left, right

    def forward(self, h: Tensor) -> Tensor:
        y, gate = self.left(h), self.right(h).sigmoid()
        return y.add_(gate) if self.inplace else y + gate


class Halves(Block):
    """A layer whose output is cut in two along its features; one half gates the other."""

    def __init__(self, layer: nn.Module, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        left, right = self.layer(h).chunk(2, self.dim)
        return left * right.sigmoid()


class Slice(Block):
    """A part of a layer's output is scaled, in place through a view of it."""

    def __init__(self, layer: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        y = self.layer(h)
        if self.inplace:
            y[:, :1].mul_(0.5)
            return y
        return torch.cat([y[:, :1] * 0.5, y[:, 1:]], 1)


class Late(Block):
    """A layer's output is used, then overwritten and used again."""

    def __init__(self, layer: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        y = self.layer(h)
        early = 0.3 * y.sum(1, keepdim=True)
        y = y.mul_(1.5) if self.inplace else y * 1.5
        return y + early


class Attend(Block):
    """Self attention, or attention to a memory that a layer makes of the input."""

    def __init__(self, attention: nn.MultiheadAttention, memory: Any, weights: bool, inplace: bool):
        super().__init__()
        self.weights, self.inplace = weights, inplace
        self.attention, self.memory = attention, memory

    def forward(self, h: Tensor) -> Tensor:
        x = h if self.attention.batch_first else h.transpose(0, 1)
        memory = x if self.memory is None else self.memory(x)
        y, _ = self.attention(x, memory, memory, need_weights=self.weights)
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return y.add_(h) if self.inplace else y + h


class Positions(Block):
    """Adds what an embedding or a linear layer makes of the positions.

    They are ``[1, T]``, broadcast over the batch, or expanded to the batch before.
    """

    def __init__(self, layer: nn.Module, length: int, expanded: bool) -> None:
        super().__init__()
        self.length, self.expanded = length, expanded
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        places = torch.arange(self.length)[None]
        if isinstance(self.layer, nn.Linear):
            powers = torch.arange(self.layer.in_features)
            places = torch.cos(places[..., None] * 0.9**powers).to(h.dtype)
        if self.expanded:
            places = places.expand(len(h), *places.shape[1:])
        return h + self.layer(places)


class Flat(Block):
    """A layer on positions without their samples, ``[N·T, d]``, or with positions first."""

    def __init__(self, layer: nn.Module, way: str) -> None:
        super().__init__()
        self.way = way
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        if self.way == "positions first":
            return self.layer(h.transpose(0, 1)).transpose(0, 1)
        return self.layer(h.flatten(0, 1)).unflatten(0, h.shape[:2])


class Sometimes(Block):
    """A piece that some steps, or some micro-batches, do without; ``moment`` is set by the loop."""

    def __init__(self, inner: nn.Module, of: str, every: int, first: int) -> None:
        super().__init__()
        self.of, self.every, self.first = of, every, first
        self.moment = (0, 0)
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        number = self.moment[0] if self.of == "steps" else self.moment[1]
        return self.inner(h) if number % self.every == self.first else h


class Discard(Block):
    """A layer is called and its output is not used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        self.layer(h)
        return h


class Turn(Block):
    """Features last to channels first, or back, as a view."""

    def forward(self, h: Tensor) -> Tensor:
        return h.movedim(1, -1)


class TurnBack(Block):
    def forward(self, h: Tensor) -> Tensor:
        return h.movedim(-1, 1)


class Shape(Block):
    """Another shape of the same numbers of a sample."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, h: Tensor) -> Tensor:
        return h.reshape(len(h), *self.shape)
