"""Layers whose rows do not mix are worked on slice by slice: equal, and without an exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import kronfac
from kronfac.distributed.sharded import row_local
from kronfac.distributed.sharded.row_local import FREE_ELEMENTS, budget
from kronfac.layers.shards import local
from tests.distributed.equivalence import alone, assert_near, case, double_precision
from tests.distributed.models import Gated
from tests.distributed.ranks import run
from tests.sharded.harness import Way, build, check, ignore_advice, shard, train, whole_parameters

#: With these the gated layer and the head are wider than ``max_dim``, which is 8.
WIDE: dict[str, Any] = {"max_dim": 8, "steps": 4}
FORWARD: dict[str, Any] = {"fisher": "forward", "steps": 4}
LENGTHS: list[dict[str, Any]] = [
    {"rescale": None},
    {"rescale": "graft", "momentum": 0.9, "nesterov": True},
    {"rescale": "auto", "momentum": 0.9, "base": "sgd"},
    {"rescale": "kl-clip", "momentum": 0.5},
]
#: Muon's norm is for matrices: embeddings and norms are left to the base optimizer.
UNIT: dict[str, Any] = {"rescale": "unit", "momentum": 0.9}


# --- equal to one process -----------------------------------------------------------------------


def test_slices_equal_one_process() -> None:
    check(
        2,
        (case("gated", **WIDE, momentum=0.9), Way()),
        (case("gated", **FORWARD, solver="cholesky", momentum=0.9), Way()),
        (case("gated", **WIDE, rescale="auto", base="sgd", momentum=0.9), Way("model")),
        (case("gated", **WIDE, **UNIT), Way("leaves")),
        (case("gated", **WIDE, rescale="kl-clip", damping=kronfac.Relative(0.1)), Way()),
    )


def test_uneven_and_empty_slices() -> None:
    outcomes = check(4, (case("gated", **WIDE, momentum=0.9, samples=12), Way()))
    assert [outcome.shards["gate.weight"].shape[0] for outcome in outcomes[0]] == [3, 3, 3, 0]
    assert [outcome.shards["head.weight"].shape[0] for outcome in outcomes[0]] == [3, 3, 3, 2]


def test_replicas_of_slices_are_the_same_bits() -> None:
    runs = [
        (case("gated", **WIDE, momentum=0.9), Way(replicas=2)),
        (case("gated", **WIDE, rescale="auto", momentum=0.9, base="sgd"), Way(replicas=2)),
    ]
    for outcomes in check(4, *runs):
        for first, second in ((0, 2), (1, 3)):
            for name, one in outcomes[first].shards.items():
                assert torch.equal(one, outcomes[second].shards[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("kept", [WIDE, FORWARD], ids=["wide", "forward"])
def test_every_rule(kept: dict[str, Any], solver: str, size: int) -> None:
    runs = [(case("gated", **kept, solver=solver, **one), Way()) for one in LENGTHS]
    runs.append((case("gated", **kept, solver=solver, **UNIT), Way("model")))
    check(size, *runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"damping": kronfac.Relative(0.1)},
        {"damping": kronfac.Relative(0.1), "solver": "cholesky"},
        {"solver": "newton-schulz"},
        {"power": 0.5},
        {"micro": 2, "samples": 24},
        {"uneven": True},
        {"max_grad_norm": 0.05},
        {"sharing": "reduce"},
        {"share_inputs": False},
        {"stagger": True, "refresh_every": 3},
        {"refresh_every": kronfac.StaleInterval(1), "steps": 6},
        {"rescale": "trust-region"},
        {"distribute": kronfac.Distribute(slices=False)},
        {"max_dim": 3, "momentum": 0.9},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any]) -> None:
    wide = {**WIDE, **options}
    one = case("gated", **wide)
    check(2, (one, Way()), (one, Way(dim=1)))
    check(3, (one, Way("leaves")), (one, Way()))
    check(4, (one, Way("model", replicas=2)))


REPLACED = case("gated", **WIDE, momentum=0.9)


def assigned(rank: int) -> Any:
    ignore_advice()
    with double_precision():
        model, optimizer = build(REPLACED, Way())
        train(rank, model, optimizer, replace(REPLACED, steps=2))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        train(rank, model, optimizer, REPLACED, first=2)
        return whole_parameters(model)


def test_parameters_that_are_replaced() -> None:
    check(2, (REPLACED, Way(order="before")))
    for found in run(2, assigned):
        assert_near(found, alone(REPLACED).parameters, "assign=True")


# --- which layers, and what travels -------------------------------------------------------------


def which(rank: int, given: list[tuple[dict[str, Any], Way]]) -> list[set[str]]:
    ignore_advice()
    found = []
    for options, way in given:
        _, optimizer = build(case("gated", **options), way)
        found.append({s.name for s in optimizer.layers if s.view.slice is not None})
    return found


def test_which_layers_are_worked_on_by_slices() -> None:
    wide = {"embedding", "gate", "up", "head"}
    everything = {"embedding", "gate", "up", "down", "head"}
    expected = [
        ({"max_dim": 8}, Way(), wide),
        ({"max_dim": 8, "rescale": "auto"}, Way(), {"embedding"}),
        ({"max_dim": 8, "rescale": "orthogonal"}, Way(), set()),
        ({"max_dim": 8, "rescale": "unit"}, Way(), wide - {"embedding"}),
        ({}, Way(), {"embedding"}),
        ({"fisher": "forward"}, Way(), everything),
        ({"fisher": "forward", "rescale": "auto"}, Way(), {"embedding"}),
        ({"max_dim": 8, "method": "EKFAC"}, Way(), set()),
        ({"max_dim": 8, "distribute": kronfac.Distribute(slices=False)}, Way(), set()),
    ]
    for found in run(2, which, [(options, way) for options, way, _ in expected]):
        assert found == [names for _, _, names in expected]


def in_little_memory(rank: int, elements: int) -> set[str]:
    row_local.FREE_ELEMENTS = elements
    try:
        return which(rank, [({"max_dim": 8}, Way())])[0]
    finally:
        row_local.FREE_ELEMENTS = FREE_ELEMENTS


@pytest.mark.parametrize(
    ("elements", "names"),
    [(0, {"head", "gate", "embedding"}), (200, {"head", "embedding", "gate", "up"})],
)
def test_solutions_of_slices_take_bounded_memory(elements: int, names: set[str]) -> None:
    # For gradients of 44, 45 (twice) and 28 elements solutions have 31, 39 and 27. Four ranks have a
    # quarter each of 210 parameters and as many gradients: 105 elements.
    assert budget(210, 4) == FREE_ELEMENTS
    for found in run(4, in_little_memory, elements):
        assert found == names


def sent(rank: int, options: dict[str, Any], steps: int, replicas: int) -> tuple[Any, ...]:
    ignore_advice()
    torch.manual_seed(0)
    model = shard(Gated(words=16, width=8, hidden=32), Way(replicas=replicas))
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = kronfac.KFAC(model, base, factor_every=2, refresh_every=4, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(16, (4, 3))).square().mean().backward()
        optimizer.step()
    sliced = [s for s in optimizer.layers if s.view.slice is not None]
    parameters = {p for s in optimizer.layers for p in s.layer.parameters}
    local_ones = {p for s in sliced for p in s.layer.parameters}
    exchanged = sum(p.numel() for p in parameters - local_ones)
    return optimizer.stats(), exchanged, len(sliced), str(optimizer)


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_only_other_layers_are_exchanged(size: int, replicas: int) -> None:
    steps, shards = 5, size // replicas
    found = run(size, sent, {"max_dim": 10, "rescale": "graft"}, steps, replicas)
    _, exchanged, sliced, summary = found[0]
    assert sliced == 4
    assert "slices of 4 layers" in summary
    assert exchanged == 32 * 8 + 8 + 2 * 8
    total = sum(stats["bytes"]["spread"] for stats, *_ in found)
    per_rank = 2 * exchanged / shards * (shards - 1) / shards
    assert total == size * per_rank * steps * 4
    for stats, *_ in found:
        # Norms before and after of four layers, in double precision.
        assert stats["bytes"]["rescale"] == steps * 4 * 2 * 8
        assert stats["messages"]["rescale"] == steps
        if replicas == 1:  # solutions of slices, at two refreshes; gate and up have one A
            once = (16 + 8 + 8**2) + (9 + 9**2 + 32 + 32) + (8 + 8**2 + 11)
            assert stats["bytes"]["share"] == 2 * 4 * once


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"rescale": None}, 0),
        ({"rescale": "graft"}, 1),
        ({"rescale": "unit"}, 1),
        ({"rescale": None, "momentum": 0.9}, 1),
        ({"rescale": "graft", "momentum": 0.9}, 2),
    ],
    ids=str,
)
def test_without_other_layers_nothing_is_exchanged(options: Any, messages: int) -> None:
    steps = 5
    for stats, exchanged, sliced, _ in run(2, sent, {"fisher": "forward", **options}, steps, 1):
        assert exchanged == 0
        assert sliced == (4 if options["rescale"] == "unit" else 5)
        assert stats["bytes"]["spread"] == stats["messages"]["spread"] == 0
        assert stats["messages"]["rescale"] == messages * steps


# --- what a rank sees of its slice --------------------------------------------------------------


class Part(nn.Module):
    """Of the embedding and the head one rank's slices have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens % 4))[..., :5]


def decides_alone(rank: int, kind: str, rescale: str) -> tuple[list[bool], dict[str, Tensor]]:
    ignore_advice()
    model = shard(Part(), Way())
    optimizer = kronfac.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        damping=0.1,
        max_dim=8,
        rescale=rescale,
        momentum=0.9,
        on_missing="ignore",
    )
    zero = []
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.arange(6).reshape(2, 3) + step
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 5).backward()
        zero = [not bool(local(p.grad).any()) for p in model.parameters() if p.dim() > 1]
        if kind == "nan" and step == 1 and rank == 0:
            local(model.head.weight.grad)[0] = torch.nan
        optimizer.step()
    return zero, whole_parameters(model)


@pytest.mark.parametrize("rescale", ["graft", "auto"])
@pytest.mark.parametrize("kind", ["zero", "nan"])
def test_no_rank_decides_on_its_slice(kind: str, rescale: str) -> None:
    (zero, one), (other_zero, other) = run(2, decides_alone, kind, rescale)
    assert (zero, other_zero) == ([False, False], [True, True])
    for name, value in one.items():
        assert torch.equal(value.nan_to_num(), other[name].nan_to_num()), name
    assert one["head.weight"].isnan().any() == (kind == "nan")
    assert not one["embedding.weight"].isnan().any() or kind == "nan"


def saved(rank: int) -> dict[str, tuple[Any, ...]]:
    ignore_advice()
    with double_precision():
        model, optimizer = build(case("gated", **WIDE, momentum=0.9), Way())
        train(rank, model, optimizer, case("gated", **WIDE))
    names = optimizer.state_dict()["param_groups"][0]["kronfac.names"]
    state = optimizer.state_dict()["state"]
    found = {}
    for index, name in enumerate(names):
        value = state[index].get("kronfac.momentum")
        if value is not None:
            kind = value.placements[0].dim if isinstance(value, DTensor) else None
            found[name] = kind, tuple(value.shape)
    return found


def test_momentum_of_slices_is_saved_as_shards() -> None:
    first, second = run(2, saved)
    assert first["embedding.weight"] == second["embedding.weight"] == (1, (4, 7))
    assert first["gate.weight"] == second["gate.weight"] == (0, (9, 5))
    (down,) = [one["down.weight"] for one in (first, second) if "down.weight" in one]
    assert down == (None, (4, 10))
