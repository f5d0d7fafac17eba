"""One training run, in one process on whole batches and on ranks that shard model and batch.

The cases, and the run in one process, are those of ``tests/distributed``; only the ranks differ.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import kronfac
from tests.distributed.equivalence import (
    Case,
    Parameters,
    alone,
    assert_near,
    bounds,
    double_precision,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run


@dataclass(frozen=True)
class Way:
    """How a model is sharded."""

    units: str = "blocks"
    """What is gathered at once: the ``"model"``, its ``"blocks"``, or its ``"leaves"``."""
    replicas: int = 1
    """How many groups of ranks hold all shards."""
    dim: int = 0
    """The dimension of weights that is sharded; of vectors it is 0."""
    reshard: bool = True
    """Whether blocks give their weights back between forward and backward."""
    order: str = "after"
    """Whether the optimizer is built before or after sharding, or sharding and filling of memory."""


def on_dim(dim: int, parameter: nn.Parameter) -> Shard:
    return Shard(dim if parameter.dim() > dim else 0)


def units_of(model: nn.Module, units: str) -> list[nn.Module]:
    """The modules that are sharded on their own, the innermost first."""
    if units == "model":
        return []
    if units == "leaves":  # attention reads its output projection's weight without calling it
        inner = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        hidden = {m.out_proj for m in inner}
        leaves = [m for m in model.modules() if next(m.children(), None) is None]
        return [
            m for m in [*leaves, *inner] if m not in hidden and any(True for _ in m.parameters())
        ]
    return [m for m in model.children() if any(True for _ in m.parameters())]


def shard(model: nn.Module, way: Way, **further: Any) -> nn.Module:
    """Shard a model over all ranks."""
    size = dist.get_world_size()
    shape = (size,) if way.replicas == 1 else (way.replicas, size // way.replicas)
    names = ("replicate", "shard")[-len(shape) :]
    further.setdefault("mesh", init_device_mesh("cpu", shape, mesh_dim_names=names))
    options = {"reshard_after_forward": way.reshard, **further}
    if way.dim:
        options["shard_placement_fn"] = partial(on_dim, way.dim)
    for module in units_of(model, way.units):
        if way.dim == 0 or even(module, way, shape[-1]):
            fully_shard(module, **options)
    if way.dim:
        del options["shard_placement_fn"]
    fully_shard(model, **options)
    return model


def even(module: nn.Module, way: Way, size: int) -> bool:
    """FSDP2 shards dimensions other than 0 only evenly."""
    own = [p for p in module.parameters() if p.dim() > way.dim]
    return all(p.shape[way.dim] % size == 0 for p in own)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def whole_parameters(model: nn.Module) -> Parameters:
    """All parameters by name, with the same ones left out as in one process."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: whole(p) for name, p in model.named_parameters()}


def take_step(
    model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor], case: Case, divisor: float | None
) -> None:
    """Forward and backward in micro-batches, then a step, as ``tests/distributed`` does it."""
    optimizer.zero_grad()
    exact = dict(case.options).get("fisher") in ("mc", "exact") or optimizer.needs_observe
    pieces = list(zip(*(part.chunk(case.micro) for part in data), strict=True))
    for number, (x, y) in enumerate(pieces):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(pieces) - 1 or case.syncs)
        scores = model(x)
        if exact:
            optimizer.observe(scores)
        total = F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="sum")
        (total / ((divisor or len(y) * len(pieces)) * y[0].numel())).backward()
    optimizer.step()


@dataclass
class Outcome:
    """What a run leaves behind on one rank."""

    parameters: Parameters
    stats: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    #: Local shards at the end.
    shards: Parameters = field(default_factory=dict)


def build(case: Case, way: Way, **further: Any) -> tuple[nn.Module, Any]:
    """The sharded model and its optimizer."""
    options = dict(case.options)
    if case.uneven:
        options["loss_average"] = case.samples / dist.get_world_size()
    model = KINDS[case.model].model()
    make = getattr(kronfac, case.method)
    if way.order == "before":
        optimizer = make(model, BASES[case.base](model), **options)
        shard(model, way, **further)
    else:
        shard(model, way, **further)
        optimizer = make(model, BASES[case.base](model), **options)
    return model, optimizer


def train(
    rank: int, model: nn.Module, optimizer: Any, case: Case, first: int = 0, observers: int = 1
) -> None:
    """The steps of a case on this rank's samples, which so many neighbours see as well."""
    kind = KINDS[case.model]
    size = dist.get_world_size() // observers if dist.is_initialized() else 1
    rank = rank // observers
    start, end = bounds(case.samples, size, case.uneven)[rank]
    divisor = case.samples / size if case.uneven else None
    for number in range(first, case.steps):
        x, y = (part[start:end] for part in kind.batch(number, case.samples))
        take_step(model, optimizer, (x, y), case, divisor)


def on_rank(rank: int, case: Case, way: Way) -> Outcome:
    """The run on this rank's samples."""
    model, optimizer = build(case, way)
    train(rank, model, optimizer, case)
    shards = {
        n: p.to_local().clone() for n, p in model.named_parameters() if isinstance(p, DTensor)
    }
    return Outcome(whole_parameters(model), optimizer.stats(), str(optimizer), shards)


def ignore_advice() -> None:
    """Attention returns views, of which FSDP2 warns, and compilers look at tensors' ``.grad``."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not", UserWarning)


def on_ranks(rank: int, runs: list[tuple[Case, Way]]) -> list[Outcome]:
    ignore_advice()
    with double_precision():
        return [on_rank(rank, case, way) for case, way in runs]


def check(size: int, *runs: tuple[Case, Way]) -> list[list[Outcome]]:
    """Every rank ends where one process ends; returns outcomes by run and rank."""
    by_rank = run(size, on_ranks, list(runs))
    for index, (case, way) in enumerate(runs):
        for rank in range(size):
            found = by_rank[rank][index].parameters
            assert_near(found, alone(case).parameters, f"{case}, {way}, rank {rank} of {size}")
    return [[by_rank[rank][index] for rank in range(size)] for index in range(len(runs))]
