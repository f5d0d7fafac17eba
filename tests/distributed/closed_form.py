"""What travels, in closed form: sizes are counted from the model's modules alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from kronfac.placement.assignment import Placement

#: Widest side that is decomposed; layers with a wider one are inverted, and a triangle says all.
WIDEST_EIGEN = 2048


@dataclass(frozen=True)
class Sizes:
    """Numbers of one layer that travel."""

    triangles: int
    """Each number of its symmetric statistics once."""
    squares: int
    """All numbers of its statistics."""
    solutions: dict[str, int]
    """By part."""
    gradient: int

    @property
    def solution(self) -> int:
        return sum(self.solutions.values())


def sizes(model: nn.Module, solver: str = "auto", triangles: bool = True) -> dict[str, Sizes]:
    """By name of the module, for linear layers, convolutions without groups and norms."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weight = module.weight
            d_in = weight[0].numel() + (module.bias is not None)
            found[name] = _two_sides(d_in, weight.shape[0], solver, triangles)
        elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            channels = module.weight.numel()
            found[name] = Sizes(3 * channels, 4 * channels, {"": 6 * channels}, 2 * channels)
    return found


def _two_sides(d_in: int, d_out: int, solver: str, triangles: bool) -> Sizes:
    widths = {"A": d_in, "G": d_out}
    decomposed = solver == "eigen" or (solver == "auto" and max(widths.values()) <= WIDEST_EIGEN)
    solutions = {}
    for side, d in widths.items():
        symmetric = _triangle(d) if triangles else d * d
        solutions[side] = d * d + d if decomposed else symmetric
    return Sizes(
        sum(_triangle(d) for d in widths.values()),
        sum(d * d for d in widths.values()),
        solutions,
        d_in * d_out,
    )


def _triangle(width: int) -> int:
    return width * (width + 1) // 2


def parameters(model: nn.Module) -> int:
    """How many there are."""
    return sum(p.numel() for p in model.parameters())


def column_of(layer: str, placement: Placement) -> int:
    return placement.assignments[layer].column


def shared(model: dict[str, Sizes], placement: Placement, rank: int) -> int:
    """Numbers of solutions that a rank sends or receives at a refresh."""
    if placement.grid.workers == 1:
        return 0
    own = rank % placement.grid.columns
    total = 0
    for name, one in model.items():
        if column_of(name, placement) == own:
            for part, task in placement.assignments[name].tasks.items():
                everywhere = task.rank is None and not task.split
                total += 0 if everywhere else one.solutions[part]
    return total


def gradients(model: dict[str, Sizes]) -> int:
    """Numbers that are sent along every row at a step."""
    return sum(one.gradient for one in model.values())


def statistics(model: dict[str, Sizes], triangles: bool = True) -> int:
    """Numbers that are added over all ranks at a refresh."""
    return sum(one.triangles if triangles else one.squares for one in model.values())


def bytes_of(stats: dict[str, Any]) -> dict[str, int]:
    """A ledger with exactly the four phases."""
    found = stats["bytes"]
    assert list(found) == list(stats["messages"]) == ["reduce", "share", "spread", "rescale"]
    return dict(found)
