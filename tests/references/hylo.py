"""HyLo, layer by layer, from the rows of several shards that are compressed one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import oracles
from tests.references.per_sample import RATE, layers

Rows = tuple[Tensor, Tensor]
Batch = tuple[Tensor, Tensor]


def rows_of(model: nn.Module, layer: Any, data: Batch) -> list[Rows]:
    """Of each group ``a: [n, d_in]``, the mean over positions, and ``g: [n, d_out]``, the sum."""
    outputs, (call,) = oracles.run_layer(model, layer, data[0])
    losses = F.cross_entropy(outputs, data[1], reduction="sum")
    a, g = oracles.layer_rows(layer, call.x, torch.autograd.grad(losses, call.z)[0])
    a, g = a.mean(-2), g.sum(-2)
    return list(zip(a, g, strict=True)) if a.dim() == 3 else [(a, g)]


def gradients(a: Tensor, g: Tensor) -> Tensor:
    return torch.einsum("no,ni->noi", g, a).flatten(1)


def interpolated(
    a: Tensor, g: Tensor, rank: int, alpha: float, samples: int
) -> tuple[Rows, Tensor]:
    """KID: the chosen rows, and ``R = Tᵀ(E/N + αI)⁻¹T``."""
    U, chosen = gradients(a, g), []
    for _ in range(rank):  # each time the row that is farthest from the span of the others
        basis = U[chosen].T
        fit = torch.linalg.lstsq(basis, U.T).solution if chosen else torch.zeros(0, len(U))
        distance = (U.T - basis @ fit).square().sum(0)
        distance[chosen] = -1
        chosen.append(int(distance.argmax()))
    T = torch.linalg.lstsq(U[chosen].T, U.T).solution.T
    missed = U - T @ U[chosen]
    R = T.T @ torch.linalg.inv(missed @ missed.T / samples + alpha * torch.eye(len(U))) @ T
    return (a[chosen], g[chosen]), R


def sampled(a: Tensor, g: Tensor, rank: int, alpha: float, start: float) -> tuple[Rows, Tensor]:
    """KIS: rows at equal distances on a line on which row i has the length of its chance."""
    sizes = a.square().sum(1) * g.square().sum(1)
    chances = torch.zeros(len(sizes))
    sure: list[int] = []
    while True:
        rest = [i for i in range(len(sizes)) if i not in sure]
        chances[rest] = (rank - len(sure)) * sizes[rest] / sizes[rest].sum()
        chances[sure] = 1.0
        above = [i for i in rest if chances[i] > 1]
        if not above:
            break
        sure += above
    ends = chances.cumsum(0)
    chosen = [int((ends <= start + number).sum()) for number in range(rank)]
    return (a[chosen], g[chosen] / chances[chosen, None].sqrt()), torch.eye(rank) / alpha


def solved(parts: list[tuple[Rows, Tensor]], V: Tensor, alpha: float, samples: int) -> Tensor:
    """``(v - Uₛᵀ M Uₛ v / N)/α`` with ``M = R - R((Kₛ/N)⁻¹ + R)⁻¹R``, as the paper writes it."""
    U = torch.cat([gradients(*rows) for rows, _ in parts])
    R = torch.block_diag(*[one for _, one in parts])
    inner = R - R @ torch.linalg.inv(torch.linalg.inv(U @ U.T / samples) + R) @ R
    return (V.flatten() - U.T @ inner @ U @ V.flatten() / samples).view_as(V) / alpha


@dataclass
class HyLo:
    """Steps of a model from shards of a batch, each of which draws from a generator of its own."""

    mode: str
    rank: float
    alpha: float

    def __post_init__(self) -> None:
        self.seeds = torch.Generator().manual_seed(0)

    def step(self, model: nn.Module, shards: list[Batch]) -> None:
        seed = int(torch.randint(2**62, (), generator=self.seeds))
        draws = [torch.Generator().manual_seed(seed + number) for number in range(len(shards))]
        samples = sum(len(y) for _, y in shards)
        x, y = (torch.cat(parts) for parts in zip(*shards, strict=True))
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        directions = []
        for layer in layers(model):
            rows = [rows_of(model, layer, shard) for shard in shards]
            groups = [
                [
                    self.compressed(one, samples, draw)
                    for one, draw in zip(group, draws, strict=True)
                ]
                for group in zip(*rows, strict=True)
            ]
            V = oracles.matrix_gradient(layer)
            each = V if V.dim() == 3 else [V]
            found = [solved(g, v, self.alpha, samples) for g, v in zip(groups, each, strict=True)]
            directions.append(torch.cat(found))
        for layer, direction in zip(layers(model), directions, strict=True):
            with torch.no_grad():
                layer.weight -= RATE * direction[:, : layer.weight[0].numel()].view_as(layer.weight)
                if layer.bias is not None:
                    layer.bias -= RATE * direction[:, -1]

    def compressed(self, rows: Rows, samples: int, draw: torch.Generator) -> tuple[Rows, Tensor]:
        count = max(1, round(self.rank * len(rows[0])))
        if count == len(rows[0]):
            return rows, torch.eye(count) / self.alpha
        if self.mode == "kid":
            return interpolated(*rows, count, self.alpha, samples)
        start = float(torch.rand((), generator=draw, dtype=torch.float64))
        return sampled(*rows, count, self.alpha, start)
