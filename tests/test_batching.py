"""Layers that are preconditioned together get what they get alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.training import (
    assert_close,
    assert_same,
    batch,
    kfac,
    layers,
    parameters,
    saved_and_loaded,
    step,
    train,
)

pytestmark = pytest.mark.usefixtures("double_precision")


class Twins(nn.Module):
    """Layers in pairs of equal shape: matrices, groups, norms and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.grouped = nn.ModuleList(nn.Conv1d(4, 4, 1, groups=2) for _ in range(2))
        self.embedding = nn.ModuleList(nn.Embedding(6, 4) for _ in range(2))
        self.alone = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0] * 2).long().clamp(-3, 2) + 3
        x = torch.tanh(self.norm[0](self.linear[0](x)) + self.embedding[0](tokens))
        x = x + self.grouped[0](x[..., None])[..., 0] + self.embedding[1](5 - tokens)
        x = torch.tanh(self.norm[1](self.linear[1](x)) + self.grouped[1](x[..., None])[..., 0])
        return self.alone(self.linear[2](x))


@pytest.fixture(params=["together", "alone"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "alone":
        monkeypatch.setattr("kronfac.step.batching.MAX_ELEMENTS", 0)
    return request.param


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[Any]:
    results = [run()]
    monkeypatch.setattr("kronfac.step.batching.MAX_ELEMENTS", 0)
    return [*results, run()]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cholesky": {"solver": "cholesky"},
    "graft": {"rescale": "graft"},
    "kl-clip": {"rescale": "kl-clip"},
    "trust-region": {"rescale": "trust-region"},
    "unit": {"rescale": "unit"},
    "momentum": {"momentum": 0.9, "nesterov": True},
    "staggered": {"refresh_every": 4, "stagger": True},
    "diagonal": {"max_dim": 3},
    "forward": {"fisher": "forward"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_together_equals_alone(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    def run() -> dict[str, Tensor]:
        model = Twins()
        train(model, kfac(model, **options), range(6))
        return parameters(model)

    assert_close(*both_ways(monkeypatch, run))


def test_a_layer_that_misses_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Tensor]:
        model = Twins()
        optimizer = kfac(model)
        for number in range(6):
            model.linear[1].requires_grad_(number not in (2, 3))
            step(model, optimizer, batch(number))
        return parameters(model)

    assert_close(*both_ways(monkeypatch, run))


def test_it_is_really_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    apply = kronfac.methods.kfac.block.KFACBlock.precondition

    def spy(self: Any, solution: Any, gradient: Tensor, damping: float) -> Tensor:
        seen.append(tuple(gradient.shape))
        return apply(self, solution, gradient, damping)

    monkeypatch.setattr(kronfac.methods.kfac.block.KFACBlock, "precondition", spy)
    model = Twins()
    train(model, kfac(model), range(1))
    assert sorted(seen) == [(2, 2, 2, 3), (2, 4, 6), (3, 4, 5), (3, 5)]


def test_large_layers_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronfac.step.batching.MAX_ELEMENTS", 19)
    monkeypatch.setattr("kronfac.distributed.solving.together.MAX_ELEMENTS", 0)
    model = Twins()
    optimizer = kfac(model)
    train(model, optimizer, range(1))
    shared = {name: _is_part(state) for name, state in layers(optimizer).items()}
    assert not shared["linear.0"]  # 4 x 5
    assert shared["norm.0"]  # 4 x 2


def _is_part(state: Any) -> bool:
    return any(value._base is not None for value in state.solution.values())


def test_resume_is_bit_for_bit(way: str) -> None:
    model = Twins()
    optimizer = kfac(model, refresh_every=3)
    train(model, optimizer, range(4))
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(4, 8))
    again = Twins()
    resumed = kfac(again, refresh_every=3)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, range(4, 8))
    assert_same(parameters(again), parameters(model))


@pytest.mark.parametrize("absent", [{0, 1}, {1, 2}, {2}, {5}], ids=str)
def test_resume_is_bit_for_bit_after_a_layer_missed_steps(absent: set[int], way: str) -> None:
    def run(model: Twins, optimizer: kronfac.KFAC, numbers: range) -> None:
        for number in numbers:
            model.linear[1].requires_grad_(number not in absent)
            step(model, optimizer, batch(number))

    model = Twins()
    optimizer = kfac(model, refresh_every=3)
    run(model, optimizer, range(4))
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
    run(model, optimizer, range(4, 8))
    again = Twins()
    resumed = kfac(again, refresh_every=3)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    run(again, resumed, range(4, 8))
    assert_same(parameters(again), parameters(model))


def test_a_layer_that_was_late_joins_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    apply = kronfac.methods.kfac.block.KFACBlock.precondition

    def spy(self: Any, solution: Any, gradient: Tensor, damping: float) -> Tensor:
        if gradient.shape[-2:] == (4, 5):
            seen.append(len(gradient))
        return apply(self, solution, gradient, damping)

    monkeypatch.setattr(kronfac.methods.kfac.block.KFACBlock, "precondition", spy)
    model = Twins()
    optimizer = kfac(model)
    for number in range(4):
        model.linear[1].requires_grad_(number not in (0, 2))
        step(model, optimizer, batch(number))
    assert seen == [2, 3, 2, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles_go_on_bit_for_bit(copied: Any, way: str) -> None:
    model = Twins()
    optimizer = kfac(model, refresh_every=2)
    train(model, optimizer, range(3))
    twin = copied(optimizer)
    train(model, optimizer, range(3, 6))
    train(twin.model, twin, range(3, 6))
    assert_same(parameters(twin.model), parameters(model))


def test_parts_take_no_more_memory_than_their_sum(way: str) -> None:
    model = Twins()
    optimizer = kfac(model)
    train(model, optimizer, range(3))
    storages = {}
    for state in layers(optimizer).values():
        for value in state.solution.values():
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    cost = sum(state.block.cost.solution_bytes for state in layers(optimizer).values())
    assert sum(storages.values()) == cost


def test_layers_of_another_precision_stay_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).float(), nn.Linear(4, 4))

    def forward(x: Tensor) -> Tensor:
        return model[2](model[1](model[0](x).float()).double())

    optimizer = kfac(model, SGD(model.parameters(), lr=0.1))
    x, y = batch()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
    kinds = [next(iter(s.solution.values())).dtype for s in layers(optimizer).values()]
    assert kinds == [torch.float64, torch.float32, torch.float64]
