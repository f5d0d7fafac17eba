"""What ranks do together for one optimizer, as the step and the optimizer see it.

:class:`~kronfac.distributed.local.Local` is one process and sends nothing,
:class:`~kronfac.distributed.distributed.Distributed` shares the work out over ranks. Nobody else asks how
many there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.distributed.overview import Overview
from kronfac.distributed.reduce import Moment
from kronfac.distributed.workload import Intervals
from kronfac.options.config import ShareOf
from kronfac.placement.place import Placement
from kronfac.protocol.context import Given
from kronfac.protocol.statistic import Tensors
from kronfac.state.layer_state import Due, LayerState
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer

ParamGroups = Sequence[dict[str, Any]]
#: A layer and what was solved of it: empty where this rank holds none, ``None`` if none could be found.
Solved = tuple[LayerState, dict[str, Tensor] | None]


@dataclass(frozen=True)
class Now:
    """What all layers that are solved at one step have in common.

    Args:
        step: number of completed steps.
        damping: the damping γ.
        seed: of the random numbers of this step, for methods that draw; alike on all ranks.
        relative: what of each layer's curvature the damping is a share of, if it is one.
    """

    step: int
    damping: float
    seed: int = 0
    relative: ShareOf | None = None

    def given(self, state: LayerState, means: Tensors, **further: Any) -> Given:
        """What a layer is solved from at this step."""
        own = self.seed ^ state.number
        return Given(
            means, self.damping, relative=self.relative, step=self.step, seed=own, **further
        )

    def generator(self, states: Iterable[LayerState], rank: int) -> torch.Generator | None:
        """Random numbers of one rank, if any of these layers draws."""
        if not any(state.block.draws for state in states):
            return None
        return torch.Generator(device="cpu").manual_seed(self.seed + rank)


class Coordinator(ABC):
    """The ranks that one optimizer works on, in the order in which a step needs them."""

    #: Whether this process observes all that is observed.
    sees_all: bool

    #: How many ranks observe the same samples.
    observers: int = 1

    @property
    def gives_rows(self) -> bool:
        """Whether this is the rank among them whose rows are gathered."""
        return True

    # --- who is there, and who does what --------------------------------------------------------

    @property
    def is_frugal(self) -> bool:
        """Whether memory matters more than a few products."""
        return False

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def process_group(self) -> Any:
        """The process group of these ranks."""

    @property
    @abstractmethod
    def placement(self) -> Placement | None:
        """Which rank does what; ``None`` in one process."""

    @abstractmethod
    def attach(
        self, states: Sequence[LayerState], groups: ParamGroups, intervals: Callable[[], Intervals]
    ) -> None:
        """Give new layers and parameters their places; those of others do not change."""

    @abstractmethod
    def solved_by(self, state: LayerState) -> str:
        """The ranks that solve a layer, as text."""

    @abstractmethod
    def overview(self, states: Sequence[LayerState]) -> Overview | None:
        """What the summary says of ranks; ``None`` in one process."""

    @abstractmethod
    def compare_samples(self, samples: int) -> None:
        """Let all ranks know how many samples of a step each of them has."""

    @abstractmethod
    def first_sample(self, total: int) -> int:
        """The number of this rank's first sample among so many of a step on all ranks."""

    @abstractmethod
    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each of a few numbers over ranks."""

    @abstractmethod
    def input_bound(self, state: LayerState) -> Hashable:
        """What layers have to have in common here, beside their input, to share it."""

    @abstractmethod
    def share_inputs(self, states: Sequence[LayerState], new: Sequence[LayerState]) -> None:
        """Take note of layers that share their inputs from now on; ``new`` ones may change places."""

    # --- before the step ------------------------------------------------------------------------

    @abstractmethod
    def expect(self, coming: Callable[[], Due], moment: Callable[[], Moment]) -> None:
        """Say which layers will be refreshed at the coming step: their statistics may leave early."""

    @abstractmethod
    def observed(self, state: LayerState, source: str) -> None:
        """Take note of a call that has been observed."""

    @abstractmethod
    def meet(self, groups: ParamGroups, is_joining: Callable[[], bool], active: bool) -> None:
        """See that all ranks are at the same step, with the same gradients.

        ``active`` is false on a rank that has run out of batches.
        """

    @abstractmethod
    def agree(self, states: Sequence[LayerState]) -> None:
        """Agree on what is known of each layer, at the start of a step."""

    # --- gradients and parameters with owners ---------------------------------------------------

    @property
    @abstractmethod
    def separate_gradients(self) -> bool:
        """Whether each rank has gradients of its own until the step."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Leave the mean of separate gradients with each parameter's owner."""

    @abstractmethod
    def steps(self, parameter: nn.Parameter) -> bool:
        """Whether the base optimizer steps a parameter here."""

    @abstractmethod
    def only_own(self) -> AbstractContextManager[None]:
        """Let the base optimizer step only what it steps here."""

    @abstractmethod
    def spread_weights(self) -> None:
        """Send each parameter from its owner to all others, where parameters have owners."""

    @abstractmethod
    def anywhere(self, flag: bool) -> bool:
        """Whether something is so of the gradients of any rank, where they differ between ranks."""

    @abstractmethod
    def part_weight(self, parameter: nn.Parameter) -> float:
        """How much the part of a parameter that is here counts in :meth:`add_up_parameters`."""

    # --- the phases of a step -------------------------------------------------------------------

    @abstractmethod
    def collect(self, states: Sequence[LayerState]) -> None:
        """Make the gradients of sharded parameters whole where their layers are worked on."""

    @abstractmethod
    def portions(
        self, states: Sequence[LayerState], at_once: bool
    ) -> Iterable[Sequence[LayerState]]:
        """Layers that are worked on one after the other; with ``at_once`` all of them together.

        When the next are asked for, the gradients of the last are sent to ranks that do not have them.
        """

    @abstractmethod
    def land(self, normalizer: Callable[[], Normalizer]) -> None:
        """Leave what ranks have observed since the last step with those who keep it, if that is due."""

    @abstractmethod
    def before_fold(self, states: Sequence[LayerState], passes: Mapping[Pass, Any]) -> None:
        """Look at what has been observed until the step, before it is folded and forgotten."""

    @abstractmethod
    def settle_broadcast(self, states: Sequence[LayerState], normalizer: Normalizer) -> None:
        """Add up over ranks what belongs to inputs that stand for all samples."""

    @abstractmethod
    def observes_gradient(self, state: LayerState) -> bool:
        """Whether this rank looks at the layer's gradient and weights, those of the whole batch."""

    @abstractmethod
    def reduce(self, states: Sequence[LayerState]) -> None:
        """Add up statistics on a factor step that refreshes nothing, unless that is deferred."""

    @abstractmethod
    def refresh(self, due: Due, now: Now) -> Iterable[Solved]:
        """Solve layers again from the statistics of all ranks; solutions leave when they are ready."""

    @abstractmethod
    def share(self, solved: Iterable[Solved]) -> Iterable[Solved]:
        """Receive the solutions that this rank needs; layers without statistics are left out."""

    # --- numbers --------------------------------------------------------------------------------

    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """Add a few numbers over ranks."""

    @abstractmethod
    def mean(self, values: Tensor) -> Tensor:
        """Average a few numbers over ranks, each of which has a part of the batch."""

    @abstractmethod
    def add_up_layers(self, total: Tensor, model: nn.Module) -> Tensor:
        """Add a number over layers, of which each rank knows those that it works on."""

    @abstractmethod
    def add_up_slices(self, values: Tensor) -> Tensor:
        """Add a few numbers over the slices of layers, of which each rank knows its own."""

    @abstractmethod
    def add_up_parameters(self, total: Tensor) -> Tensor:
        """Add a number over parameters, of which each rank knows those that it steps."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """What has travelled, and how long this rank has waited for it."""

    # --- saving ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_partial(self) -> bool:
        """Whether other ranks have observed something that a state of this one leaves out."""

    @abstractmethod
    def warn_if_partial(self) -> None:
        """Say once that a state leaves something out."""

    @abstractmethod
    def consolidate(self, states: Sequence[LayerState]) -> None:
        """Add up what ranks have observed since the last refresh."""

    @abstractmethod
    def gather_state(self, own: dict[str, Any], to: int) -> dict[str, Any] | None:
        """The whole state on rank ``to``, and ``None`` elsewhere."""

    @abstractmethod
    def describe(self) -> str:
        """What all ranks have agreed on, for a resume with as many ranks."""

    @abstractmethod
    def resume(
        self,
        described: str,
        holds_all: Callable[[], bool],
        states: Sequence[LayerState],
        groups: ParamGroups,
    ) -> None:
        """Take up what ranks had agreed on when state was saved, where that is possible.

        ``holds_all`` says whether this rank was given all that it then has to hold.
        """

    @abstractmethod
    def restart(self) -> None:
        """Forget what is under way, after state was loaded on all ranks."""
