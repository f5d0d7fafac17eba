"""K-FAC inside process groups that the user gives."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kronfac
from tests.distributed.equivalence import (
    Case,
    Outcome,
    alone,
    assert_near,
    bounds,
    case,
    double_precision,
    same_bits,
    take_step,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.training import parameters

#: Two trainings that have nothing in common.
CASES = [case("mlp", steps=5), case("cnn", base="adamw", refresh_every=3, steps=7)]


def train_in_group(one: Case, group: Any, ranks: list[int], scheme: Any, wrapped: bool) -> Outcome:
    kind, position = KINDS[one.model], dist.get_rank(group)
    plain = kind.model()
    model = DistributedDataParallel(plain, process_group=group) if wrapped else plain
    optimizer = kronfac.KFAC(
        model,
        BASES[one.base](plain),
        distribute=scheme,
        process_group=group,
        **dict(one.options),
    )
    outcome = Outcome({}, {})
    start, end = bounds(one.samples, len(ranks))[position]
    for number in range(one.steps):
        x, y = kind.batch(number, one.samples)
        take_step(model, optimizer, (x[start:end], y[start:end]), one)
        if not same_bits(plain, group):
            outcome.differing_steps.append(number)
    outcome.parameters, outcome.stats = parameters(plain), optimizer.stats()
    return outcome


def two_groups(rank: int, members: list[list[int]], scheme: Any, wrapped: bool) -> Outcome:
    groups = [dist.new_group(ranks) for ranks in members]
    number = next(number for number, ranks in enumerate(members) if rank in ranks)
    with double_precision():
        return train_in_group(CASES[number], groups[number], members[number], scheme, wrapped)


@pytest.mark.parametrize(
    ("scheme", "wrapped"),
    [
        ("replicated", True),
        ("comm-opt", True),
        ("mem-opt", True),
        (kronfac.Hybrid(0.5), True),
        ("layer-parallel", True),
        ("layer-parallel", False),
        ("spd", True),
        ("auto", True),
    ],
    ids=str,
)
def test_two_groups_train_each_on_their_own(scheme: Any, wrapped: bool) -> None:
    members = [[0, 1], [2, 3]]
    outcomes = run(4, two_groups, members, scheme, wrapped)
    for one, ranks in zip(CASES, members, strict=True):
        for rank in ranks:
            assert outcomes[rank].differing_steps == []
            assert_near(outcomes[rank].parameters, alone(one).parameters, f"rank {rank}")


@pytest.mark.parametrize("scheme", ["mem-opt", "layer-parallel"])
@pytest.mark.parametrize("members", [[[0, 2], [3, 1]], [[2], [0, 1, 3]]], ids=str)
def test_groups_of_any_ranks(scheme: str, members: list[list[int]]) -> None:
    outcomes = run(4, two_groups, members, scheme, True)
    for one, ranks in zip(CASES, members, strict=True):
        for rank in ranks:
            assert outcomes[rank].differing_steps == []
            assert_near(outcomes[rank].parameters, alone(one).parameters, f"rank {rank}")


def in_a_group_of_the_wrapper(rank: int, scheme: str) -> Outcome:
    """The group is given to DDP only, which is where a user has it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, one = groups[rank // 2], CASES[rank // 2]
    with double_precision():
        kind = KINDS[one.model]
        plain = kind.model()
        model = DistributedDataParallel(plain, process_group=group)
        base = BASES[one.base](plain)
        optimizer = kronfac.KFAC(model, base, distribute=scheme, **dict(one.options))
        start, end = bounds(one.samples, 2)[rank % 2]
        for number in range(one.steps):
            x, y = kind.batch(number, one.samples)
            take_step(model, optimizer, (x[start:end], y[start:end]), one)
        return Outcome(parameters(plain), optimizer.stats())


def test_the_group_of_a_wrapped_model_is_the_default() -> None:
    outcomes = run(4, in_a_group_of_the_wrapper, "comm-opt")
    for rank, outcome in enumerate(outcomes):
        assert_near(outcome.parameters, alone(CASES[rank // 2]).parameters, f"rank {rank}")
