"""The same runs on several ranks: each has a part of every batch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kronfac
from tests.distributed.equivalence import same_bits
from tests.fuzz.cases import Case, Part, for_ranks, make_case
from tests.fuzz.training import backward, values

STEPS = 5


class World:
    """How a seed's run is shared out over ranks."""

    def __init__(self, seed: int) -> None:
        rng = Random(5_000_011 + seed)
        self.size = rng.choice([2, 3])
        scheme = rng.choice(
            ["auto", "replicated", "comm-opt", "mem-opt", "layer-parallel", "spd", "hybrid"]
        )
        flags = ("overlap", "triangles", "deferred", "balanced", "split")
        self.scheme = kronfac.Distribute(
            kronfac.Hybrid(0.5) if scheme == "hybrid" else scheme,
            **{name: rng.random() < 0.7 for name in flags},
        )
        self.wrapped = scheme != "layer-parallel" or rng.random() < 0.5
        self.case = for_ranks(make_case(seed), self.size)

    def __str__(self) -> str:
        return f"{self.size} ranks, {self.scheme}, DDP: {self.wrapped}\n{self.case}"


def alone(case: Case, nudge: float = 0.0) -> list[dict[str, Tensor]]:
    """Parameters after each step of one process that has the whole batches.

    ``nudge`` moves the first parameters by a little, which shows what becomes of rounding.
    """
    net, _ = case.make()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + nudge * drawn.to(parameter.dtype))
    optimizer = case.optimizer(net)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.micro):
            whole = [shard(case, step, rank)[micro] for rank in range(case.ranks)]
            x, targets = (torch.cat([getattr(p, n) for p in whole]) for n in ("x", "targets"))
            part = Part(x, targets, whole[0].divisor * case.ranks)
            backward(net, net, optimizer, case, part, step, micro)
        optimizer.step()
        history.append(values(net))
    return history


def shard(case: Case, step: int, rank: int) -> list[Part]:
    """The micro-batches of a rank, whose mean over ranks is the loss of the whole batch."""
    (whole,) = case.batch(step, micro=1)
    parts = [part.chunk(case.ranks)[rank].chunk(case.micro) for part in (whole.x, whole.targets)]
    return [Part(x, y, whole.divisor / case.ranks) for x, y in zip(*parts, strict=True)]


def on_rank(rank: int, seed: int) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Parameters after each step, and the steps after which ranks did not have the same bits."""
    warnings.simplefilter("ignore", UserWarning)  # advice on settings that were drawn by chance
    world = World(seed)
    case = world.case
    net, _ = case.make()
    model: nn.Module = net
    if world.wrapped:
        model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = case.optimizer(net, model, distribute=world.scheme, **_own_average(case))
    history, differing = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro, part in enumerate(shard(case, step, rank)):
            last = micro == case.micro - 1
            quiet: Any = nullcontext() if last or not world.wrapped else model.no_sync()  # type: ignore[operator]
            with quiet:
                backward(net, model, optimizer, case, part, step, micro)
        optimizer.step()
        history.append(values(net))
        if not same_bits(net):
            differing.append(step)
    return history, differing


def _own_average(case: Case) -> dict[str, float]:
    """A number that the loss was divided by is that of the rank's own loss."""
    average = case.options["loss_average"]
    return {} if isinstance(average, str) else {"loss_average": average / case.ranks}
