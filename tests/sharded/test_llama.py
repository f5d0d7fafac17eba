"""A Llama as torchtitan trains it, with the default line: FSDP2, HSDP, and with tensor parallelism."""

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
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import kronfac
from tests.distributed.equivalence import assert_near, double_precision
from tests.distributed.ranks import run
from tests.sharded.harness import ignore_advice, whole_parameters

WORDS, WIDTH, HEAD, TOKENS, SAMPLES, STEPS, IGNORED = 16, 8, 2, 4, 12, 6, -100


def turned(x: Tensor) -> Tensor:
    """Rotary positions: each pair of features turns with its place."""
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / (1 + torch.arange(HEAD // 2))
    one, two = x.chunk(2, -1)
    return torch.cat(
        [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1
    )


class Block(nn.Module):
    """Grouped queries and a gated MLP behind norms of root mean squares."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.w2 = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            one(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.wq, self.wk, self.wv)
        )
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Llama, mesh: Any) -> None:
    """torchtitan's plan: parts of the sequence between layers, and scores that stay sharded."""
    cut = ColwiseParallel(input_layouts=Shard(1))
    joined = RowwiseParallel(output_layouts=Shard(1))
    plan = {
        **dict.fromkeys(["attention_norm", "mlp_norm"], SequenceParallel()),
        **dict.fromkeys(["wq", "wk", "wv", "w1", "w3"], cut),
        **dict.fromkeys(["wo", "w2"], joined),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, whole)


def made(model: nn.Module) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    return kronfac.KFAC(
        model, base, momentum=0.9, nesterov=True, loss_average="token", max_grad_norm=1.0
    )


def steps(model: nn.Module, optimizer: Any, own: slice) -> None:
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randint(WORDS, (2, SAMPLES, TOKENS), generator=generator)
        y = y.masked_fill(torch.rand(SAMPLES, TOKENS, generator=generator) < 0.2, IGNORED)
        optimizer.zero_grad()
        scores, targets = model(x[own]).flatten(0, 1), y[own].flatten()
        total = F.cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED)
        (total / int((y != IGNORED).sum())).backward()
        optimizer.step()


@functools.cache
def expected() -> dict[str, Tensor]:
    with double_precision():
        model = Llama()
        steps(model, made(model), slice(0, SAMPLES))
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(rank: int, shape: tuple[int, int, int]) -> tuple[dict[str, Tensor], int]:
    ignore_advice()
    with double_precision():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "fsdp", "tp"))
        model = Llama()
        if shape[2] > 1:
            parallelize(model, mesh["tp"])
        data = mesh["fsdp"] if shape[0] == 1 else mesh["copy", "fsdp"]
        for module in (*model.layers, model) if shape[0] * shape[1] > 1 else ():
            fully_shard(module, mesh=data)
            module.set_gradient_divide_factor(1.0)
        size = SAMPLES // (shape[0] * shape[1])
        start = rank // shape[2] * size
        optimizer = made(model)
        with loss_parallel() if shape[2] > 1 else nullcontext():
            steps(model, optimizer, slice(start, start + size))
        return whole_parameters(model), len(optimizer.layers)


def check(*shape: int) -> None:
    for found, layers in run(shape[0] * shape[1] * shape[2], trained, shape):
        assert_near(found, expected(), f"{shape}")
        assert layers == 2 * 9 + 3  # all of them


def test_fsdp2() -> None:
    check(1, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 3, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2)], ids=str
)
def test_every_mesh(shape: tuple[int, int, int]) -> None:
    check(*shape)
