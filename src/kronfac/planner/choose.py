"""The cheapest scheme among those that give the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.placement.assignment import Placement
from kronfac.placement.costs import Compute, LayerUnit, Link
from kronfac.placement.grid import divisors
from kronfac.placement.place import place
from kronfac.placement.scheme import Hybrid
from kronfac.planner.predict import Prediction, predict

#: Number of grids that are tried between one worker per layer and all ranks.
_GRIDS = 8


def choose(
    layers: Sequence[LayerUnit],
    size: int,
    link: Link,
    compute: Compute,
    refresh_every: int,
    *,
    hidden: float = 0.0,
    direct: bool = True,
    balanced: bool = True,
    split: bool = True,
) -> tuple[Placement, list[Prediction]]:
    """The placement with the lowest predicted cost, and the predictions of all, best first.

    ``"local"`` computes something else and ``"layer-parallel"`` needs a model without
    DistributedDataParallel, so neither is ever chosen. On a tie the simplest scheme is.

    Args:
        layers: the work.
        size: how many ranks there are.
        link: the network.
        compute: the speed of a rank.
        refresh_every: steps from one solution to the next.
        hidden: as for :func:`kronfac.planner.predict.predict`.
        direct: likewise.
        balanced: as for :func:`kronfac.placement.place.place`.
        split: likewise.
    """
    tried = []
    for scheme in candidates(size):
        placement = place(
            layers,
            size,
            scheme,
            link=link,
            compute=compute,
            refresh_every=refresh_every,
            balanced=balanced,
            split=split,
        )
        prediction = predict(layers, placement, link, compute, refresh_every, hidden, direct)
        tried.append((placement, prediction))
    tried.sort(key=lambda pair: pair[1].total)
    return tried[0][0], [prediction for _, prediction in tried]


def candidates(size: int) -> list[str | Hybrid]:
    """The schemes that are compared, the simplest first."""
    between = [number for number in divisors(size) if 1 < number < size]
    if len(between) > _GRIDS:
        powers = [number for number in between if number & (number - 1) == 0]
        between = powers if len(powers) >= _GRIDS // 2 else between
    if len(between) > _GRIDS:
        last = len(between) - 1
        between = [between[index * last // (_GRIDS - 1)] for index in range(_GRIDS)]
    named: list[str | Hybrid] = ["replicated", "comm-opt", "spd", "mem-opt"]
    return named + [Hybrid(workers / size) for workers in between]
