"""Random nets and options on two or three ranks: the numbers of one process, the same bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.ranks import run
from tests.fuzz.ranks import STEPS, World, alone, on_rank
from tests.fuzz.training import difference

#: Advice on settings that were drawn by chance is not looked at; a layer that is missed raises.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

QUICK, SEEDS = 5, 300


def runs() -> Any:
    """A few seeds, and hundreds more behind the marker ``slow``."""
    marks = [[] if seed < QUICK else [pytest.mark.slow] for seed in range(SEEDS)]
    seeds = [pytest.param(seed, id=str(seed), marks=marks[seed]) for seed in range(SEEDS)]
    return pytest.mark.parametrize("seed", seeds)


@runs()
def test_ranks_take_the_steps_of_one_process(seed: int) -> None:
    world = World(seed)
    print(world)
    expected, nudged = alone(world.case), alone(world.case, nudge=1e-15)
    by_rank = run(world.size, on_rank, seed)
    for rank, (history, differing) in enumerate(by_rank):
        assert differing == [], f"ranks differ after these steps, seen by rank {rank}"
        for step in range(STEPS):
            error, name = difference(history[step], expected[step])
            # A run that diverges, or follows a gradient that is zero but for rounding, says nothing.
            bound = max(1e-8, 1e3 * difference(nudged[step], expected[step])[0])
            assert error < bound, f"rank {rank}, step {step}: {name!r} differs by {error:.1e}"
