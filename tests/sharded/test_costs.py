"""What sharded training sends and keeps, counted and compared with formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import kronfac
from tests.distributed.ranks import run
from tests.sharded.harness import Way, shard

WIDTH, LAYERS = 8, 6


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def take_steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()


def traffic(rank: int, steps: int, replicas: int) -> dict[str, Any]:
    model = shard(net(), Way(replicas=replicas))
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = kronfac.KFAC(model, base, factor_every=2, refresh_every=4)
    take_steps(model, optimizer, steps)
    return optimizer.stats()


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_exchange_sends_what_the_formula_says(size: int, replicas: int) -> None:
    steps, parameters = 5, LAYERS * WIDTH**2
    found = run(size, traffic, steps, replicas)
    shards = size // replicas
    per_rank = 2 * parameters / shards * (shards - 1) / shards
    total = sum(one["bytes"]["spread"] for one in found)
    assert total == size * per_rank * steps * 4
    assert all(one["messages"]["spread"] == 2 * steps for one in found)
    if replicas == 1:
        assert all(one["bytes"]["share"] == 0 for one in found)


def held(rank: int, momentum: float) -> tuple[int, int, int]:
    model = shard(net(), Way())
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = kronfac.KFAC(
        model, base, factor_every=1, refresh_every=100, early_refresh=False, momentum=momentum
    )
    most = 0
    for _ in range(4):
        take_steps(model, optimizer, 1)
        most = max(most, kept(optimizer))
    assert not any(isinstance(v, DTensor) for s in optimizer.layers for v in s.buffers.values())
    statistics = sum(
        math.prod(r.statistic.shape) for s in optimizer.layers for r in s.running.values()
    )
    return most, statistics, sum(p.numel() for p in model.parameters())


def kept(optimizer: Any) -> int:
    """Elements of matrices that are kept from one step to the next."""
    preconditioner = optimizer._preconditioner
    coordinator = preconditioner.coordinator
    tensors = []
    for state in optimizer.layers:
        tensors += [one.sum for one in state.running.values() if one.sum is not None]
        tensors += [*(state.solution or {}).values(), *state.buffers.values()]
        tensors += list(state.pending.sums.values())
    tensors += [b.flat.tensor for group in coordinator.rounds.buckets.values() for b in group]
    tensors += list(coordinator.spreading.gradients.values())
    return sum(one.numel() for one in tensors)


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_keeps_the_statistics_of_all_layers(size: int) -> None:
    found = run(size, held, 0.9)
    _, statistics, parameters = found[0]
    unit = 2 * WIDTH**2 + 2 * WIDTH  # one layer's statistics, and small change
    for most, _, _ in found:
        assert most <= (2 * statistics + 4 * parameters) / size + 2 * unit
        assert most < statistics + parameters
