"""Placement by scheme: which rank solves and which rank preconditions each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kronfac.placement.assignment import Assignment, Placement, Task
from kronfac.placement.balance import divide, longest_first
from kronfac.placement.costs import Compute, LayerUnit, Link, PartUnit
from kronfac.placement.grid import Grid, nearest_divisor
from kronfac.placement.scheme import SCHEMES, Hybrid, Sharded

__all__ = [
    "Assignment",
    "Grid",
    "Placement",
    "Task",
    "makespan",
    "nearest_divisor",
    "place",
    "solve_seconds",
]


def place(
    layers: Sequence[LayerUnit],
    size: int,
    scheme: str | Hybrid | Sharded,
    *,
    link: Link | None = None,
    compute: Compute | None = None,
    refresh_every: int = 1,
    balanced: bool = True,
    split: bool = True,
) -> Placement:
    """Place the work of all layers over ``size`` ranks. The same arguments give the same placement.

    Whole layers are assigned to columns of the grid, weighted by the seconds per step that each worker
    spends on them. Then the parts of a column's layers are assigned to its workers, weighted by the
    seconds to solve them. Both are placed longest first.

    Args:
        layers: the work.
        size: how many ranks there are.
        scheme: how many workers a layer has, and what is solved everywhere.
        link: the network; ``"spd"`` and splitting compare it with solving.
        compute: the speed of a rank.
        refresh_every: steps from one solution to the next.
        balanced: place by cost; otherwise layers and parts are placed round robin, and nothing is split.
        split: let several workers solve one part together where everything then finishes earlier.
    """
    link, compute = link or Link(), compute or Compute()
    grid = Grid(size, _workers(scheme, size))
    columns = _columns(layers, grid, scheme, link, compute, refresh_every, balanced)
    members: list[list[LayerUnit]] = [[] for _ in range(grid.columns)]
    for layer, column in zip(layers, columns, strict=True):
        members[column].append(layer)
    tasks: dict[tuple[str, str], Task] = {}
    for column, own in enumerate(members):
        jobs = [
            _Job(layer, part, grid.workers, size, link, compute)
            for layer in own
            for part in layer.parts
        ]
        shared = [job for job in jobs if not _everywhere(job, scheme, size)]
        tasks |= {job.key: Task() for job in jobs}
        tasks |= _shared_tasks(shared, grid.column(column), balanced, split)
    assignments = {
        layer.name: Assignment(
            column,
            {part.name: tasks[layer.name, part.name] for part in layer.parts},
            layer.sliced,
        )
        for layer, column in zip(layers, columns, strict=True)
    }
    return Placement(str(scheme), grid, assignments)


def makespan(
    layers: Sequence[LayerUnit], placement: Placement, compute: Compute | None = None
) -> list[float]:
    """The seconds that each rank spends on solving in one refresh interval."""
    compute = compute or Compute()
    grid = placement.grid
    loads = [0.0] * grid.size
    common = [0.0] * grid.columns
    for layer in layers:
        assignment = placement.assignments[layer.name]
        for part in layer.parts:
            task = assignment.tasks[part.name]
            if task.rank is None and not task.ranks:
                pieces = grid.workers if task.split else 1
                common[assignment.column] += part.times * solve_seconds(part, compute, pieces)
            else:
                ranks = placement.solvers(layer.name, part.name)
                for rank in ranks:
                    loads[rank] += part.times * solve_seconds(part, compute, len(ranks))
    return [load + common[grid.column_of(rank)] for rank, load in enumerate(loads)]


def solve_seconds(part: PartUnit, compute: Compute, ranks: int = 1) -> float:
    """The seconds that each of several ranks spends when they solve a part together."""
    if ranks == 1 or part.shared_flops is None:
        return compute.solve(part.flops)
    return compute.solve(part.shared_flops + (part.flops - part.shared_flops) / ranks)


@dataclass(frozen=True)
class _Job:
    """A part that is still to be assigned to a rank of its column."""

    layer: LayerUnit
    part: PartUnit
    workers: int
    ranks: int
    link: Link
    compute: Compute

    @property
    def key(self) -> tuple[str, str]:
        return self.layer.name, self.part.name

    @property
    def divisible(self) -> bool:
        return self.part.shared_flops is not None

    @property
    def solution_bytes(self) -> int:
        return self.part.solution_elements * self.layer.itemsize

    def seconds(self, pieces: int) -> float:
        return solve_seconds(self.part, self.compute, pieces)

    def extra(self, pieces: int) -> float:
        """All-reduce instead of broadcast for a split solution, and instead of reduce for statistics."""
        size, link = self.solution_bytes, self.link
        statistics = sum(
            unit.bytes for unit in self.layer.statistics if unit.key in self.part.statistics
        )
        solution = link.all_reduce(size, self.workers) - link.broadcast(size, self.workers)
        summed = link.all_reduce(statistics, self.ranks) - link.reduce(statistics, self.ranks)
        return max(0.0, solution) + max(0.0, summed)


def _workers(scheme: str | Hybrid | Sharded, size: int) -> int:
    """How many ranks work on each layer."""
    if isinstance(scheme, Hybrid):
        return nearest_divisor(size, scheme.fraction)
    if isinstance(scheme, Sharded):
        return scheme.replicas
    if scheme in ("replicated", "comm-opt", "spd"):
        return size
    if scheme in ("mem-opt", "local", "layer-parallel"):
        return 1
    names = ", ".join(repr(name) for name in SCHEMES if name != "auto")
    raise ValueError(f"Nothing can be placed by {scheme!r}; choose one of {names}, or a Hybrid.")


def _columns(
    layers: Sequence[LayerUnit],
    grid: Grid,
    scheme: str | Hybrid | Sharded,
    link: Link,
    compute: Compute,
    refresh_every: int,
    balanced: bool,
) -> list[int]:
    """A column for every layer."""
    exchanged = isinstance(scheme, Sharded)
    together = exchanged or scheme == "layer-parallel"
    names = [
        layer.tied_to or layer.name if together else layer.beside or layer.name for layer in layers
    ]
    weights = dict.fromkeys(names, 0.0)
    for name, layer in zip(names, layers, strict=True):
        solve = sum(part.times * solve_seconds(part, compute) for part in layer.parts)
        # The workers of a column divide its solving; each of them preconditions all of it.
        weights[name] += solve / (refresh_every * grid.workers)
        if layer.sliced:  # the rest is the same for all ranks
            continue
        weights[name] += compute.product(layer.precondition_flops)
        if exchanged:  # its gradient comes and goes
            weights[name] += 2 * layer.gradient_bytes * link.seconds_per_byte
    chosen = (
        longest_first(list(weights.values()), grid.columns)
        if balanced
        else [index % grid.columns for index in range(len(weights))]
    )
    column = dict(zip(weights, chosen, strict=True))
    return [column[name] for name in names]


def _everywhere(job: _Job, scheme: str | Hybrid | Sharded, size: int) -> bool:
    """Whether all workers solve it redundantly: always, or where that is faster than a broadcast."""
    if job.part.by_each:
        return True
    if scheme == "spd":
        return job.seconds(1) < job.link.broadcast(job.solution_bytes, size)
    return scheme == "replicated"


def _shared_tasks(
    jobs: Sequence[_Job], ranks: tuple[int, ...], balanced: bool, split: bool
) -> dict[tuple[str, str], Task]:
    """Which ranks of a column solve which part, for parts that are not solved on all of them."""
    if not balanced:
        return {job.key: Task(ranks[index % len(ranks)]) for index, job in enumerate(jobs)}
    if split:
        places = divide(jobs, len(ranks))
    else:
        places = [[index] for index in longest_first([job.seconds(1) for job in jobs], len(ranks))]
    return {job.key: _task(place, ranks) for job, place in zip(jobs, places, strict=True)}


def _task(place: Sequence[int], ranks: tuple[int, ...]) -> Task:
    if len(place) == 1:
        return Task(ranks[place[0]])
    chosen = tuple(sorted(ranks[index] for index in place))
    return Task(split=True, ranks=() if chosen == ranks else chosen)
