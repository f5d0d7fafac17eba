"""Seconds of single layers on several ranks: what each of them has done itself."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.distributed.distributed import Distributed
from kronfac.state.timing import Seconds
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.test_phases import PHASES, assert_within_phases


def timed(rank: int, scheme: str) -> tuple[Seconds, dict[str, set[str]]]:
    """Seconds of three steps, and by layer the phases that this rank has to do with."""
    made = KINDS["mlp"]
    model = DistributedDataParallel(made.model())
    base = SGD(model.parameters(), lr=0.01)
    distribute = kronfac.Distribute(scheme)  # type: ignore[arg-type]
    options: dict[str, Any] = {"factor_every": 1, "refresh_every": 1}
    optimizer = kronfac.KFAC(model, base, distribute=distribute, **options)
    with optimizer.timed() as seconds:
        for number in range(3):
            x, y = made.batch(number, 4)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return seconds, _expected(optimizer, rank)


def _expected(optimizer: kronfac.KFAC, rank: int) -> dict[str, set[str]]:
    ours = optimizer._preconditioner
    assert isinstance(ours.coordinator, Distributed)
    layout = ours.coordinator.layout
    found = {}
    for state in ours.layers.values():
        solves = any(rank in layout.solvers(state, part) for part in state.block.parts)
        phases = {"observe-input", "observe-output"} if state.observed else set()
        phases |= {"precondition"} if state.is_worker else set()
        found[state.name] = phases | ({"refresh"} if solves else set())
    return found


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt", "mem-opt", "local"])
def test_layers_have_what_their_rank_has_done(scheme: str) -> None:
    answers = run(2, timed, scheme)
    for seconds, expected in answers:
        found = {name: set(seconds.layers.get(name, {})) for name in expected}
        assert found == expected
        assert_within_phases(seconds)
    for name in answers[0][1]:
        assert set().union(*(seconds.layers.get(name, {}) for seconds, _ in answers)) == PHASES
