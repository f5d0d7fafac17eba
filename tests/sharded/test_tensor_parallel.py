"""Tensor parallelism, alone and with FSDP2, equals one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import kronfac
from tests.distributed.equivalence import assert_near, case, double_precision
from tests.distributed.models import BASES
from tests.distributed.ranks import run
from tests.sharded.harness import ignore_advice, whole_parameters

#: A token that a rank does not have, and a length, are no multiple of the number of ranks.
WORDS, WIDTH, TOKENS = 8, 4, 4


class Block(nn.Module):
    def __init__(self, repeats: str = "") -> None:
        super().__init__()
        self.repeats = repeats
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.repeats:
            found: Tensor = checkpoint(self.inner, x, use_reentrant=self.repeats == "reentrant")
            return found
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, positions: bool = False, repeats: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH) if positions else None
        self.blocks = nn.ModuleList([Block(repeats), Block(repeats)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(TOKENS)[None])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: Decoder, mesh: Any, how: str) -> None:
    """Linear layers, and with them embeddings, the head, and norms over parts of the sequence."""
    linear: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how == "sequence":
        linear = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, linear)
    plan: dict[str, Any] = {}
    if how in ("all", "sequence"):
        shards = Shard(1) if how == "sequence" else Replicate()
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=shards)
        plan["head"] = ColwiseParallel(input_layouts=shards, output_layouts=Replicate())
    if how == "columns":
        plan["embedding"] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if plan:
        parallelize_module(model, mesh, plan)


OPTIONS: dict[str, dict[str, Any]] = {
    "graft": {},
    "cholesky": {"solver": "cholesky"},
    "blocks": {"block_dim": 3},
    "kl-clip": {"rescale": "kl-clip"},
    "clip": {"max_grad_norm": 0.1},
    "auto": {"rescale": "auto", "momentum": 0.9},
    "token": {"loss_average": "token"},
    "exact": {"fisher": "exact"},
    "positions": {},
    "rows": {"rows": 4096},
    "late": {"distribute": kronfac.Distribute(overlap=False)},
}


def options_of(name: str) -> dict[str, Any]:
    return dict(case("mlp", **OPTIONS[name]).options)


def samples_of(name: str) -> int:
    """So many that some rows are left out, if that is what is tested."""
    return 2400 if name == "rows" else 12


def steps(model: nn.Module, optimizer: Any, part: slice, micro: int = 1, samples: int = 12) -> None:
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(WORDS, (samples, TOKENS), generator=generator)
        y = torch.randint(WORDS, (samples, TOKENS), generator=generator)
        optimizer.zero_grad()
        for inputs, labels in zip(x[part].chunk(micro), y[part].chunk(micro), strict=True):
            scores = model(inputs)
            if optimizer.needs_observe:
                optimizer.observe(scores)
            loss = F.cross_entropy(scores.flatten(0, -2), labels.flatten())
            (loss / micro).backward()
        optimizer.step()


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    with double_precision():
        model = Decoder(name == "positions")
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **options_of(name))
        samples = samples_of(name)
        steps(model, optimizer, slice(0, samples), samples=samples)
        return {key: p.detach().clone() for key, p in model.named_parameters()}


def trained(
    rank: int, how: str, name: str, shape: tuple[int, int], way: str = ""
) -> dict[str, Tensor]:
    ignore_advice()
    with double_precision():
        data, tensor = shape
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = Decoder(name == "positions", way if "reentrant" in way else "")
        parallelize(model, mesh["tp"], how)
        for block in model.blocks if way == "compiled" else []:
            block.compile(backend="aot_eager", fullgraph=True)
        if data > 1:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **options_of(name))
        # Every kind of layer is preconditioned, norms and embeddings too.
        kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
        named = {name for name, one in model.named_modules() if isinstance(one, kinds)}
        assert {state.name for state in optimizer.layers} == named
        samples = samples_of(name)
        size = samples // data
        start = rank // tensor * size
        micro = 3 if way == "micro" else 1
        steps(model, optimizer, slice(start, start + size), micro, samples)
        return whole_parameters(model)


@pytest.mark.parametrize("name", ["graft", "blocks"])
def test_linear_layers_and_embeddings(name: str) -> None:
    for found in run(2, trained, "all", name, (1, 2)):
        assert_near(found, expected(name), f"tensor parallel, {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graft", "cholesky"])
@pytest.mark.parametrize("way", ["compiled", "reentrant", "non-reentrant", "micro"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)], ids=str)
def test_ways_of_training(way: str, name: str, shape: tuple[int, int]) -> None:
    # Between embeddings under tensor parallelism and blocks that are compiled torch itself fails.
    how = "linear" if way == "compiled" else "all"
    for found in run(shape[0] * shape[1], trained, how, name, shape, way):
        assert_near(found, expected(name), f"{way}, {name}, {shape}")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("how", ["linear", "all", "columns", "sequence"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)], ids=str)
def test_every_way(how: str, name: str, shape: tuple[int, int]) -> None:
    if how == "sequence" and (shape[1] == 3 or name == "positions"):
        pytest.skip("the sequence is not divisible, or positions come as a whole")
    for found in run(shape[0] * shape[1], trained, how, name, shape):
        assert_near(found, expected(name), f"{how}, {name}, {shape}")
