"""Runs in which ranks do not all do the same, and the same runs in one process.

One process takes the ranks' shards in turn, as micro-batches of one step: what a rank contributes, a
pass contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kronfac
from tests.distributed.equivalence import (
    Outcome,
    assert_near,
    double_precision,
    same_bits,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.training import parameters

#: Where scenarios run: name of the scheme, what `distribute` is, ranks.
PLACES: list[tuple[str, Any, int]] = [
    ("replicated", "replicated", 2),
    ("comm-opt", "comm-opt", 3),
    ("mem-opt", "mem-opt", 2),
    ("hybrid", kronfac.Hybrid(0.5), 4),
    ("layer-parallel", "layer-parallel", 2),
    ("layer-parallel without DDP", "layer-parallel", 3),
    ("spd", "spd", 2),
]
NAMES = [place[0] for place in PLACES]


class Scenario:
    """A run, step by step and rank by rank. Subclasses say what is special about it."""

    kind = "mlp"
    base = "momentum"
    steps = 6
    samples = 4
    wrap: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {"damping": 0.01, "factor_every": 1, "refresh_every": 2}  # noqa: RUF012
    scaled = False
    #: Steps before which ranks save their state and go on with a new optimizer that loads it.
    resumes: tuple[int, ...] = ()

    def model(self) -> nn.Module:
        return KINDS[self.kind].model()

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        return KINDS[self.kind].batch(100 * step + rank, self.samples)

    def before(self, model: nn.Module, optimizer: kronfac.KFAC, step: int, rank: int) -> None:
        """What a rank does before its forward of a step; ``model`` is never wrapped."""

    def loss(self, scores: Tensor, labels: Tensor, step: int, rank: int) -> Tensor:
        return F.cross_entropy(scores, labels)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(
            "cpu", enabled=self.scaled, init_scale=1024.0, growth_interval=2
        )


def in_turn(scenario: Scenario, world_size: int) -> Outcome:
    """The run in this process."""
    with double_precision():
        model = scenario.model()
        base = BASES[scenario.base](model)
        optimizer = kronfac.KFAC(model, base, **scenario.options)
        scaler, history = scenario.scaler(), []
        for step in range(scenario.steps):
            optimizer.zero_grad()
            for rank in range(world_size):
                scenario.before(model, optimizer, step, rank)
                x, y = scenario.batch(step, rank)
                loss = scenario.loss(model(x), y, step, rank) / world_size
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(parameters(model))
        return Outcome(parameters(model), optimizer.stats(), history=history)


def on_rank(rank: int, scenario: Scenario, name: str, scheme: Any) -> Outcome:
    """The run on this rank."""
    with double_precision():
        plain = scenario.model()
        wrapped = "without DDP" not in name
        model = DistributedDataParallel(plain, **scenario.wrap) if wrapped else plain
        base = BASES[scenario.base](plain)
        optimizer = kronfac.KFAC(model, base, distribute=scheme, **scenario.options)
        scaler, outcome = scenario.scaler(), Outcome({}, {})
        for step in range(scenario.steps):
            if step in scenario.resumes:
                state = [optimizer.full_state_dict()]
                dist.broadcast_object_list(state, src=0)
                optimizer.detach()
                base = BASES[scenario.base](plain)
                optimizer = kronfac.KFAC(model, base, distribute=scheme, **scenario.options)
                optimizer.load_state_dict(state[0])
            optimizer.zero_grad()
            scenario.before(plain, optimizer, step, rank)
            x, y = scenario.batch(step, rank)
            scaler.scale(scenario.loss(model(x), y, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update()
            outcome.history.append(parameters(plain))
            if not same_bits(plain):
                outcome.differing_steps.append(step)
        outcome.parameters, outcome.stats = parameters(plain), optimizer.stats()
        return outcome


def check(scenario: Scenario, name: str) -> tuple[Sequence[Outcome], Outcome]:
    """Ranks agree with each other after every step, and with one process."""
    scheme, world_size = next(place[1:] for place in PLACES if place[0] == name)
    outcomes: list[Outcome] = run(world_size, on_rank, scenario, name, scheme)
    expected = in_turn(scenario, world_size)
    for rank, outcome in enumerate(outcomes):
        assert outcome.differing_steps == [], f"ranks differ, seen by rank {rank}"
        for step, (left, right) in enumerate(zip(outcome.history, expected.history, strict=True)):
            assert_near(left, right, f"rank {rank}, step {step}")
    return outcomes, expected
