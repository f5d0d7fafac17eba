"""Worlds of thousands of ranks, seen from any of them, without any hardware.

The fake backend sends nothing and returns at once: what is received is meaningless, but who does what,
what is sent, in which messages, and what it takes to find that out are those of the real world.
"""

import cProfile
import pstats
import tracemalloc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import SGD

import kronfac
from kronfac.distributed.distributed import Distributed
from kronfac.placement.place import makespan
from kronfac.planner.choose import candidates
from tests.distributed import closed_form
from tests.distributed.fake import world
from tests.distributed.residual import residual_network

SIZES = [1024, 4096]
SCHEMES: dict[str, Any] = {
    "replicated": "replicated",
    "comm-opt": "comm-opt",
    "mem-opt": "mem-opt",
    "hybrid(0.5)": kronfac.Hybrid(0.5),
    "hybrid(1/64)": kronfac.Hybrid(1 / 64),
    "local": "local",
    "layer-parallel": "layer-parallel",
    "spd": "spd",
    "auto": "auto",
}
#: Their placement follows from shapes alone, and not from what a rank measures.
MEASURED = ("spd", "auto")
STEPS, REFRESHES = 3, 2


def small() -> nn.Module:
    """A few layers of several kinds."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 4, 10),
        nn.Linear(10, 7),
    )


def made(model: nn.Module, scheme: Any, **options: Any) -> kronfac.KFAC:
    # The first block of a residual network has two convolutions with one input.
    settings = {"factor_every": 1, "refresh_every": 2, "share_inputs": False} | options
    return kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), distribute=scheme, **settings)


def train(model: nn.Module, optimizer: kronfac.KFAC, shape: tuple[int, ...], steps: int) -> None:
    """Take steps that lead nowhere: what would have been received is not there."""
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, *shape)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)


def coordinator(optimizer: kronfac.KFAC) -> Distributed:
    found = optimizer._preconditioner.coordinator
    assert isinstance(found, Distributed)
    return found


def expected_bytes(
    model: nn.Module,
    optimizer: kronfac.KFAC,
    rank: int,
    clipped: bool = False,
    solver: str = "auto",
) -> dict[str, int]:
    """Bytes after three steps with two refreshes, in single precision."""
    placement, scheme = optimizer.placement, optimizer.placement.scheme
    layers = closed_form.sizes(model, solver)
    found = {
        "reduce": 0 if scheme == "local" else REFRESHES * closed_form.statistics(layers),
        "share": REFRESHES * closed_form.shared(layers, placement, rank),
        "spread": STEPS * closed_form.gradients(layers) if placement.grid.columns > 1 else 0,
        "rescale": 0,
    }
    if scheme == "layer-parallel":
        found["reduce"] += STEPS * closed_form.parameters(model)
        found["spread"] = STEPS * closed_form.parameters(model)
    found = {phase: 4 * number for phase, number in found.items()}
    if clipped and placement.grid.columns > 1:
        found["rescale"] = STEPS * 8  # one number in double precision
    return found


# --- the ledger of any rank ------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("size", "rank"), [(1024, 0), (1024, 517), (4096, 3), (4096, 4095)])
def test_the_ledger_of_any_rank_is_the_closed_form(size: int, rank: int, name: str) -> None:
    torch.manual_seed(0)
    model = small()
    with world(size, rank):
        optimizer = made(model, SCHEMES[name], rescale="kl-clip")
        train(model, optimizer, (3, 8, 8), STEPS)
        stats = optimizer.stats()
        assert optimizer.placement.grid.size == size
        expected = expected_bytes(model, optimizer, rank, clipped=True)
        assert closed_form.bytes_of(stats) == expected
        assert {phase for phase, number in stats["messages"].items() if number} == {
            phase for phase, number in expected.items() if number
        }


@pytest.mark.parametrize("name", SCHEMES)
def test_a_residual_network_over_4096_ranks(name: str) -> None:
    torch.manual_seed(0)
    model = residual_network(width=4, classes=20)
    with world(4096, 2718):
        optimizer = made(model, SCHEMES[name])
        train(model, optimizer, (3, 32, 32), STEPS)
        stats = optimizer.stats()
        assert closed_form.bytes_of(stats) == expected_bytes(model, optimizer, 2718)
        # A message takes many tensors along: at most one for each statistic, part or gradient.
        assert stats["messages"]["reduce"] <= REFRESHES * 2 * 107 + STEPS * 161
        assert stats["messages"]["share"] <= REFRESHES * 2 * 107
        assert stats["messages"]["spread"] <= STEPS * 161


@pytest.mark.parametrize("name", ["comm-opt", "hybrid(0.5)"])
@pytest.mark.parametrize("size", SIZES)
def test_a_factor_that_many_ranks_divide_travels_once(size: int, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(900, 4), nn.Linear(4, 3))
    with world(size, 40):
        optimizer = made(model, SCHEMES[name], solver="cholesky")
        task = optimizer.placement.assignments["1"].tasks["A"]
        assert task.split
        assert len(optimizer.placement.solvers("1", "A")) > 2
        train(model, optimizer, (900,), STEPS)
        expected = expected_bytes(model, optimizer, 40, solver="cholesky")
        assert closed_form.bytes_of(optimizer.stats()) == expected


def test_the_plan_covers_every_statistic_once() -> None:
    model = residual_network(width=4, classes=20)
    with world(1024, 1):
        optimizer = made(model, "comm-opt")
        train(model, optimizer, (3, 32, 32), 1)
        groups = coordinator(optimizer).rounds.plan.groups
        assert groups is not None
        planned = [key for group in groups for key in group]
    layers = closed_form.sizes(model)
    sides = [(name, side) for name, one in layers.items() for side in one.solutions]
    assert sorted(planned) == sorted(f"{name}/{side or 'F'}" for name, side in sides)


# --- roles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in MEASURED])
def test_every_rank_comes_to_the_same_placement_and_knows_its_role(name: str, size: int) -> None:
    with torch.device("meta"):
        model = residual_network()
    described = []
    for rank in (0, 1, size // 2 + 3, size - 1):
        with world(size, rank):
            optimizer = made(model, SCHEMES[name])
            placement = optimizer.placement
            described.append(placement.to_json())
            for state in optimizer._preconditioner.layers.values():
                workers = placement.workers(state.name)
                assert state.is_worker == (rank in workers)
                assert coordinator(optimizer).layout.owner(state) == workers[0]
            optimizer.detach()
    assert all(one == described[0] for one in described)


#: How many ranks work on a layer.
WORKERS = {
    "replicated": lambda size: size,
    "comm-opt": lambda size: size,
    "mem-opt": lambda size: 1,
    "hybrid(0.5)": lambda size: size // 2,
    "hybrid(1/64)": lambda size: size // 64,
    "local": lambda size: 1,
    "layer-parallel": lambda size: 1,
    "spd": lambda size: size,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WORKERS)
def test_each_statistic_has_one_keeper_and_each_layer_its_workers(name: str, size: int) -> None:
    with torch.device("meta"):
        model = residual_network()
    with world(size, 7):
        optimizer = made(model, SCHEMES[name])
        placement, units = optimizer.placement, list(coordinator(optimizer).layout.units.values())
        kept: dict[str, int] = {}
        for unit in units:
            assert len(placement.workers(unit.name)) == WORKERS[name](size)
            for statistic in unit.statistics:
                kept[statistic.key] = placement.keeper(unit, statistic.key, len(kept))
        assert len(kept) == 53 * 3 + 2
        assert all(0 <= rank < size for rank in kept.values())
        if name in ("mem-opt", "local", "layer-parallel"):
            owners = [placement.workers(unit.name)[0] for unit in units]
            assert len(set(owners)) == len(owners) == 107  # more ranks than layers: one for each
        optimizer.detach()


def test_the_statistics_of_resnet50_are_those_of_the_papers() -> None:
    """62.35 M numbers of A and 14.62 M of G, and nobody solves more than one whole factor."""
    with torch.device("meta"):
        model = residual_network()
    with world(1024, 0):
        optimizer = made(model, "comm-opt", exclude=nn.BatchNorm2d)
        units = list(coordinator(optimizer).layout.units.values())
        found = {
            side: sum(s.elements for u in units for s in u.statistics if s.key.endswith(side))
            for side in ("/A", "/G")
        }
        assert {side: round(n / 1e6, 2) for side, n in found.items()} == {"/A": 62.35, "/G": 14.62}
        loads = makespan(units, optimizer.placement)
        assert sum(1 for load in loads if load) >= 108
        optimizer.detach()


@pytest.mark.parametrize("size", SIZES)
def test_auto_chooses_what_gives_the_same_numbers(size: int) -> None:
    with torch.device("meta"):
        model = residual_network()
    with world(size, 100):
        optimizer = made(model, "auto", refresh_every=100)
        assert optimizer.placement.scheme in {str(scheme) for scheme in candidates(size)}
        optimizer.detach()


# --- what it takes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_a_rank_makes_a_few_groups(name: str) -> None:
    """All ranks, all ranks once more for what leaves early, its column and its row."""
    model = small()
    with world(4096, 70):
        before = len(distributed_c10d._world.pg_map)
        optimizer = made(model, SCHEMES[name])
        train(model, optimizer, (3, 8, 8), 3)
        assert len(distributed_c10d._world.pg_map) - before <= 4


def calls(size: int, scheme: Any) -> tuple[int, int, dict[str, int]]:
    """Function calls and bytes of memory to begin and take two steps, and what ranks agreed by."""
    model = small()
    with world(size, 5):
        tracemalloc.start()
        profile = cProfile.Profile()
        profile.enable()
        optimizer = made(model, scheme)
        train(model, optimizer, (3, 8, 8), 2)
        profile.disable()
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return pstats.Stats(profile).total_calls, memory, optimizer.stats()["control"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SCHEMES)
def test_work_and_memory_grow_no_faster_than_the_world(name: str) -> None:
    calls(16, SCHEMES[name])  # imports what is used
    few, many = (calls(size, SCHEMES[name]) for size in (512, 4096))
    assert many[0] <= 8 * few[0]
    assert many[1] <= 8 * few[1] + 10**6
    assert many[2] == few[2]


def test_the_fake_backend_is_there() -> None:
    """It is internal to torch; if it goes, this is the place to look."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with world(8, 3):
            assert dist.get_backend() == "fake"
            one = torch.ones(2)
            dist.all_reduce(one)
            assert one.tolist() == [1, 1]
