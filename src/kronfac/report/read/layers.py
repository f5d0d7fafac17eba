"""What each layer costs, and on which rank."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kronfac.report.read.phases import PHASES
from kronfac.report.read.read import number, whole
from kronfac.report.read.summary import Group, median

_MOST_SIDES, _LONGEST, _MOST = 8, 10**9, 10**15


@dataclass(frozen=True)
class LayerCost:
    """One preconditioned layer."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int | None
    bytes: float | None
    ranks: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def work(self) -> float:
        """Cost of solving, for colouring: cubes of the factors' sides.

        Seconds would not do: they are those of rank 0, which solves some layers only.
        """
        *groups, rows, columns = (1, 0, 0, *self.shape) if len(self.shape) < 2 else self.shape
        cubes = math.prod(groups) * (rows**3 + columns**3)
        return float(cubes) or float(self.bytes or 0)


def layers(group: Group) -> list[LayerCost]:
    """Layers of a group as its first run lists them; seconds are medians over its runs."""
    lists = [run.layers.get("layers") for run in group.runs if run.layers]
    named = [{str(e.get("name", "")): e for e in _dicts(entries)} for entries in lists]
    if not named or not named[0]:
        return []
    found = []
    for name, entry in named[0].items():
        taken = [_seconds(other[name]) for other in named if name in other]
        phases = {p for seconds in taken for p in seconds}
        ordered = [p for p in PHASES if p in phases] + sorted(phases - set(PHASES))
        medians = {p: median([seconds.get(p, 0.0) for seconds in taken]) for p in ordered}
        found.append(_layer(name, entry, medians))
    return found


def skipped(group: Group) -> list[tuple[str, str]]:
    """Parameters that are not preconditioned, and why."""
    run = next((run for run in group.runs if run.layers), None)
    entries = _dicts(run.layers.get("skipped")) if run and run.layers else []
    return [(str(e.get("name", "")), str(e.get("why", ""))) for e in entries]


def scheme(group: Group) -> str:
    """How the work was shared out, as the run names it."""
    run = next((run for run in group.runs if run.layers), None)
    return str((run.layers or {}).get("scheme") or "") if run else ""


def _layer(name: str, entry: dict[str, Any], seconds: dict[str, float]) -> LayerCost:
    ranks = entry.get("ranks")
    return LayerCost(
        name=name or "(model)",
        kind=str(entry.get("kind") or ""),
        shape=_shape(entry.get("shape")),
        parameters=whole(entry.get("parameters"), 0, _MOST),
        bytes=number(entry.get("bytes")),
        ranks="all" if ranks is None else str(ranks),
        seconds=seconds,
    )


def _shape(sides: Any) -> tuple[int, ...]:
    """Empty if it is none, or none that a weight can have."""
    if not isinstance(sides, list) or len(sides) > _MOST_SIDES:
        return ()
    found = [whole(side, 0, _LONGEST) for side in sides]
    return tuple(side for side in found if side is not None) if None not in found else ()


def _seconds(entry: dict[str, Any]) -> dict[str, float]:
    seconds = entry.get("seconds")
    if not isinstance(seconds, dict):
        return {}
    return {str(k): max(0.0, n) for k, v in seconds.items() if (n := number(v)) is not None}


def _dicts(entries: Any) -> list[dict[str, Any]]:
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def loads(layer: LayerCost, world: int) -> dict[int, float]:
    """Share of a layer's cost on each rank that solves a part of it.

    ``"0"`` is one rank, ``"0,3"`` its two factors, ``"0+3"`` ranks that divide a factor, ``"all"`` every
    rank does the same. Factors weigh as the cubes of their sides.
    """
    parts = layer.ranks.split(",")
    sides = layer.shape[-2:] if len(layer.shape) >= 2 and len(parts) == 2 else (1,) * len(parts)
    # The first part is the statistics of the inputs, whose side is the second one of the shape.
    weights = [side**3 for side in reversed(sides)]
    total = sum(weights) or 1
    found: dict[int, float] = {}
    for part, weight in zip(parts, weights, strict=True):
        share = layer.work * weight / total
        for rank, amount in _ranks(part, share, world):
            found[rank] = found.get(rank, 0.0) + amount
    return found


def _ranks(part: str, share: float, world: int) -> list[tuple[int, float]]:
    numbers = [int(n) for n in re.findall(r"\d+", part)]
    divided = re.fullmatch(r"\s*(\d+) ranks\s*", part)
    if divided:  # too many to be listed; they are the first so many
        numbers = list(range(min(world, int(divided[1]))))
        return [(rank, share / len(numbers)) for rank in numbers]
    numbers = [rank for rank in numbers if rank < world]
    if not numbers:
        return [(rank, share) for rank in range(world)]
    return [(rank, share / len(numbers)) for rank in numbers]


def balance(layer_costs: Sequence[LayerCost], world: int) -> list[float]:
    """Cost of all layers on each rank."""
    totals = [0.0] * world
    for layer in layer_costs:
        for rank, amount in loads(layer, world).items():
            totals[rank] += amount
    return totals
