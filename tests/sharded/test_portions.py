"""Gradients travel in portions, while others are worked on: nothing changes but when they travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kronfac
from kronfac.distributed import portions, prepared
from kronfac.step.updates import Updates
from tests.distributed.equivalence import Case, alone, assert_near, case, double_precision
from tests.distributed.ranks import run
from tests.sharded import test_checkpoints, test_costs, test_row_local, test_traps
from tests.sharded.harness import (
    Outcome,
    Way,
    build,
    ignore_advice,
    on_ranks,
    shard,
    train,
    whole_parameters,
)

DEFAULT: dict[str, Any] = {"rescale": "auto", "momentum": 0.9, "nesterov": True}
#: The default's steps, with a damping that is relative.
LINE = DEFAULT | {"damping": kronfac.Relative(0.1)}


@contextmanager
def small(elements: int = 1) -> Iterator[None]:
    """As if every layer were large."""
    before, portions.MIN_ELEMENTS = portions.MIN_ELEMENTS, elements
    try:
        yield
    finally:
        portions.MIN_ELEMENTS = before


def in_portions(rank: int, runs: list[tuple[Case, Way]]) -> list[Outcome]:
    with small():
        return on_ranks(rank, runs)


def check(size: int, *runs: tuple[Case, Way]) -> list[list[Outcome]]:
    """Every rank ends where one process ends; returns outcomes by rank."""
    by_rank = run(size, in_portions, list(runs))
    for outcomes in by_rank:
        for outcome, (one, way) in zip(outcomes, runs, strict=True):
            assert_near(outcome.parameters, alone(one).parameters, f"{one}, {way}")
    return by_rank


# --- equal to one process -----------------------------------------------------------------------


def test_equal_to_one_process() -> None:
    found = check(
        2,
        (case("transformer", steps=4, base="adamw", momentum=0.9), Way()),
        (case("mlp", steps=4, **LINE), Way()),
        (case("cnn", steps=4), Way("model")),
        (case("shared", steps=4, solver="cholesky"), Way("model")),
        (case("gated", steps=4, max_dim=8), Way()),
    )
    for first, *_ in found:
        assert first.stats["messages"]["spread"] >= 2 * 4 * 3  # portions in each direction


def test_uneven_and_empty_shards() -> None:
    found = check(
        3,
        (case("mlp", steps=4, **LINE), Way("model")),
        (case("cnn", steps=4), Way("leaves")),
        (case("transformer", steps=3, micro=2, syncs=True), Way()),
    )
    assert any(shard.numel() == 0 for shard in found[2][0].shards.values())


def test_steps_that_need_all_layers_stay_together() -> None:
    found = check(
        2,
        (case("mlp", steps=3, rescale="kl-clip"), Way()),
        (case("mlp", steps=3, method="MLBFGS"), Way()),
        (case("transformer", steps=3, max_grad_norm=0.1), Way()),
    )
    for bounded, looks, clipped in found:
        assert bounded.stats["messages"]["spread"] == 2 * 3
        assert looks.stats["messages"]["spread"] == 3 * 3  # and the weights that it looks at
        assert clipped.stats["messages"]["spread"] > 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "separable"])
def test_every_layer_and_solver(size: int, solver: str) -> None:
    kinds = ("mlp", "cnn", "transformer", "shared", "positions", "gated")
    # Of "positions" a rank must not have as many samples as there are tokens.
    runs = [case(kind, steps=4, solver=solver, samples=24) for kind in kinds]
    check(size, *((one, Way("model")) for one in runs))


@pytest.mark.slow
def test_replicas_are_the_same_bits() -> None:
    found = check(4, (case("transformer", steps=4), Way(replicas=2)))
    for first, second in ((0, 2), (1, 3)):
        for name, one in found[first][0].shards.items():
            assert torch.equal(one, found[second][0].shards[name]), name


def unprepared(rank: int, one: Case, room: float) -> tuple[dict[str, Tensor], set[bool]]:
    with pytest.MonkeyPatch.context() as patch, small(), double_precision():
        patch.setattr(prepared, "PER_PARAMETER", room)
        model, optimizer = build(one, Way())
        train(rank, model, optimizer, one)
        kept = {s.keeps_prepared for s in optimizer.layers if s.is_worker}
        return whole_parameters(model), kept


@pytest.mark.parametrize(("room", "kept"), [(0, {False}), (2.1, {True, False}), (99, {True})])
def test_inverses_that_are_not_kept_change_nothing(room: float, kept: set[bool]) -> None:
    one = case("mlp", steps=4, **LINE)
    found = run(2, unprepared, one, room)
    for parameters, _ in found:
        assert_near(parameters, alone(one).parameters, f"room for {room}")
    assert set().union(*(own for _, own in found)) == kept


def decides_alone(rank: int, kind: str) -> tuple[bool, Tensor]:
    with small():
        return test_traps.decides_alone(rank, kind)


@pytest.mark.parametrize("kind", ["unobserved", "nan"])
def test_no_rank_decides_on_its_own_shard(kind: str) -> None:
    (zero, one), (other_zero, other) = run(2, decides_alone, kind)
    assert (zero, other_zero) == (False, True)
    assert torch.equal(one, other) or kind == "nan"
    assert one.isnan().any() == (kind == "nan")


def resumed(rank: int, path: str) -> None:
    with small(), test_checkpoints.quiet():
        one = case("transformer", base="sgd", steps=8, refresh_every=3, **LINE)
        first = test_checkpoints.Training("FSDP2", one)
        first.train(0, 5)
        first.save("dcp", Path(path))
        first.train(5, 8)
        second = test_checkpoints.Training("FSDP2", one)
        second.load("dcp", Path(path))
        second.train(5, 8)
        pairs = zip(first.plain.parameters(), second.plain.parameters(), strict=True)
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    run(2, resumed, str(tmp_path / "saved"))


# --- what is sent, and when ---------------------------------------------------------------------


def traffic(rank: int, steps: int, replicas: int, elements: int) -> dict[str, Any]:
    with small(elements):
        return test_costs.traffic(rank, steps, replicas)


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_portions_send_no_more(size: int, replicas: int) -> None:
    steps, layers = 5, test_costs.LAYERS
    found = run(size, traffic, steps, replicas, 1)
    whole = run(size, traffic, steps, replicas, 2**18)
    shards = size // replicas
    per_rank = 2 * layers * test_costs.WIDTH**2 / shards * (shards - 1) / shards
    assert sum(one["bytes"]["spread"] for one in found) == size * per_rank * steps * 4
    for one, other in zip(found, whole, strict=True):
        assert one["bytes"] == other["bytes"]
        assert other["messages"]["spread"] == 2 * steps
        assert one["messages"]["spread"] == 2 * steps * -(-layers // shards)


class Calls:
    """What a rank sends during a step, in its order, and when it works."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        exchange, reduce, work = dist.all_to_all_single, dist.all_reduce, Updates.rescale
        note = self.made.append

        def all_to_all(found: Tensor, flat: Tensor, sizes: Any, splits: Any, *rest: Any, **k: Any):
            note(("exchange", list(sizes), list(splits)))
            return exchange(found, flat, sizes, splits, *rest, **k)

        def all_reduce(flat: Tensor, *rest: Any, **k: Any):
            note(("all_reduce", flat.numel()))
            return reduce(flat, *rest, **k)

        def rescale(*args: Any):
            note(("work",))
            work(*args)

        dist.all_to_all_single, dist.all_reduce, Updates.rescale = all_to_all, all_reduce, rescale
        try:
            yield
        finally:
            dist.all_to_all_single, dist.all_reduce, Updates.rescale = exchange, reduce, work


def calls_of(rank: int, one: Case) -> list[tuple[Any, ...]]:
    ignore_advice()
    calls = Calls()
    with small():
        model, optimizer = build(one, Way())
        train(rank, model, optimizer, replace(one, steps=1))
        with calls.noted():
            train(rank, model, optimizer, replace(one, steps=2), 1)
    return calls.made


@pytest.mark.parametrize("size", [2, 3])
def test_messages_leave_in_one_order_on_all_ranks(size: int) -> None:
    found = run(size, calls_of, case("gated", factor_every=9, refresh_every=9, momentum=0.9))
    kinds = [[kind for kind, *_ in calls] for calls in found]
    assert all(own == kinds[0] for own in kinds)
    assert {"exchange", "all_reduce", "work"} <= set(kinds[0])
    for calls in zip(*found, strict=True):
        if calls[0][0] == "all_reduce":
            assert len({numbers for _, numbers in calls}) == 1
        if calls[0][0] == "exchange":  # what one sends another is what that one expects
            for sender, (_, _, splits) in enumerate(calls):
                for receiver, (_, sizes, _) in enumerate(calls):
                    assert splits[receiver] == sizes[sender]


def test_the_next_gradients_are_on_their_way_while_others_are_worked_on() -> None:
    for calls in run(2, calls_of, case("mlp", factor_every=9, refresh_every=9)):
        order = "".join({"exchange": "x", "work": "w"}.get(kind, "") for kind, *_ in calls)
        count = order.count("w")
        assert count > 1
        # Two portions leave; then after each work its result, and the portion after the next.
        assert order == "xx" + "wxx" * (count - 2) + "wx" * 2


# --- which layers -------------------------------------------------------------------------------


def planned(rank: int, elements: int) -> tuple[list[list[str]], list[str], list[str]]:
    with small(elements):
        model = shard(test_row_local.Gated(words=16, width=8, hidden=32), Way())
        base = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = kronfac.KFAC(model, base)
        layout = optimizer._preconditioner.coordinator.layout
        found = portions.make_portions(layout, optimizer.layers)
        sliced = [s.name for s in optimizer.layers if s.view.slice is not None]
        return (
            [[s.name for s in some] for some in found],
            [s.name for s in optimizer.layers],
            sliced,
        )


def test_every_layer_is_in_one_portion_and_slices_come_first() -> None:
    found = run(2, planned, 1)
    assert found[0] == found[1]
    plan, names, sliced = found[0]
    assert sliced
    assert plan[0] == sliced
    assert len(plan) > 2
    assert sorted(name for some in plan for name in some) == sorted(names)


def test_small_models_travel_at_once() -> None:
    plan, _, sliced = run(2, planned, 2**18)[0]
    assert [some for some in plan if some != sliced] == [plan[-1]]


def parts_of_one_weight(rank: int) -> list[list[str]]:
    with small():
        _, optimizer = build(case("transformer"), Way())
        layout = optimizer._preconditioner.coordinator.layout
        return [
            [str(id(p)) for state in some for p in {*state.layer.parameters}]
            for some in portions.make_portions(layout, optimizer.layers)
        ]


def test_parts_of_one_weight_travel_once() -> None:
    for plan in run(2, parts_of_one_weight):
        where = [{*some} for some in plan]
        assert len(where) > 2
        assert sum(map(len, where)) == len(set().union(*where))


# --- coming and going -----------------------------------------------------------------------------


def after_detaching(rank: int) -> bool:
    """Whether steps are the base's own."""
    ignore_advice()
    model, optimizer = build(case("mlp"), Way())
    x = torch.randn(6, next(iter(model.parameters())).shape[1])
    for detach in (False, True):
        if detach:
            optimizer.detach()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = [p.grad.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
        after = [p.grad.full_tensor() for p in model.parameters()]
        kept = all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    return kept


def test_nothing_travels_after_detaching() -> None:
    with double_precision():
        assert run(2, after_detaching) == [True, True]
