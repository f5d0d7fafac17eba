"""FSDP2 equals one process: every method, kind of sharding and way of training (several minutes)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import kronfac
from kronfac.protocol.registry import optimizers
from tests.distributed.equivalence import alone, assert_near, bounds, case, double_precision
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.sharded.harness import (
    Outcome,
    Way,
    check,
    ignore_advice,
    shard,
    train,
    whole_parameters,
)
from tests.sharded.test_traps import built_on_meta

pytestmark = pytest.mark.slow

METHODS = sorted(set(optimizers()) - {"KFAC"})
SOLVERS = ["eigen", "cholesky"]
SIZES = [2, 3, 4]
MODELS = ["mlp", "cnn", "transformer", "shared", "positions", "across"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    options: dict[str, Any] = {"method": method, "steps": 4}
    if method == "HyLo":  # what it leaves out depends on who has which rows
        options |= {"mode": "kis", "rank": 1.0}
    one = case("mlp", momentum=0.5, **options)
    check(2, (one, Way()), (case("transformer", **options), Way()))
    check(3, (one, Way("model")))
    four = case("mlp", momentum=0.5, samples=24, **options)
    check(4, (four, Way()), (four, Way(replicas=2)))


@pytest.mark.parametrize("solver", [*SOLVERS, "newton-schulz"])
@pytest.mark.parametrize("size", SIZES)
def test_every_layer_and_solver(solver: str, size: int) -> None:
    runs = []
    for model in MODELS:
        # Of "positions" a rank must not have as many samples as there are tokens.
        one = case(model, solver=solver, steps=4, momentum=0.9, samples=24)
        runs.append((one, Way("model" if model in ("shared", "positions") else "blocks")))
    check(size, *runs)


def assert_same_bits(outcomes: list[Outcome], replicas: int) -> None:
    per = len(outcomes) // replicas
    for rank, outcome in enumerate(outcomes):
        for name, one in outcome.shards.items():
            assert torch.equal(one, outcomes[rank % per].shards[name]), (name, rank)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas(replicas: int, solver: str) -> None:
    runs = [
        (case(model, steps=4, rescale="kl-clip", solver=solver), Way("model", replicas))
        for model in MODELS
    ]
    for outcomes in check(4, *runs):
        assert_same_bits(outcomes, replicas)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "options",
    [
        {"rescale": None},
        {"rescale": "auto", "momentum": 0.9},
        {"rescale": "unit"},
        {"rescale": "orthogonal"},
        {"rescale": "trust-region"},
        {"rescale": "kl-clip"},
        {"max_grad_norm": 0.05},
        {"fisher": "exact"},
        {"fisher": "forward"},
        {"max_dim": 4},
        {"stagger": True, "refresh_every": 3},
        {"factor_every": 2, "refresh_every": 4, "steps": 9},
        {"refresh_every": kronfac.StaleInterval(1), "steps": 6},
        {"loss_average": "token"},
        {"damping": kronfac.Relative(0.1)},
        {"sharing": "reduce"},
        {"micro": 3},
        {"micro": 2, "syncs": True},
        {"uneven": True},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], solver: str) -> None:
    samples = 24 * options.get("micro", 1)  # of one number in all micro-batches
    options = {"steps": 4, "samples": samples, "solver": solver, **options}
    uneven = options.get("uneven", False)
    check(2, (case("mlp", base="sgd", **options), Way()), (case("mlp", **options), Way(dim=1)))
    models = ["mlp"] if options.get("rescale") in ("unit", "orthogonal") else ["mlp", "transformer"]
    check(3, *((case(one, **options), Way("leaves", reshard=uneven)) for one in models))
    _, outcomes = check(4, *((case("mlp", **options), Way(replicas=n)) for n in (1, 2)))
    assert_same_bits(outcomes, 2)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("size", SIZES)
def test_every_order(size: int, solver: str) -> None:
    one = case("mlp", steps=4, solver=solver)
    check(size, *((one, Way(units, order="before")) for units in ("blocks", "model")))
    for order in ("meta", "sharded", "filled"):
        for found in run(size, built_on_meta, order, one):
            assert_near(found, alone(one).parameters, order)


# --- activation checkpointing, compiled blocks, frozen and unused layers, half precision ---------


class Block(nn.Module):
    """A residual block that may repeat its forward."""

    def __init__(self, repeats: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        if self.repeats:
            found: Tensor = checkpoint(self.inner, x, use_reentrant=self.repeats == "reentrant")
            return found
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, one of them unused, behind a frozen layer, with a tied head."""

    def __init__(self, repeats: str = "", extras: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(repeats) for _ in range(2)])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = Block() if extras else None
        self.head = nn.Linear(4, 7, bias=False)
        if extras:
            self.head.weight = self.embedding.weight
        else:
            self.frozen.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepared(how: str) -> nn.Module:
    model = Stack(how if "reentrant" in how else "", how == "extras")
    if how == "wrapped":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    return model


def steps_of(model: nn.Module, optimizer: Any, start: int, end: int, how: str) -> None:
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(7, (12, 3), generator=generator)
        y = torch.randint(7, (12, 3), generator=generator)
        optimizer.zero_grad()
        scores = model(x[start:end])
        F.cross_entropy(scores.flatten(0, -2), y[start:end].flatten()).backward()
        if how == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def options_of(solver: str) -> dict[str, Any]:
    return dict(case("mlp", momentum=0.5, on_missing="ignore", solver=solver).options)


@functools.cache
def expected(how: str, solver: str) -> dict[str, Tensor]:
    with double_precision():
        model = prepared(how if how != "wrapped" else "")
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **options_of(solver))
        steps_of(model, optimizer, 0, 12, how)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(rank: int, how: str, size: int, solver: str) -> dict[str, Tensor]:
    ignore_advice()
    with double_precision():
        model = prepared(how)
        units = list(model.blocks)
        if how == "compiled":
            for block in units:
                block.compile(backend="aot_eager", fullgraph=True)
        mesh = init_device_mesh("cpu", (size,))
        for block in units:
            fully_shard(block, mesh=mesh)
        shard(model, Way("model"), mesh=mesh)
        if how == "compiled after":
            for block in units:
                block.compile(backend="aot_eager", fullgraph=True)
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **options_of(solver))
        start, end = bounds(12, size)[rank]
        steps_of(model, optimizer, start, end, how)
        found = whole_parameters(model)
        return {name.replace("_checkpoint_wrapped_module.", ""): v for name, v in found.items()}


WAYS = [
    *("plain", "reentrant", "non-reentrant", "wrapped", "compiled", "compiled after"),
    *("extras", "clipped"),
]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", WAYS)
def test_ways_of_training(how: str, size: int, solver: str) -> None:
    for found in run(size, trained, how, size, solver):
        assert_near(found, expected(how, solver), how)


POLICIES: dict[str, dict[str, Any]] = {
    "parameters": {"param_dtype": torch.bfloat16},
    "sums in single": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "sums in half": {"reduce_dtype": torch.bfloat16},
    "outputs": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
    "half": {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
}


def in_half_precision(rank: int, policy: str) -> tuple[set[torch.dtype], list[float], bool]:
    torch.manual_seed(0)
    model = Stack()
    shard(model, Way("model"), mp_policy=MixedPrecisionPolicy(**POLICIES[policy]))
    optimizer = kronfac.KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.05), factor_every=2, refresh_every=2
    )
    losses = []
    tokens = torch.arange(12 * 3).reshape(12, 3) % 7
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dtypes = {value.dtype for s in optimizer.layers for value in (s.solution or {}).values()}
    return dtypes, losses, all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_of_half_precision_keeps_factors_and_gradients_in_single(policy: str) -> None:
    for dtypes, losses, single in run(2, in_half_precision, policy):
        assert dtypes == {torch.float32}
        assert losses[-1] < losses[0] / 2
        assert single


def replicated(rank: int, scheme: str) -> Any:
    one = case("cnn", steps=4)
    with double_precision():
        model = KINDS["cnn"].model()
        replicate(model)
        base = BASES["momentum"](model)
        optimizer = kronfac.KFAC(model, base, distribute=scheme, **dict(one.options))
        train(rank, model, optimizer, one)
        return whole_parameters(model)


@pytest.mark.parametrize("scheme", ["auto", "mem-opt", "comm-opt", "layer-parallel"])
def test_replicate_under_every_scheme(scheme: str) -> None:
    for found in run(2, replicated, scheme):
        assert_near(found, alone(case("cnn", steps=4)).parameters, scheme)
