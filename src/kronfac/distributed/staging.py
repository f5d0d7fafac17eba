"""From statistics to solutions: each part is solved as soon as what it needs has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from kronfac.distributed.coordinator import Now, Solved
from kronfac.distributed.layout import Layout
from kronfac.distributed.reduce import Round
from kronfac.distributed.refresh import Solving
from kronfac.distributed.rounds import Rounds
from kronfac.distributed.solving.layer_solve import Work
from kronfac.distributed.solving.means import own_means, read_statistics
from kronfac.state.layer_state import Due, LayerState


def solve(rounds: Rounds, due: Due, now: Now) -> Iterable[Solved]:
    """Add up the statistics of some layers, solve these, and send off solutions.

    To iterate over the result is to wait for solutions of other ranks.
    """
    layout = rounds.layout
    solving = Solving(layout, rounds.phases, due, now)
    generator = now.generator(due, layout.world.rank)
    if layout.is_local:
        return _solve_own(solving, generator)

    def compress(state: LayerState, counts: Mapping[str, float]) -> Mapping[str, Tensor]:
        return state.compressed_rows(now.given(state, {}, counts=counts, rank_generator=generator))

    with rounds.phases("reduce"):
        current, arrivals = rounds.finish(due, compress)
    solving.shards, solving.counts = current.shards, current.counts
    for key, (source, name) in current.sources.items():
        needed = not source.running[name].statistic.may_be_missing
        for state in current.users[key]:
            solving.missing[state] |= needed and not current.counts[key] > 0
            if key in current.outlines:
                solving.outlines[state][name] = current.outlines[key]
    solving.skip_old()
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
            source, name = current.sources[key]
            running = source.running[name]
            made = running.statistic.source == "compressed"
            if not made and not current.counts[key] > 0:
                continue
            mean = total if made else running.mean_of(total, current.counts[key])
            for state in current.users[key]:
                solving.means[state][name] = mean
        yield


def _stages(layout: Layout, current: Round) -> list[list[Work]]:
    """Which parts can be solved after which bucket has arrived."""
    count = current.early_stages + len(current.reduction.buckets)
    stages: list[list[Work]] = [[] for _ in range(count)]
    for state, parts in current.due.items():
        for part in parts:
            described = state.block.parts[part]
            if described.after:
                continue
            keys = [layout.key(state, name) for name in described.statistics]
            stages[max(map(current.stage_of, keys))].append((state, part))
    return stages


def _outcome(
    rounds: Rounds, solving: Solving, current: Round, sums: Mapping[str, Tensor]
) -> Iterator[Solved]:
    """What ranks agree on; each statistic is left with its keeper."""
    outcome = solving.outcome()
    rounds.close(current, sums)
    rounds.decide_groups(current)
    yield from outcome.items()


def _solve_own(solving: Solving, generator: torch.Generator | None) -> Iterable[Solved]:
    """Solve from what this rank has observed, where statistics do not travel."""
    states = list(filter(solving.layout.works_on, solving.due))
    read = read_statistics({state: state.names_of(solving.due[state]) for state in states})
    for state in states:
        with solving.phases("refresh", state.name):
            _take_means(solving, state, read[state].counts, generator)
    solving.skip_old()
    work = [
        (state, part)
        for state, parts in solving.due.items()
        for part in parts
        if not state.block.parts[part].after
    ]
    solving.run([work], iter(()))
    return _own_outcome(solving)


def _own_outcome(solving: Solving) -> Iterator[Solved]:
    yield from solving.outcome().items()


def _take_means(
    solving: Solving,
    state: LayerState,
    own: Mapping[str, float],
    generator: torch.Generator | None,
) -> None:
    """Give a layer the means of what this rank has observed."""
    counts = state.row_counts(own)
    given = solving.now.given(state, {}, counts=counts, rank_generator=generator)
    means = own_means(state, state.names_of(solving.due[state]), own, given)
    if means is None:
        solving.missing[state] = True
        return
    solving.means[state] = means
    solving.outlines[state] = state.block.outlines(means)
    for name, mean in means.items():
        if state.running[name].statistic.combine == "gather":
            key = solving.layout.key(state, name)
            solving.shards[key] = [mean.shape[-2]]
            solving.counts[key] = counts.get(name, 0.0)
