"""One process: everything is here, and nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from kronfac.capture import broadcast
from kronfac.distributed.comm.traffic import Traffic
from kronfac.distributed.coordinator import Coordinator, ParamGroups, Solved
from kronfac.distributed.reduce import Moment
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.pending import Normalizer, Pass


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
        self, states: Sequence[LayerState], groups: ParamGroups, refresh_every: Callable[[], int]
    ) -> None:
        """Everything stays here."""

    def solved_by(self, state: LayerState) -> str:
        """The only rank."""
        return "0"

    def overview(self, states: Sequence[LayerState]) -> None:
        """There is nothing to say of ranks."""
        return

    # --- before the step ------------------------------------------------------------------------

    def expect(
        self, coming: Callable[[], Sequence[LayerState]], moment: Callable[[], Moment]
    ) -> None:
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

    # --- the phases of a step -------------------------------------------------------------------

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

    def refresh(self, due: Sequence[LayerState], damping: float) -> Iterator[Solved]:
        """Solve layers one by one, so that only one has an old and a new solution at a time."""
        with self.phases("refresh"):
            ready = [state for state in due if _has_statistics(state)]
        for state in ready:
            with self.phases("refresh", state.name):
                means = {name: running.mean() for name, running in state.running.items()}
                counted = {name: mean for name, mean in means.items() if mean is not None}
                if len(counted) < len(means):
                    continue
                solution = state.block.refresh(counted, state.solution, damping)
            yield state, solution

    def share(self, solved: Iterable[Solved]) -> Iterable[Solved]:
        """Solutions are where they are needed."""
        return solved

    def spread(self, states: Sequence[LayerState]) -> None:
        """Gradients are where they are needed."""

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


def _has_statistics(state: LayerState) -> bool:
    return all(running.sum is not None for running in state.running.values())
