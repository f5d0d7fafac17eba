""" "local" against its own definition: the owner's statistics are those of its own shard alone."""

import pytest
import torch
from torch import Tensor

import kronfac
from tests.distributed.equivalence import (
    Case,
    Parameters,
    alone,
    assert_near,
    bounds,
    case,
    double_precision,
    on_ranks,
    take_step,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.training import parameters


class Simulation:
    """One optimizer per rank, each of which sees its own shard and precondition the mean gradient."""

    def __init__(self, case: Case, world_size: int) -> None:
        self.case, self.world_size = case, world_size
        self.models = [KINDS[case.model].model() for _ in range(world_size)]
        self.optimizers = [
            kronfac.KFAC(model, BASES[case.base](model), **dict(case.options))
            for model in self.models
        ]

    def step(self, number: int) -> list[Parameters]:
        """What each rank would make of each layer."""
        x, y = KINDS[self.case.model].batch(number, self.case.samples)
        shards = bounds(self.case.samples, self.world_size)
        for model, optimizer, (start, end) in zip(
            self.models, self.optimizers, shards, strict=True
        ):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[start:end]), y[start:end])
            loss.backward()
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([gradient(p) for p in same]).mean(0)
            for parameter in same:
                gradient(parameter).copy_(mean)
        for optimizer in self.optimizers:
            optimizer.step()
        return [parameters(model) for model in self.models]

    @torch.no_grad()
    def adopt(self, name: str, owner: int) -> None:
        """All ranks take the owner's value of a parameter."""
        value = self.models[owner].get_parameter(name)
        for model in self.models:
            model.get_parameter(name).copy_(value)


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def near(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "one", [case("mlp"), case("cnn", refresh_every=3, base="adamw", momentum=0.5)], ids=str
)
def test_each_layer_is_what_its_owner_makes_of_its_own_shard(one: Case, world_size: int) -> None:
    by_rank = run(world_size, on_ranks, "local", "local", [one])
    outcomes = [outcomes[str(one)] for outcomes in by_rank]
    assert all(outcome.differing_steps == [] for outcome in outcomes)
    with double_precision():
        simulation = Simulation(one, world_size)
        owners: dict[str, set[int]] = {}
        for number in range(one.steps):
            actual, candidates = outcomes[0].history[number], simulation.step(number)
            for name, value in actual.items():
                fitting = {r for r in range(world_size) if near(value, candidates[r][name])}
                layer = name.rpartition(".")[0]
                owners[layer] = owners.get(layer, fitting) & fitting
                assert owners[layer], f"step {number}: nobody's {name!r}"
                simulation.adopt(name, min(owners[layer]))
    assert all(len(ranks) == 1 for ranks in owners.values())
    assert len(set.union(*owners.values())) > 1, "one rank does everything"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_the_same_samples_on_every_rank_it_is_one_process_on_those(world_size: int) -> None:
    one = case("cnn")
    by_rank = run(world_size, same_samples_everywhere, one)
    for history in by_rank:
        assert_near(history[-1], alone(one).parameters, "local")


def same_samples_everywhere(rank: int, one: Case) -> list[Parameters]:
    kind = KINDS[one.model]
    with double_precision():
        plain = kind.model()
        model = torch.nn.parallel.DistributedDataParallel(plain)
        base = BASES[one.base](model)
        optimizer = kronfac.KFAC(model, base, distribute="local", **dict(one.options))
        history = []
        for number in range(one.steps):
            take_step(model, optimizer, kind.batch(number, one.samples), one)
            history.append(parameters(plain))
        return history
