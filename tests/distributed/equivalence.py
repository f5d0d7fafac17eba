"""One training run, in one process on whole batches and on ranks with a shard of each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kronfac
from tests.distributed.models import BASES, KINDS
from tests.training import parameters

Parameters = dict[str, Tensor]

#: Schemes that equal one process on the whole batch, with the way they are written.
SCHEMES: dict[str, Any] = {
    "auto": "auto",
    "replicated": "replicated",
    "comm-opt": "comm-opt",
    "mem-opt": "mem-opt",
    "hybrid": kronfac.Hybrid(0.5),
    "layer-parallel": "layer-parallel",
    "layer-parallel without DDP": "layer-parallel",
    "spd": "spd",
}


@dataclass(frozen=True)
class Case:
    """What is trained and how. ``options`` are those of the optimizer, ``kronfac.<method>``."""

    model: str = "mlp"
    method: str = "KFAC"
    base: str = "momentum"
    steps: int = 7
    samples: int = 12
    micro: int = 1
    uneven: bool = False
    syncs: bool = False
    """Whether DDP averages after each micro-batch and not only after the last."""
    compiled: str = ""
    """What is compiled on ranks: the model before or after it is wrapped, or the wrapped one later."""
    wrap: tuple[tuple[str, Any], ...] = ()
    """Options of DDP."""
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        default = Case()
        named = {
            name: getattr(self, name)
            for name in ("method", "base", "steps", "micro", "uneven", "syncs", "compiled")
            if getattr(self, name) != getattr(default, name)
        }
        pairs = [*named.items(), *self.wrap, *self.options]
        return " ".join([self.model, *(f"{name}={value}" for name, value in pairs)])


def case(model: str = "mlp", **settings: Any) -> Case:
    """A case; what is not a field of :class:`Case` is an option of its method.

    Steps are as long as their gradients, unless the case says otherwise: a gradient that is zero but for
    rounding (that of an attention's key bias) would grow with any other length, and with AdamW once more.
    """
    fields = {name: settings.pop(name) for name in list(settings) if name in Case.__annotations__}
    fields["wrap"] = tuple(fields.get("wrap", {}).items())
    chosen = {"damping": 0.01, "factor_every": 1, "refresh_every": 2, "rescale": "graft"} | settings
    return Case(model=model, options=tuple(chosen.items()), **fields)


@dataclass
class Outcome:
    """What a run leaves behind."""

    parameters: Parameters
    stats: dict[str, Any]
    scheme: str = ""
    differing_steps: list[int] = field(default_factory=list)
    """Steps after which the ranks' parameters were not the same bits."""
    history: list[Parameters] = field(default_factory=list)
    """Parameters after each step."""


@contextmanager
def double_precision() -> Iterator[None]:
    """Run in float64, so that equal formulas give equal numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- shards ----------------------------------------------------------------------------------


def bounds(samples: int, world_size: int, uneven: bool = False) -> list[tuple[int, int]]:
    """Where each rank's samples begin and end; uneven shards grow with the rank."""
    weights = [rank + 1 if uneven else 1 for rank in range(world_size)]
    ends = [samples * sum(weights[: rank + 1]) // sum(weights) for rank in range(world_size)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    case: Case,
    divisor: float | None = None,
) -> None:
    """Forward and backward in micro-batches, then a step.

    The loss is a mean; ``divisor`` is the number of samples that it is divided by instead.
    """
    optimizer.zero_grad()
    sampled = dict(case.options).get("fisher") in ("mc", "exact")
    exact = sampled or optimizer.needs_observe  # type: ignore[attr-defined]
    pieces = list(zip(*(part.chunk(case.micro) for part in data), strict=True))
    for number, (x, y) in enumerate(pieces):
        last = number == len(pieces) - 1
        wrapped = isinstance(model, DistributedDataParallel)
        quiet = wrapped and not last and not case.syncs
        with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            scores = model(x)
            if exact:
                optimizer.observe(scores)  # type: ignore[attr-defined]
            total = F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="sum")
            (total / ((divisor or len(y) * len(pieces)) * y[0].numel())).backward()
    optimizer.step()


# --- one process -----------------------------------------------------------------------------


@functools.cache
def alone(case: Case) -> Outcome:
    """The run in this process, on whole batches."""
    kind = KINDS[case.model]
    with double_precision():
        model = kind.model()
        make = getattr(kronfac, case.method)
        optimizer = make(model, BASES[case.base](model), **dict(case.options))
        history = []
        for number in range(case.steps):
            take_step(model, optimizer, kind.batch(number, case.samples), case)
            history.append(parameters(model))
        return Outcome(parameters(model), optimizer.stats(), history=history)


# --- ranks -----------------------------------------------------------------------------------


def same_bits(model: nn.Module, group: Any = None) -> bool:
    """Whether all ranks hold the same parameters."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    mine = mine.view(torch.int64 if mine.dtype == torch.float64 else torch.int32)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    return all(torch.equal(mine, other) for other in all_of_them)


def compile_model(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def on_ranks(rank: int, name: str, scheme: Any, cases: list[Case]) -> dict[str, Outcome]:
    """The runs on this rank's shards, by case."""
    with double_precision():
        return {str(one): on_rank(rank, one, scheme, "without DDP" not in name) for one in cases}


def on_rank(rank: int, case: Case, scheme: Any, wrapped: bool = True) -> Outcome:
    """The run on this rank's shards."""
    kind, world_size, options = KINDS[case.model], dist.get_world_size(), dict(case.options)
    divisor = case.samples / world_size if case.uneven else None
    if divisor is not None:
        options["loss_average"] = divisor
    plain = kind.model()
    model: Any = compile_model(plain) if case.compiled == "before" else plain
    model = DistributedDataParallel(model, **dict(case.wrap)) if wrapped else model
    model = compile_model(model) if case.compiled == "after" else model
    base = BASES[case.base](plain)
    optimizer = getattr(kronfac, case.method)(model, base, distribute=scheme, **options)
    model = compile_model(model) if case.compiled == "later" else model
    start, end = bounds(case.samples, world_size, case.uneven)[rank]
    outcome = Outcome({}, {})
    for number in range(case.steps):
        data = [part[start:end] for part in kind.batch(number, case.samples)]
        take_step(model, optimizer, (data[0], data[1]), case, divisor)
        outcome.history.append(parameters(plain))
        if not same_bits(plain):
            outcome.differing_steps.append(number)
    outcome.parameters, outcome.stats = parameters(plain), optimizer.stats()
    if optimizer.placement is not None:  # one rank shares nothing out
        outcome.scheme = str(optimizer.placement.scheme)
    return outcome


def assert_equals_one_process(case: Case, outcomes: list[Outcome]) -> None:
    """Every rank ends where one process ends, and all ranks held the same bits all the time."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.differing_steps == [], f"{case}: ranks differ, seen by rank {rank}"
        assert_near(outcome.parameters, alone(case).parameters, f"{case}, rank {rank}")


def assert_near(left: Parameters, right: Parameters, where: str) -> None:
    """Equal up to the rounding of float64."""
    assert left.keys() == right.keys(), where
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{where}, {n!r}: {m}"
        )
