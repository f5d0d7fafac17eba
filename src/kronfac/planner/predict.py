"""Predicts the time, traffic and memory of a placement.

Every rank sends and receives at the same time. Three kinds of traffic differ by placement:

- ``reduce``: sums of statistics. Those that several ranks need are all-reduced in a ring, where each
  rank sends ``2(P-1)/P`` of them. All others go to the one rank that needs the sum.
- ``share``: solutions, inside a column of the grid. The rank that solved a part sends it to all other
  workers; what several ranks solved together is all-reduced in a ring.
- ``spread``: preconditioned gradients, inside a row, at every step.

Traffic to or from single ranks takes one of two forms. In an exchange everything is sent directly to
its destination: that takes one latency, and then as long as the rank that sends or receives most.
Otherwise each rank's part is forwarded along all ranks, in pieces, and added up on the way if it is a
sum: no rank sends more than all parts together, but each part has a latency of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kronfac.placement.assignment import Placement
from kronfac.placement.costs import Compute, LayerUnit, Link
from kronfac.placement.place import makespan


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a placement.

    Args:
        scheme: its name.
        seconds: per step, on average, by phase: ``reduce``, ``refresh``, ``share``,
            ``precondition`` and ``spread``.
        bytes: sent by the rank that sends most, per refresh interval (``reduce``, ``share``) or per
            step (``spread``).
        memory: bytes of solutions and of kept statistics, in the form that is sent, on the rank that
            holds most.
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
    direct: bool = True,
) -> Prediction:
    """Predict the cost of a placement.

    Args:
        layers: the work.
        placement: which rank does what.
        link: the network.
        compute: the speed of a rank.
        refresh_every: steps from one solution to the next.
        hidden: seconds of a refresh step's forward and backward pass, which overlap with sending
            statistics.
        direct: whether ranks exchange messages directly; sums are still forwarded if that is faster.
            Otherwise everything is forwarded.
    """
    exchanged, passed_on = _reduce(layers, placement)
    quicker = direct and _seconds(exchanged, link) <= _seconds(passed_on, link)
    reduce = exchanged if quicker else passed_on
    share, spread = _share(layers, placement, direct), _spread(layers, placement, direct)
    precondition = [0.0] * placement.grid.columns
    for layer in layers:
        seconds = compute.product(layer.precondition_flops)
        precondition[placement.assignments[layer.name].column] += seconds
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
    """Bytes that each rank sends and receives, in a number of consecutive messages."""

    def __init__(self, ranks: int, messages: int = 1) -> None:
        self.sent = [0.0] * ranks
        self.received = [0.0] * ranks
        self.messages = messages

    def seconds(self, link: Link) -> float:
        busiest = max(*self.sent, *self.received)
        if not busiest:
            return 0.0
        return self.messages * link.latency + busiest * link.seconds_per_byte


def _seconds(exchanges: Sequence[_Traffic], link: Link) -> float:
    return sum(exchange.seconds(link) for exchange in exchanges)


def _sent(exchanges: Sequence[_Traffic]) -> int:
    return round(max(map(sum, zip(*(exchange.sent for exchange in exchanges), strict=True))))


def _ring(ranks: int, size: int) -> _Traffic:
    """An all-reduce."""
    traffic = _Traffic(ranks)
    traffic.sent = traffic.received = [size * 2 * (ranks - 1) / ranks] * ranks
    return traffic


def _passed_on(own: Sequence[int]) -> _Traffic:
    """Every rank's part, forwarded along all ranks."""
    traffic = _Traffic(len(own), sum(1 for size in own if size))
    if len(own) > 1:
        traffic.sent = traffic.received = [float(sum(own))] * len(own)
    return traffic


def _reduce(
    layers: Sequence[LayerUnit], placement: Placement
) -> tuple[list[_Traffic], list[_Traffic]]:
    """In an exchange, and forwarded."""
    size = placement.grid.size
    kept, everywhere = [0] * size, 0
    for layer in layers if placement.scheme != "local" else ():
        for statistic in layer.statistics:
            if not statistic.times:
                continue
            needed = placement.needs(layer, statistic.key)
            size_sent = round(statistic.bytes * statistic.times)
            if needed is None or len(needed) > 1:
                everywhere += size_sent
            else:
                kept[needed[0]] += size_sent
    total = sum(kept)
    exchange = _Traffic(size)
    exchange.sent = [float(total - own) for own in kept]
    exchange.received = [float((size - 1) * own) for own in kept]
    ring = _ring(size, everywhere)
    return [ring, exchange], [ring, _passed_on(kept)]


def _share(layers: Sequence[LayerUnit], placement: Placement, direct: bool) -> list[_Traffic]:
    grid = placement.grid
    ring, copy = _Traffic(grid.size), _Traffic(grid.size)
    together, alone = [0] * grid.columns, [0] * grid.columns
    own = [0] * grid.size
    for layer in layers:
        assignment = placement.assignments[layer.name]
        for part in layer.parts:
            task = assignment.tasks[part.name]
            size = round(part.solution_elements * layer.itemsize * part.times)
            if task.split:
                together[assignment.column] += size
            elif task.rank is not None:
                alone[assignment.column] += size
                own[task.rank] += size
    senders = [0] * grid.columns
    for rank in range(grid.size):
        column = grid.column_of(rank)
        senders[column] += own[rank] > 0
        copy.sent[rank] = float((grid.workers - 1) * own[rank])
        copy.received[rank] = float(alone[column] - own[rank])
        ring.sent[rank] = together[column] * 2 * (grid.workers - 1) / grid.workers
    ring.received = ring.sent
    if not direct and grid.workers > 1:
        copy.messages = max(senders)
        copy.sent = copy.received = [
            float(alone[grid.column_of(rank)]) for rank in range(grid.size)
        ]
    return [ring, copy]


def _spread(layers: Sequence[LayerUnit], placement: Placement, direct: bool) -> list[_Traffic]:
    grid = placement.grid
    own = [0] * grid.columns
    for layer in layers:
        own[placement.assignments[layer.name].column] += layer.gradient_bytes
    if not direct:
        return [_passed_on(own)]
    traffic, total = _Traffic(grid.size), sum(own)
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
        solutions[placement.assignments[layer.name].column] += layer.solution_bytes
        for statistic in layer.statistics:
            if statistic.times:
                kept[placement.keeper(layer, statistic.key, index)] += statistic.bytes
            else:  # every worker has its own
                solutions[placement.assignments[layer.name].column] += statistic.bytes
            index += 1
    return [solutions[grid.column_of(rank)] + bytes_ for rank, bytes_ in enumerate(kept)]
