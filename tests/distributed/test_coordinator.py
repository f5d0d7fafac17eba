"""One interface for one process and for many."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import kronfac
from kronfac.distributed.coordinator import Coordinator, Now
from kronfac.distributed.distributed import Distributed
from kronfac.distributed.local import Local
from kronfac.state.timing import Phases
from tests.distributed.fake import world


def made(model: nn.Module, **options: Any) -> kronfac.KFAC:
    """An optimizer that observes and solves at every step."""
    base = SGD(model.parameters(), lr=0.1)
    return kronfac.KFAC(model, base, factor_every=1, refresh_every=1, **options)


def step(model: nn.Module, optimizer: kronfac.KFAC) -> None:
    """Take one step."""
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


def public(kind: type[Coordinator]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_one_process_has_nothing_beside_the_interface() -> None:
    assert public(Local) == public(Coordinator) | {"sees_all"}


def test_ranks_decide_who_coordinates() -> None:
    model = nn.Linear(4, 3)
    assert isinstance(made(model)._preconditioner.coordinator, Local)
    with world(2, 0):
        assert isinstance(made(model)._preconditioner.coordinator, Distributed)


def test_one_process_sends_nothing() -> None:
    model = nn.Linear(4, 3)
    optimizer = made(model, rescale="kl-clip", max_grad_norm=1.0)
    for _ in range(2):
        step(model, optimizer)
    optimizer.consolidate()
    assert optimizer.placement is None
    stats = optimizer.stats()
    for kind in ("bytes", "messages", "sent", "control"):
        assert set(stats[kind].values()) == {0}
    assert stats["waited"] == 0


def test_one_process_solves_layers_when_those_before_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise all layers of a large model would have an old and a new solution at the same time."""
    monkeypatch.setattr("kronfac.distributed.local.MAX_NEW_ELEMENTS", 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = made(model)
    step(model, optimizer)
    states = list(optimizer._preconditioner.layers.values())
    solved: dict[str, None] = {}

    def watched(state: Any) -> Any:
        solve = state.block.solve_batch

        def noted(*args: Any) -> Any:
            solved[state.name] = None
            return solve(*args)

        return noted

    for state in states:
        state.block.solve_batch = watched(state)
    local = Local(Phases())
    taken = iter(local.share(local.refresh(dict.fromkeys(states, ("A", "G")), Now(1, 1e-3))))
    assert list(solved) == []
    assert next(taken)[0] is states[0]
    assert list(solved) == ["0"]
    assert [state for state, _ in taken] == states[1:]
    assert list(solved) == ["0", "1"]


@contextmanager
def one_process() -> Iterator[None]:
    yield


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_phase_is_marked_in_order(ranks: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with one_process() if ranks == 1 else world(ranks, 0):
        optimizer = made(model, distribute="mem-opt")
        with optimizer.timed() as seconds:
            step(model, optimizer)
    ours = ["reduce", "refresh", "share", "precondition", "rescale", "spread", "base"]
    travelling = {"share", "spread"} if ranks == 1 else set()
    found = [phase for phase in seconds if phase in ours]
    assert found == [phase for phase in ours if phase not in travelling]
