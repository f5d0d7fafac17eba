"""One process: everything is here, and nothing travels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kronfac.capture import broadcast
from kronfac.distributed.comm.traffic import Traffic
from kronfac.distributed.coordinator import Coordinator, Now, ParamGroups, Solved
from kronfac.distributed.reduce import Moment
from kronfac.distributed.solving.layer_solve import solve_layers
from kronfac.distributed.solving.means import Read, own_means, read_statistics
from kronfac.distributed.workload import Intervals
from kronfac.protocol.context import Given
from kronfac.state.layer_state import Due, LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer

#: Elements of new solutions that exist beside the old ones: half a gigabyte in single precision.
MAX_NEW_ELEMENTS = 2**27


class Local(Coordinator):
    """A coordinator that has nobody to coordinate."""

    sees_all = True
    size = 1
    placement = None
    separate_gradients = False
    is_partial = False

    def __init__(self, phases: Phases) -> None:
        self.phases = phases

    @property
    def process_group(self) -> Any:
        """The process group of these ranks."""
        return dist.group.WORLD

    def attach(
        self, states: Sequence[LayerState], groups: ParamGroups, intervals: Callable[[], Intervals]
    ) -> None:
        """Everything stays here."""

    def solved_by(self, state: LayerState) -> str:
        """The only rank."""
        return "0"

    def overview(self, states: Sequence[LayerState]) -> None:
        """There is nothing to say of ranks."""
        return

    def compare_samples(self, samples: int) -> None:
        """All samples are here."""

    def first_sample(self, total: int) -> int:
        """All samples are here."""
        return 0

    def largest(self, values: Sequence[float]) -> list[float]:
        """The numbers themselves."""
        return list(values)

    def input_bound(self, state: LayerState) -> None:
        """All layers are here."""

    def share_inputs(self, states: Sequence[LayerState], new: Sequence[LayerState]) -> None:
        """Everything stays here."""

    # --- before the step ------------------------------------------------------------------------

    def expect(self, coming: Callable[[], Due], moment: Callable[[], Moment]) -> None:
        """Statistics do not leave."""

    def observed(self, state: LayerState, source: str) -> None:
        """Statistics do not leave."""

    def meet(self, groups: ParamGroups, is_joining: Callable[[], bool], active: bool) -> None:
        """There is nobody to meet."""

    def agree(self, states: Sequence[LayerState]) -> None:
        """There is nobody to agree with."""

    # --- gradients and parameters ---------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Gradients are those of the whole batch."""

    def steps(self, parameter: nn.Parameter) -> bool:
        """Every parameter is stepped here."""
        return True

    def only_own(self) -> AbstractContextManager[None]:
        """Every parameter is stepped here."""
        return nullcontext()

    def spread_weights(self) -> None:
        """Nobody else needs them."""

    def anywhere(self, flag: bool) -> bool:
        """There is no other rank."""
        return flag

    def part_weight(self, parameter: nn.Parameter) -> float:
        """All of it is here."""
        return 1.0

    # --- the phases of a step -------------------------------------------------------------------

    def collect(self, states: Sequence[LayerState]) -> None:
        """Gradients are whole."""

    def land(self, normalizer: Callable[[], Normalizer]) -> None:
        """All of it is here."""

    def before_fold(self, states: Sequence[LayerState], passes: Mapping[Pass, Any]) -> None:
        """Nothing has left that could be incomplete."""

    def settle_broadcast(self, states: Sequence[LayerState], normalizer: Normalizer) -> None:
        """Turn rows that stand for all samples into contributions."""
        settle_own(states, normalizer)

    def observes_gradient(self, state: LayerState) -> bool:
        """Gradients are those of the whole batch."""
        return True

    def reduce(self, states: Sequence[LayerState]) -> None:
        """Statistics are those of all data."""

    def refresh(self, due: Due, now: Now) -> Iterator[Solved]:
        """Solve a few layers at a time, so that not all have an old and a new solution at once.

        The host waits for the counts of all, and then for the outcome of each few.
        """
        generator = now.generator(due, 0)
        parts = {state: state.news(due_parts) for state, due_parts in due.items()}
        with self.phases("refresh"):
            read = read_statistics({state: state.names_of(own) for state, own in parts.items()})
        for some in _few(parts):
            with self.phases("refresh"), self.phases.part("refresh", *(s.name for s in some)):
                given = {
                    state: own
                    for state in some
                    if (own := _given(state, parts[state], read[state], now, generator)) is not None
                }
                solved = solve_layers(
                    given, parts, [state for state in given if read[state].finite]
                )
            yield from solved

    def share(self, solved: Iterable[Solved]) -> Iterable[Solved]:
        """Solutions are where they are needed."""
        return solved

    def portions(
        self, states: Sequence[LayerState], at_once: bool
    ) -> Iterable[Sequence[LayerState]]:
        """All layers: gradients are where they are needed."""
        return [states]

    # --- numbers --------------------------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """The numbers themselves."""
        return values

    def mean(self, values: Tensor) -> Tensor:
        """The numbers themselves."""
        return values

    def add_up_layers(self, total: Tensor, model: nn.Module) -> Tensor:
        """The number itself: all layers are here."""
        return total

    def add_up_slices(self, values: Tensor) -> Tensor:
        """The numbers themselves: all layers are whole."""
        return values

    def add_up_parameters(self, total: Tensor) -> Tensor:
        """The number itself: all parameters are here."""
        return total

    def stats(self) -> dict[str, Any]:
        """Nothing has travelled."""
        return {**Traffic().stats(), "waited": 0.0}

    # --- saving ---------------------------------------------------------------------------------

    def warn_if_partial(self) -> None:
        """Every state is whole."""

    def consolidate(self, states: Sequence[LayerState]) -> None:
        """Statistics are those of all data."""

    def gather_state(self, own: dict[str, Any], to: int) -> dict[str, Any]:
        """The state of the only rank."""
        return own

    def describe(self) -> str:
        """There was nothing to agree on."""
        return ""

    def resume(
        self,
        described: str,
        holds_all: Callable[[], bool],
        states: Sequence[LayerState],
        groups: ParamGroups,
    ) -> None:
        """Everything stays here, whoever saved it."""

    def restart(self) -> None:
        """Nothing is under way."""


def settle_own(states: Sequence[LayerState], normalizer: Normalizer) -> None:
    """Turn rows that stand for all samples of this process into contributions."""
    broadcast.agree(states, None)
    broadcast.settle(states, normalizer, add_up=None, adds=True)


def _given(
    state: LayerState,
    parts: Sequence[str],
    read: Read,
    now: Now,
    generator: torch.Generator | None,
) -> Given | None:
    """What a layer is solved from; ``None`` if something is missing."""
    rows = state.row_counts(read.counts)
    given = now.given(state, {}, counts=rows, rank_generator=generator)
    means = own_means(state, state.names_of(parts), read.counts, given)
    if means is None:
        return None
    gathered = [n for n in means if state.running[n].statistic.combine == "gather"]
    shards = {name: [means[name].shape[-2]] for name in gathered}
    previous, known = state.solution_in_use, {**state.counts_of(means), **rows}
    return now.given(state, means, previous=previous, shards=shards, counts=known)


def _few(states: Iterable[LayerState]) -> Iterator[list[LayerState]]:
    """Layers in groups whose new solutions take a bounded amount of memory.

    Those that share an input stay together, since some of what is solved is the same.
    """
    together: dict[Hashable, list[LayerState]] = {}
    for state in states:
        together.setdefault(state if state.group is None else state.group, []).append(state)
    group: list[LayerState] = []
    size = 0
    for some in together.values():
        shapes = {
            (s.lender(n), n): shape for s in some for n, shape in s.block.solution_shapes.items()
        }
        own = sum(math.prod(n or 0 for n in shape) for shape in shapes.values())
        if group and size + own > MAX_NEW_ELEMENTS:
            yield group
            group, size = [], 0
        group += some
        size += own
    if group:
        yield group
