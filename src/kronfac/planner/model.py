"""The time, traffic and memory that a placement will take.

Every rank sends and receives at the same time. Three kinds of traffic differ by placement:

- ``reduce``: sums of statistics. Those that all ranks need are added by a ring, where each rank sends
  ``2(P-1)/P`` of them. All others go straight to the rank that keeps the sum, in one exchange: a rank
  sends what others keep, and receives what it keeps from all others. If more than one rank needs a
  sum, the one that keeps it sends it on.
- ``share``: solutions, inside a column of the grid. The rank that solved a part sends it to all other
  workers; what several solved together is added by a ring.
- ``spread``: preconditioned gradients, inside a row, at every step.

An exchange takes one latency, and then as long as the rank that sends or receives most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kronfac.distributed.placement import makespan
from kronfac.distributed.seats import Placement
from kronfac.distributed.units import Compute, LayerUnit, Link


@dataclass(frozen=True)
class Prediction:
    """What a placement will take.

    Args:
        scheme: its name.
        seconds: per step, on average, by phase: ``reduce``, ``refresh``, ``share``,
            ``precondition`` and ``spread``.
        bytes: what the rank that sends most sends, per refresh (``reduce``, ``share``) or per step
            (``spread``).
        memory: bytes of solutions and of kept statistics, as they travel, on the fullest rank.
    """

    scheme: str
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    memory: int

    @property
    def total(self) -> float:
        """Seconds per step."""
        return sum(self.seconds.values())


def predict(
    layers: Sequence[LayerUnit],
    placement: Placement,
    link: Link,
    compute: Compute,
    refresh_every: int,
    hidden: float = 0.0,
) -> Prediction:
    """Predict what a placement takes.

    Args:
        layers: the work.
        placement: who does it.
        link: the network.
        compute: the speed of a rank.
        refresh_every: steps from one solution to the next.
        hidden: seconds of a refresh step's forward and backward pass, during which statistics travel
            unnoticed.
    """
    reduce, share, spread = (
        _reduce(layers, placement),
        _share(layers, placement),
        _spread(layers, placement),
    )
    precondition = [0.0] * placement.grid.columns
    for layer in layers:
        seconds = compute.product(layer.precondition_flops)
        precondition[placement.seats[layer.name].column] += seconds
    return Prediction(
        scheme=placement.scheme,
        seconds={
            "reduce": max(0.0, _seconds(reduce, link) - hidden) / refresh_every,
            "refresh": max(makespan(layers, placement, compute)) / refresh_every,
            "share": _seconds(share, link) / refresh_every,
            "precondition": max(precondition),
            "spread": _seconds(spread, link),
        },
        bytes={"reduce": _sent(reduce), "share": _sent(share), "spread": _sent(spread)},
        memory=max(_memory(layers, placement)),
    )


class _Traffic:
    """Bytes that each rank sends and receives in one exchange."""

    def __init__(self, ranks: int) -> None:
        self.sent = [0.0] * ranks
        self.received = [0.0] * ranks

    def seconds(self, link: Link) -> float:
        busiest = max(*self.sent, *self.received)
        return link.latency + busiest * link.seconds_per_byte if busiest else 0.0


def _seconds(exchanges: Sequence[_Traffic], link: Link) -> float:
    return sum(exchange.seconds(link) for exchange in exchanges)


def _sent(exchanges: Sequence[_Traffic]) -> int:
    return round(max(map(sum, zip(*(exchange.sent for exchange in exchanges), strict=True))))


def _reduce(layers: Sequence[LayerUnit], placement: Placement) -> list[_Traffic]:
    size = placement.grid.size
    ring, gather, copy = _Traffic(size), _Traffic(size), _Traffic(size)
    if placement.scheme == "local":
        return [gather]
    kept, everywhere = [0] * size, 0
    index = 0
    for layer in layers:
        for statistic in layer.statistics:
            needed = placement.needs(layer, statistic.key)
            if needed is None:
                everywhere += statistic.bytes
            else:
                keeper = placement.keeper(layer, statistic.key, index)
                kept[keeper] += statistic.bytes
                for rank in needed:
                    if rank != keeper:
                        copy.sent[keeper] += statistic.bytes
                        copy.received[rank] += statistic.bytes
            index += 1
    total = sum(kept)
    gather.sent = [float(total - own) for own in kept]
    gather.received = [float((size - 1) * own) for own in kept]
    ring.sent = ring.received = [everywhere * 2 * (size - 1) / size] * size
    return [ring, gather, copy]


def _share(layers: Sequence[LayerUnit], placement: Placement) -> list[_Traffic]:
    grid = placement.grid
    ring, copy = _Traffic(grid.size), _Traffic(grid.size)
    together, alone = [0] * grid.columns, [0] * grid.columns
    own = [0] * grid.size
    for layer in layers:
        seat = placement.seats[layer.name]
        for part in layer.parts:
            task, size = seat.tasks[part.name], part.solution_elements * layer.itemsize
            if task.split:
                together[seat.column] += size
            elif task.rank is not None:
                alone[seat.column] += size
                own[task.rank] += size
    for rank in range(grid.size):
        column = grid.column_of(rank)
        copy.sent[rank] = float((grid.workers - 1) * own[rank])
        copy.received[rank] = float(alone[column] - own[rank])
        ring.sent[rank] = together[column] * 2 * (grid.workers - 1) / grid.workers
    ring.received = ring.sent
    return [ring, copy]


def _spread(layers: Sequence[LayerUnit], placement: Placement) -> list[_Traffic]:
    grid = placement.grid
    traffic = _Traffic(grid.size)
    own = [0] * grid.columns
    for layer in layers:
        own[placement.seats[layer.name].column] += layer.gradient_bytes
    total = sum(own)
    for rank in range(grid.size):
        column = grid.column_of(rank)
        traffic.sent[rank] = float((grid.columns - 1) * own[column])
        traffic.received[rank] = float(total - own[column])
    return [traffic]


def _memory(layers: Sequence[LayerUnit], placement: Placement) -> list[int]:
    grid = placement.grid
    solutions, kept = [0] * grid.columns, [0] * grid.size
    index = 0
    for layer in layers:
        solutions[placement.seats[layer.name].column] += layer.solution_bytes
        for statistic in layer.statistics:
            kept[placement.keeper(layer, statistic.key, index)] += statistic.bytes
            index += 1
    return [solutions[grid.column_of(rank)] + bytes_ for rank, bytes_ in enumerate(kept)]
