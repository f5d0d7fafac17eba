"""A team whose layers or places change after it was made."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import kronfac
from kronfac.distributed import layout
from kronfac.distributed.distributed import Distributed
from kronfac.placement.place import place
from kronfac.placement.scheme import Hybrid
from tests.distributed.fake import world


def choose_hybrid(units: Any, size: int, *rest: Any, **options: Any) -> Any:
    return place(units, size, Hybrid(0.5)), []


def test_layers_that_come_later_are_placed_as_auto_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "choose", choose_hybrid)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    with world(4, 1):
        base = SGD(model[:2].parameters(), lr=0.1)
        optimizer = kronfac.KFAC(model, base, distribute="auto")
        before = optimizer.placement
        assert before is not None
        optimizer.add_param_group({"params": list(model[2].parameters())})
        after = optimizer.placement
        assert after is not None
        assert after.scheme == before.scheme == "hybrid(0.5)"
        assert after.grid == before.grid
        assert list(after.assignments) == ["0", "1", "2"]
        assert {name: after.assignments[name] for name in before.assignments} == before.assignments


def test_gradients_follow_when_places_change() -> None:
    """As when a checkpoint is loaded into a run that has taken steps."""
    model = nn.Linear(4, 3)
    with world(4, 0):
        base = SGD(model.parameters(), lr=0.1)
        optimizer = kronfac.KFAC(model, base, distribute="mem-opt", factor_every=1, refresh_every=1)
        ours = optimizer._preconditioner
        coordinator = ours.coordinator
        assert isinstance(coordinator, Distributed)
        spreading = coordinator.spreading

        def step() -> list[tuple[int, ...]]:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            return [broadcast.collectives.members for broadcast in spreading._broadcasts]

        assert step() == [(0, 1, 2, 3)]
        coordinator.use(
            place([coordinator.layout.units[s] for s in ours.layers.values()], 4, Hybrid(0.5))
        )
        assert step() == [(0, 1)]
