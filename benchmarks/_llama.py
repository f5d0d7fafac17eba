"""A Llama-style decoder, and the shapes of the published ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Args:
        width: of the residual stream.
        layers: how many blocks there are.
        key_width: of keys and values, which groups of heads share.
        hidden: of the gated MLP.
        words: of the vocabulary.
    """

    width: int
    layers: int
    key_width: int
    hidden: int
    words: int

    def matrices(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, rows, columns and number of every weight matrix."""
        yield "embedding", self.words, self.width, 1
        yield "query, out", self.width, self.width, 2 * self.layers
        yield "key, value", self.key_width, self.width, 2 * self.layers
        yield "gate, up", self.hidden, self.width, 2 * self.layers
        yield "down", self.width, self.hidden, self.layers
        yield "head", self.words, self.width, 1

    @property
    def parameters(self) -> int:
        """Elements of all matrices; norms are left out."""
        return sum(rows * columns * count for _, rows, columns, count in self.matrices())

    def statistics(self, max_dim: int) -> int:
        """Elements of all statistics: squares of dense sides, lines of diagonal ones."""
        total = 0
        for name, rows, columns, count in self.matrices():
            if name == "embedding":  # tokens pick rows of it: diagonal, whatever their number
                total += rows + columns**2
                continue
            sides = (side**2 if side <= max_dim else side for side in (rows, columns))
            total += sum(sides) * count
        return total

    def row_local(self, max_dim: int, orthogonal: bool, room: int) -> tuple[int, int]:
        """Elements of weights whose rows do not mix, and of the solutions that all ranks hold of them.

        Orthogonal steps mix the rows of all matrices, and leave the embedding's tokens. All solutions
        together have `room`, and those that save most for what they hold come first.
        """
        found = []
        for name, rows, columns, count in self.matrices():
            if name == "embedding" or (rows > max_dim and not orthogonal):
                held = rows + (columns**2 if columns <= max_dim else columns)
                found.append((rows * columns / held, rows * columns, held, count))
        weights = solutions = 0
        for _, size, held, count in sorted(found, reverse=True):
            chosen = min(count, (room - solutions) // held)
            weights += chosen * size
            solutions += chosen * held
        return weights, solutions


PUBLISHED = {
    "Llama-3-8B": Shape(4096, 32, 1024, 14336, 128256),
    "Llama-3-70B": Shape(8192, 80, 1024, 28672, 128256),
}


class Block(nn.Module):
    """Attention with shared keys, and a gated MLP, each behind a norm."""

    def __init__(self, shape: Shape, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.key_width, bias=False)
        self.value = nn.Linear(shape.width, shape.key_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        size = x.shape[-1] // self.heads
        q, k, v = (
            one(y).unflatten(-1, (-1, size)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens to scores of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
