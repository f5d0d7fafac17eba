"""Ranks that run out of batches before others: `Join([model, optimizer])`."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import kronfac
from tests.distributed.equivalence import (
    Outcome,
    Parameters,
    assert_near,
    double_precision,
    same_bits,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.training import parameters

OPTIONS: dict[str, Any] = {"damping": 0.01, "factor_every": 1, "refresh_every": 2}
SAMPLES = 4
#: Batches of each rank, by epoch.
EPOCHS = {2: [(2, 4), (3, 2)], 3: [(1, 4, 2), (3, 3, 3)], 4: [(2, 1, 3, 5), (2, 2, 1, 1)]}


def number_of(epoch: int, batch: int, rank: int) -> int:
    return 1000 * epoch + 10 * batch + rank


def joined(rank: int, scheme: Any, base: str, epochs: list[tuple[int, ...]]) -> Outcome:
    """Parameters after each epoch."""
    kind = KINDS["mlp"]
    with double_precision():
        plain = kind.model()
        model = DistributedDataParallel(plain)
        optimizer = kronfac.KFAC(model, BASES[base](plain), distribute=scheme, **OPTIONS)
        outcome = Outcome({}, {})
        for epoch, batches in enumerate(epochs):
            with Join([model, optimizer]):
                for batch in range(batches[rank]):
                    x, y = kind.batch(number_of(epoch, batch, rank), SAMPLES)
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            outcome.history.append(parameters(plain))
            if not same_bits(plain):
                outcome.differing_steps.append(epoch)
        outcome.parameters, outcome.stats = parameters(plain), optimizer.stats()
        return outcome


def in_one_process(base: str, epochs: list[tuple[int, ...]]) -> list[Parameters]:
    """The ranks that still have a batch in turn; DDP divides by the number of all ranks."""
    kind = KINDS["mlp"]
    with double_precision():
        model = kind.model()
        optimizer = kronfac.KFAC(model, BASES[base](model), **OPTIONS)
        history = []
        for epoch, batches in enumerate(epochs):
            for batch in range(max(batches)):
                active = [rank for rank, number in enumerate(batches) if batch < number]
                optimizer.zero_grad()
                for rank in active:
                    x, y = kind.batch(number_of(epoch, batch, rank), SAMPLES)
                    (F.cross_entropy(model(x), y) / len(active)).backward()
                for parameter in model.parameters():
                    parameter.grad *= len(active) / len(batches)
                optimizer.step()
            history.append(parameters(model))
        return history


@pytest.mark.parametrize("base", ["sgd", "momentum"])
@pytest.mark.parametrize(
    ("scheme", "world_size"),
    [
        ("replicated", 2),
        ("comm-opt", 2),
        ("comm-opt", 4),
        ("mem-opt", 3),
        (kronfac.Hybrid(0.5), 4),
        ("layer-parallel", 2),
        ("spd", 3),
        ("auto", 2),
    ],
    ids=str,
)
def test_a_rank_without_batches_contributes_nothing_and_stays_in_step(
    scheme: Any, world_size: int, base: str
) -> None:
    epochs = EPOCHS[world_size]
    expected = in_one_process(base, epochs)
    for rank, outcome in enumerate(run(world_size, joined, scheme, base, epochs)):
        assert outcome.differing_steps == []
        assert outcome.stats["steps"] == sum(max(batches) for batches in epochs)
        for epoch, values in enumerate(outcome.history):
            assert_near(values, expected[epoch], f"rank {rank}, epoch {epoch}")


def test_local_statistics_stay_in_step_too() -> None:
    epochs = EPOCHS[3]
    for outcome in run(3, joined, "local", "momentum", epochs):
        assert outcome.differing_steps == []
        assert outcome.stats["steps"] == sum(max(batches) for batches in epochs)


def join_the_model_alone(rank: int) -> None:
    kind = KINDS["mlp"]
    model = DistributedDataParallel(kind.model())
    optimizer = kronfac.KFAC(model, BASES["sgd"](model), distribute="comm-opt", **OPTIONS)
    with model.join():
        for batch in range(2 + rank):
            x, y = kind.batch(batch, SAMPLES)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_joining_the_model_alone_is_a_clear_error() -> None:
    for error in run(2, join_the_model_alone, expect_errors=True):
        assert isinstance(error, RuntimeError)
        assert "Join([model, optimizer])" in str(error)
