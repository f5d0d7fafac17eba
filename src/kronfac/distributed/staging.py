"""From statistics to solutions: each part is solved as soon as what it needs has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from kronfac.distributed.coordinator import Solved
from kronfac.distributed.layout import Layout
from kronfac.distributed.reduce import Round
from kronfac.distributed.refresh import Solving, Work
from kronfac.distributed.rounds import Rounds
from kronfac.state.layer_state import LayerState


def solve(rounds: Rounds, due: Sequence[LayerState], damping: float) -> Iterable[Solved]:
    """Add up the statistics of some layers, solve these, and send off solutions.

    To iterate over the result is to wait for solutions of other ranks.
    """
    layout = rounds.layout
    solving = Solving(layout, rounds.phases, due, damping)
    if layout.is_local:
        return _solve_own(solving)
    with rounds.phases("reduce"):
        current, arrivals = rounds.finish(due)
    for state in due:
        for name in state.running:
            key = layout.key(state, name)
            solving.missing[state] |= not current.counts[key] > 0
            if key in current.outlines:
                solving.outlines[state][name] = current.outlines[key]
    sums: dict[str, Tensor] = {}
    solving.run(_stages(layout, current), _receive(solving, current, rounds.timed(arrivals), sums))
    return _outcome(rounds, solving, current, sums)


def _receive(
    solving: Solving,
    current: Round,
    arrivals: Iterator[Mapping[str, Tensor]],
    sums: dict[str, Tensor],
) -> Iterator[None]:
    """Turn sums into means as they arrive, one message at a time."""
    for arrived in arrivals:
        sums.update(arrived)
        for key, total in arrived.items():
            state, name = current.sources[key]
            if current.counts[key] > 0:
                mean = state.running[name].mean_of(total, current.counts[key])
                solving.means[state][name] = mean
        yield


def _stages(layout: Layout, current: Round) -> list[list[Work]]:
    """Which parts can be solved after which bucket has arrived."""
    first = 1 if current.unbucketed else 0
    stages: list[list[Work]] = [[] for _ in range(len(current.reduction.buckets) + first)]
    for state in current.states:
        for part, described in state.block.parts.items():
            keys = [layout.key(state, name) for name in described.statistics]
            last = max(
                0 if key in current.unbucketed else first + current.reduction.bucket_of(key)
                for key in keys
            )
            stages[last].append((state, part))
    return stages


def _outcome(
    rounds: Rounds, solving: Solving, current: Round, sums: Mapping[str, Tensor]
) -> Iterator[Solved]:
    """What ranks agree on; each statistic is left with its keeper."""
    outcome = solving.outcome()
    current.settle(sums)
    rounds.decide_groups(current)
    yield from outcome.items()


def _solve_own(solving: Solving) -> Iterable[Solved]:
    """Solve from what this rank has observed, where statistics do not travel."""
    for state in filter(solving.layout.works_on, solving.due):
        with solving.phases("refresh", state.name):
            _take_means(solving, state)
    work = [(state, part) for state in solving.due for part in state.block.parts]
    solving.run([work], iter(()))
    return _own_outcome(solving)


def _own_outcome(solving: Solving) -> Iterator[Solved]:
    yield from solving.outcome().items()


def _take_means(solving: Solving, state: LayerState) -> None:
    """Give a layer the means of what this rank has observed."""
    for name, running in state.running.items():
        mean = running.mean()
        if mean is None:
            continue
        solving.means[state][name] = mean
        outline = state.block.outline(name, mean)
        if outline is not None:
            solving.outlines[state][name] = outline
