"""Trap 8 in full: a loss that is divided by the tokens of all ranks, some of which are ignored.

torchtitan adds the losses of a rank's tokens, divides them by the number of tokens of all ranks and
micro-batches that are not ignored, and has FSDP2 add gradients up.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import kronfac
from tests.distributed.equivalence import assert_near, case, double_precision
from tests.distributed.models import BASES
from tests.distributed.ranks import run
from tests.sharded.harness import ignore_advice, whole_parameters
from tests.sharded.test_tensor_parallel import TOKENS, WORDS, Decoder, parallelize

IGNORED, SAMPLES, STEPS = -100, 12, 4

OPTIONS: dict[str, dict[str, Any]] = {
    "graft": {},
    "auto": {"rescale": "auto", "momentum": 0.9},
    "late": {"distribute": kronfac.Distribute(overlap=False)},
    "exact": {"fisher": "exact"},
    "iEF": {"method": "IEF"},
}


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which later samples ignore more, and the second half all in one step."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator)
    y = torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator)
    rare = torch.rand(SAMPLES, TOKENS, generator=generator)
    share = torch.linspace(0.2, 0.9, SAMPLES)[:, None]
    if number == 2:
        share = (torch.arange(SAMPLES) >= SAMPLES // 2).to(share)[:, None]
    return x, y.masked_fill(rare < share, IGNORED)


def made(model: nn.Module, name: str) -> Any:
    one = case("mlp", loss_average="token", **OPTIONS[name])
    return getattr(kronfac, one.method)(model, BASES["momentum"](model), **dict(one.options))


def steps(model: nn.Module, optimizer: Any, own: slice, micro: int = 1) -> None:
    for number in range(STEPS):
        x, y = batch(number)
        tokens = int((y != IGNORED).sum())
        optimizer.zero_grad()
        for inputs, targets in zip(x[own].chunk(micro), y[own].chunk(micro), strict=True):
            scores = model(inputs)
            if optimizer.needs_observe:
                optimizer.observe(scores, ignore_index=IGNORED, mask=targets != IGNORED)
            flat, wanted = scores.flatten(0, -2), targets.flatten()
            loss = F.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED)
            (loss / tokens).backward()
        optimizer.step()


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    with double_precision():
        model = Decoder()
        steps(model, made(model, name), slice(0, SAMPLES))
        return {key: p.detach().clone() for key, p in model.named_parameters()}


def trained(
    rank: int, name: str, shape: tuple[int, int], micro: int = 1, parts_of_scores: bool = False
) -> dict[str, Tensor]:
    ignore_advice()
    with double_precision():
        data, tensor = shape
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = Decoder()
        if tensor > 1:
            parallelize(model, mesh["tp"], "linear" if parts_of_scores else "all")
        if parts_of_scores:
            parts = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(model, mesh["tp"], {"head": parts})
        if data > 1:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh["dp"])
                module.set_gradient_divide_factor(1.0)
        size = SAMPLES // data
        own = slice(rank // tensor * size, (rank // tensor + 1) * size)
        with loss_parallel() if parts_of_scores else nullcontext():
            steps(model, made(model, name), own, micro)
        return whole_parameters(model)


def check(name: str, shape: tuple[int, int], *further: Any) -> None:
    for found in run(shape[0] * shape[1], trained, name, shape, *further):
        assert_near(found, expected(name), f"{name}, {shape}, {further}")


def test_ranks_that_ignore_other_targets() -> None:
    check("graft", (2, 1))


def test_a_group_of_tensor_parallelism_has_the_tokens_of_one() -> None:
    check("graft", (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (1, 2), (2, 2)], ids=str)
def test_every_way(shape: tuple[int, int], name: str, micro: int) -> None:
    check(name, shape, micro)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_scores_of_which_each_rank_has_a_part(shape: tuple[int, int], name: str) -> None:
    check(name, shape, 1, True)
