"""Which rank does what: a plan that all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kronfac.placement.costs import LayerUnit
from kronfac.placement.grid import Grid


@dataclass(frozen=True)
class Task:
    """Which ranks solve one part of a layer.

    Args:
        rank: the one rank that solves it; ``None`` if there are several.
        split: several ranks solve it together, each of them one summand. Without ``rank`` and
            ``split``, every worker of the layer solves all of it.
        ranks: those that solve it together; empty stands for all workers of the layer.
    """

    rank: int | None = None
    split: bool = False
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """The ranks that a layer is assigned to.

    Args:
        column: the column of the grid whose ranks work on it.
        tasks: which ranks solve each part.
        sliced: whether all ranks work on it, each on its slice; those of the column solve.
    """

    column: int
    tasks: Mapping[str, Task]
    sliced: bool = False


@dataclass(frozen=True)
class Placement:
    """The assignments of all layers.

    Args:
        scheme: its name.
        grid: the ranks.
        assignments: by name of the layer.
    """

    scheme: str
    grid: Grid
    assignments: Mapping[str, Assignment]

    def workers(self, layer: str) -> tuple[int, ...]:
        """The ranks that hold a layer's solution and precondition its gradient."""
        if self.assignments[layer].sliced:
            return tuple(range(self.grid.size))
        return self.grid.column(self.assignments[layer].column)

    def is_worker(self, layer: str, rank: int) -> bool:
        """Whether a rank is one of them."""
        assignment = self.assignments[layer]
        return assignment.sliced or self.grid.column_of(rank) == assignment.column

    def solvers(self, layer: str, part: str) -> tuple[int, ...]:
        """The ranks that solve a part: one alone, several together, or each redundantly."""
        task = self.assignments[layer].tasks[part]
        if task.rank is not None:
            return (task.rank,)
        return task.ranks or self.workers(layer)

    def needs(self, layer: LayerUnit, key: str) -> tuple[int, ...] | None:
        """The ranks that need the sum of a statistic; ``None`` stands for all ranks."""
        parts = [part.name for part in layer.parts if key in part.statistics]
        tasks = [self.assignments[layer.name].tasks[part] for part in parts]
        by_workers = any(task.rank is None and not task.ranks for task in tasks)
        if by_workers and self.grid.columns == 1:
            return None
        needed = {rank for part in parts for rank in self.solvers(layer.name, part)}
        several = any(task.rank is None for task in tasks)
        return None if several and len(needed) == self.grid.size else tuple(sorted(needed))

    def keeper(self, layer: LayerUnit, key: str, index: int) -> int:
        """The rank that keeps the sum of a statistic.

        It is the rank that solves with it. If there are several, ``index``, the statistic's position
        among all, distributes the kept sums over them.
        """
        needed = self.needs(layer, key)
        if not needed:
            return index % self.grid.size
        return needed[index % len(needed)]

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts."""
        return {
            "scheme": self.scheme,
            "size": self.grid.size,
            "workers": self.grid.workers,
            "assignments": {
                name: {
                    "column": assignment.column,
                    "sliced": assignment.sliced,
                    "tasks": {
                        part: {"rank": task.rank, "split": task.split, "ranks": list(task.ranks)}
                        for part, task in assignment.tasks.items()
                    },
                }
                for name, assignment in self.assignments.items()
            },
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Placement:
        """The inverse of :meth:`to_json`."""
        return cls(
            scheme=plain["scheme"],
            grid=Grid(plain["size"], plain["workers"]),
            assignments={
                name: Assignment(
                    assignment["column"],
                    {
                        part: Task(task["rank"], task["split"], tuple(task["ranks"]))
                        for part, task in assignment["tasks"].items()
                    },
                    assignment.get("sliced", False),
                )
                for name, assignment in _assignments(plain).items()
            },
        )


def _assignments(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checkpoints of version 0.1 have them under another name."""
    found: Mapping[str, Any] = plain["assignments" if "assignments" in plain else "seats"]
    return found
