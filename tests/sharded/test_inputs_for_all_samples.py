"""Layers under tensor parallelism that see ordinary inputs and inputs that stand for all samples."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kronfac
from tests.distributed.equivalence import assert_near, case, double_precision
from tests.distributed.models import BASES
from tests.distributed.ranks import run
from tests.sharded.harness import ignore_advice, whole_parameters
from tests.sharded.test_tensor_parallel import TOKENS, WIDTH, WORDS, steps


class Both(nn.Module):
    """An embedding, a norm and two linear layers, each of which sees both kinds of inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.queries = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def inner(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.embedding(torch.arange(TOKENS)[None])
        found: Tensor = self.head(x * self.inner(self.queries) + self.inner(x))
        return found


def parallelize(model: Both, mesh: Any) -> None:
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    plan = {
        "embedding": RowwiseParallel(**whole),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(**whole),
    }
    parallelize_module(model, mesh, plan)


#: What is sent during the passes and what at the step is added up in different places.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "late": {"distribute": kronfac.Distribute(overlap=False)},
    "token": {"loss_average": "token"},
    "exact": {"fisher": "exact"},
}


def made(model: nn.Module, name: str) -> Any:
    options = dict(case("mlp", **OPTIONS[name]).options)
    return kronfac.KFAC(model, BASES["momentum"](model), **options)


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    with double_precision():
        model = Both()
        steps(model, made(model, name), slice(0, 12))
        return {key: p.detach().clone() for key, p in model.named_parameters()}


def trained(rank: int, name: str, shape: tuple[int, int], micro: int) -> dict[str, Tensor]:
    ignore_advice()
    with double_precision():
        data, tensor = shape
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = Both()
        parallelize(model, mesh["tp"])
        if data > 1:
            fully_shard(model, mesh=mesh["dp"])
        size = 12 // data
        start = rank // tensor * size
        steps(model, made(model, name), slice(start, start + size), micro)
        return whole_parameters(model)


def check(name: str, shape: tuple[int, int], micro: int = 1) -> None:
    for found in run(shape[0] * shape[1], trained, name, shape, micro):
        assert_near(found, expected(name), f"{name}, {shape}, {micro}")


def test_both_kinds_of_inputs_count_once() -> None:
    check("default", (1, 2))


# No micro-batch has as many samples as there are tokens: [1, N, d] would be samples, not positions.
@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)], ids=str)
def test_every_way(shape: tuple[int, int], name: str, micro: int) -> None:
    check(name, shape, micro)
