"""Several ranks: the layers of one optimizer shared out over them.

This is the front of the room. Who does what is in ``layout``, statistics on their way in ``rounds`` and
``reduce``, solving in ``staging`` and ``refresh``, gradients in ``spread``, parameters with owners in
``parameter_owners``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.capture import broadcast
from kronfac.distributed import consistency, staging
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.distributed.coordinator import Coordinator, Now, ParamGroups, Solved
from kronfac.distributed.exchange import exchange_gradients
from kronfac.distributed.gather_state import gather_state
from kronfac.distributed.layout import Layout
from kronfac.distributed.local import settle_own
from kronfac.distributed.overview import Overview, overview, solved_by
from kronfac.distributed.parameter_owners import Ownership
from kronfac.distributed.prepared import keep_prepared
from kronfac.distributed.reduce import Moment
from kronfac.distributed.rounds import Rounds
from kronfac.distributed.shard_exchange import ShardExchange
from kronfac.distributed.sharded.sharding import Sharding
from kronfac.distributed.spread import Spreading
from kronfac.distributed.workload import Intervals
from kronfac.layers.shards import is_whole, settle_gradient
from kronfac.options.advice import warn_caller
from kronfac.placement.place import Placement
from kronfac.placement.scheme import Distribute
from kronfac.state.layer_state import Due, LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.running import count_dtype


class Distributed(Coordinator):
    """The layers of one optimizer, shared out over the ranks of a process group.

    ``reduces_gradients`` says that nobody else averages gradients over ranks.
    """

    sees_all = False

    def __init__(
        self,
        world: ProcessGroup,
        settings: Distribute,
        phases: Phases,
        reduces_gradients: bool,
        sharding: Sharding | None = None,
    ) -> None:
        self.world = world
        self.observers = 1 if sharding is None else sharding.observers
        self.settings = settings
        self.phases = phases
        self.layout = Layout(world, settings, sharding)
        self.rounds = Rounds(self.layout, phases, self.observers)
        self.spreading = (ShardExchange if sharding else Spreading)(self.layout, phases)
        self.ownership = Ownership(self.layout, phases, reduces_gradients)
        self._warned = False
        self._part_weights: dict[nn.Parameter, float] = {}
        #: Samples of a step by rank, once ranks have compared them.
        self._samples: list[int] = []
        #: Whether ranks have compared their gradients, and agreed on inputs that stand for all samples.
        self._compared = self._agreed_on_broadcast = False

    # --- who is there, and who does what --------------------------------------------------------

    @property
    def is_frugal(self) -> bool:
        """Whether memory matters more than a few products: parameters are sharded."""
        return self.layout.sharding is not None and self.layout.spreads

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.world.size

    @property
    def process_group(self) -> Any:
        """The process group of these ranks."""
        return self.world.parent

    @property
    def placement(self) -> Placement | None:
        """Which rank does what."""
        return self.layout.placement

    def attach(
        self, states: Sequence[LayerState], groups: ParamGroups, intervals: Callable[[], Intervals]
    ) -> None:
        """Give new layers and parameters their places; those of others do not change."""
        self._agreed_on_broadcast = False
        self.layout.attach(states, intervals())
        self.rounds.buckets.clear()
        self.spreading.attach(states)
        self._keep_prepared()
        self.ownership.assign(states, groups)

    def use(self, placement: Placement) -> None:
        """Work by this placement from now on."""
        self.layout.use(placement)
        self._keep_prepared()
        self.rounds.buckets.clear()

    def _keep_prepared(self) -> None:
        if self.is_frugal:
            keep_prepared(list(self.layout.units))

    def solved_by(self, state: LayerState) -> str:
        """The ranks that solve a layer: ``"0"``, ``"0,3"`` for its parts, ``"0+3"`` if divided."""
        return solved_by(self.layout, state)

    def overview(self, states: Sequence[LayerState]) -> Overview:
        """What the summary says of ranks."""
        direct = self.rounds.early.direct
        streams = self.rounds.stream is not None
        return overview(self.layout, states, direct, self.ownership.message_bytes, streams)

    def compare_samples(self, samples: int) -> None:
        """Let all ranks know how many samples of a step each of them has."""
        here = [0.0] * self.world.size
        here[self.world.rank] = float(samples)
        self._samples = [int(n) for n in self.world.total(here).tolist()]

    def first_sample(self, total: int) -> int:
        """The number of this rank's first sample; without better knowledge all have equally many."""
        if self.layout.is_local:
            return 0
        rank, sharding = self.world.rank, self.layout.sharding
        before = range(rank) if sharding is None else sharding.before(rank)
        if self._samples:
            return sum(self._samples[one] for one in before)
        return total * len(before) * self.observers // self.world.size

    @property
    def gives_rows(self) -> bool:
        """Whether no other rank gives the same rows to what is gathered."""
        sharding = self.layout.sharding
        return sharding is None or sharding.is_first(self.world.rank)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each of a few numbers over ranks."""
        found: list[float] = self.world.largest(values).tolist()
        return found

    def input_bound(self, state: LayerState) -> Hashable:
        """The first rank that works on a layer, where layers stay with their ranks.

        Where ranks observe only their own layers, no layer shares its input. Layers that all ranks work
        on, slice by slice, have that in common.
        """
        if self.layout.is_local:
            return state
        if self.layout.slice_of(state) is not None:
            return "slices"  # all ranks work on it, whoever solves
        return self.layout.owner(state) if self.layout.keeps_owners else None

    def share_inputs(self, states: Sequence[LayerState], new: Sequence[LayerState]) -> None:
        """Let the same ranks work on layers that share their input."""
        self.rounds.drain()
        self.layout.share_inputs(new)
        self.rounds.buckets.clear()

    # --- before the step ------------------------------------------------------------------------

    def expect(self, coming: Callable[[], Due], moment: Callable[[], Moment]) -> None:
        """Say which layers will be refreshed at the coming step: their statistics may leave early."""
        self.rounds.expect(coming, moment)

    def observed(self, state: LayerState, source: str) -> None:
        """Take note of a call that has been observed."""
        self.rounds.observed(state, source)

    def meet(self, groups: ParamGroups, is_joining: Callable[[], bool], active: bool) -> None:
        """See that all ranks are at the same step, with the same gradients."""
        trained = [p for group in groups for p in group["params"]]
        for parameter in trained if self.layout.sharding is not None else ():
            settle_gradient(parameter)
        if is_joining() and not self.separate_gradients:
            exchange_gradients(self.world, trained, active)
        if self._compared:
            return
        self._compared = True
        if self.separate_gradients:
            consistency.check_parameters(self.world, trained)
        else:
            consistency.check_gradients(self.world, filter(is_whole, trained))

    def agree(self, states: Sequence[LayerState]) -> None:
        """Let layers of another shape start again, also where this rank has not observed them.

        After loading, a layer whose solution any of its ranks misses is solved again by all.
        """
        for state in states:
            state.renew_if_stale()
        if not self.rounds.loaded:
            return
        self.rounds.loaded = False
        missing = [
            float(bool(s.held) and s.solution is None and s.solved_at is not None) for s in states
        ]
        never = [float(state.solved_at is None) for state in states]
        total = self.world.total([*missing, *never]).tolist()
        for index, state in enumerate(states):
            lost = total[index] or 0 < total[index + len(states)] < self.world.size
            if lost and state.has_curvature:
                state.forget_solution()

    # --- gradients and parameters with owners ---------------------------------------------------

    @property
    def separate_gradients(self) -> bool:
        """Whether each rank has gradients of its own until the step."""
        return self.ownership.separate

    def reduce_gradients(self) -> None:
        """Leave the mean of separate gradients with each parameter's owner."""
        self.ownership.reduce_gradients()

    def steps(self, parameter: nn.Parameter) -> bool:
        """Whether the base optimizer steps a parameter here."""
        return self.ownership.steps(parameter)

    def only_own(self) -> AbstractContextManager[None]:
        """Hide the gradients of parameters that other ranks step."""
        return self.ownership.only_own()

    def spread_weights(self) -> None:
        """Send each parameter from its owner to all others, where parameters have owners."""
        self.ownership.spread_weights()

    # --- the phases of a step -------------------------------------------------------------------

    def land(self, normalizer: Callable[[], Normalizer]) -> None:
        """Let statistics arrive that have left during the passes, and send off the rest of them."""
        self.rounds.land(normalizer)

    def before_fold(self, states: Sequence[LayerState], passes: Mapping[Pass, Any]) -> None:
        """Look at what has been observed until the step, before it is folded and forgotten."""
        self.rounds.before_fold(states, passes)

    def settle_broadcast(self, states: Sequence[LayerState], normalizer: Normalizer) -> None:
        """Add up over ranks what belongs to inputs that stand for all samples."""
        if self.layout.is_local:
            settle_own(states, normalizer)
            return
        if not self._agreed_on_broadcast or any(map(broadcast.changes_in_size, states)):
            self._agreed_on_broadcast = True
            broadcast.agree(states, self.world.largest)
        broadcast.settle(states, normalizer, self._add_rows, adds=self.world.rank == 0)

    def _add_rows(self, flat: Tensor) -> None:
        self.world.all.all_reduce("reduce", flat).wait()
        flat.div_(self.observers)  # each of whom has added the same

    def observes_gradient(self, state: LayerState) -> bool:
        """Gradients are looked at where they are preconditioned; they are those of the whole batch."""
        return state.is_worker

    def reduce(self, states: Sequence[LayerState]) -> None:
        """Add up statistics on a factor step that refreshes nothing, unless that is deferred."""
        if not self.layout.defers:
            self.rounds.consolidate(states)

    def refresh(self, due: Due, now: Now) -> Iterable[Solved]:
        """Solve layers again, each part where it was placed; solutions leave when they are ready."""
        return staging.solve(self.rounds, due, now) if due else ()

    def share(self, solved: Iterable[Solved]) -> Iterable[Solved]:
        """Receive the solutions that this rank needs, on which all ranks have agreed."""
        return list(solved)

    def collect(self, states: Sequence[LayerState]) -> None:
        """Make the gradients of sharded parameters whole where their layers are worked on."""
        if self.layout.spreads:
            self.spreading.collect(states)

    def portions(
        self, states: Sequence[LayerState], at_once: bool
    ) -> Iterable[Sequence[LayerState]]:
        """Layers that are worked on one after the other, while gradients of others are on their way."""
        return self.spreading.portions(states, at_once) if self.layout.spreads else [states]

    def anywhere(self, flag: bool) -> bool:
        """Whether something is so of any rank's shards; whole parameters look the same on all ranks."""
        if self.layout.sharding is None:
            return flag
        return bool(self.world.total([float(flag)]).item())

    def part_weight(self, parameter: nn.Parameter) -> float:
        """One over the number of ranks that hold the same part of a parameter, if it is sharded."""
        sharding = self.layout.sharding
        if sharding is None:
            return 1.0
        if parameter not in self._part_weights:  # with many ranks it takes a while
            self._part_weights[parameter] = sharding.part_weight(self.world, parameter)
        return self._part_weights[parameter]

    # --- numbers --------------------------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """Add a few numbers over ranks."""
        return self.world.total(values)

    def mean(self, values: Tensor) -> Tensor:
        """Average a few numbers over ranks, each of which has a part of the batch."""
        return self.world.total(values).to(values) / self.world.size

    def add_up_layers(self, total: Tensor, model: nn.Module) -> Tensor:
        """Add a number over layers, of which each rank knows those that it works on."""
        if self.layout.row.size == 1:
            return total
        device = next(model.parameters()).device
        return self.add_up_slices(total.to(device, count_dtype(device)).reshape(1))[0]

    def add_up_slices(self, values: Tensor) -> Tensor:
        """Add a few numbers over the slices of layers; other rows than the first know the same."""
        flat = values.clone() if self.layout.is_first_row else torch.zeros_like(values)
        self.world.all.all_reduce("rescale", flat).wait()
        return flat

    def add_up_parameters(self, total: Tensor) -> Tensor:
        """Add a number over parameters, of which each rank knows those, or the parts, that it steps."""
        if self.layout.sharding is None:
            return self.ownership.add_up(total)
        flat = total.reshape(1).clone()
        self.world.all.all_reduce("rescale", flat).wait()
        return flat[0]

    def stats(self) -> dict[str, Any]:
        """What has travelled, and how long this rank has waited for it."""
        return {**self.world.traffic.stats(), "waited": self.rounds.waited}

    # --- saving ---------------------------------------------------------------------------------

    @property
    def is_partial(self) -> bool:
        """Whether ranks have observed something since the last round."""
        return self.rounds.is_partial

    def warn_if_partial(self) -> None:
        """Say once that a state leaves something out."""
        if self.is_partial and not self._warned:
            self._warned = True
            warn_caller(
                "this state leaves out what other ranks have observed since the last refresh; call "
                "optimizer.consolidate() on all ranks before state_dict() to have it in."
            )

    def consolidate(self, states: Sequence[LayerState]) -> None:
        """Add up what ranks have observed since the last refresh, at the keepers of statistics."""
        self.rounds.consolidate(states)

    def gather_state(self, own: dict[str, Any], to: int) -> dict[str, Any] | None:
        """The whole state on rank ``to``, and ``None`` elsewhere."""
        return gather_state(self.world, own, to)

    def describe(self) -> str:
        """What all ranks have agreed on, for a resume in a world of the same size."""
        return json.dumps(
            {
                "size": self.world.size,
                "scheme": str(self.settings.scheme),
                "placement": self.layout.placed.to_json(),
                "groups": self.rounds.plan.groups,
                "stream": self.rounds.learned,
                "samples": self._samples,
            }
        )

    def resume(
        self,
        described: str,
        holds_all: Callable[[], bool],
        states: Sequence[LayerState],
        groups: ParamGroups,
    ) -> None:
        """Take up what a run on as many ranks had agreed on; otherwise keep the present places.

        ``holds_all`` says whether this rank was given all that it then has to hold: state that was read
        piece by piece (``torch.distributed.checkpoint``) is that of the present placement.
        """
        saved = json.loads(described) if described else {}
        alike = saved.get("size") == self.world.size
        self._samples = saved.get("samples", []) if alike else []
        if self._adopts(saved, holds_all):
            self.rounds.plan.groups = saved["groups"]
            self.rounds.learned = saved.get("stream")
            self.rounds.buckets.clear()
        self.ownership.assign(states, groups)

    def _adopts(self, saved: Mapping[str, Any], holds_all: Callable[[], bool]) -> bool:
        """Use a saved placement if it fits; says whether it is in use on all ranks."""
        here = (self.world.size, str(self.settings.scheme))
        if (saved.get("size"), saved.get("scheme")) != here:
            return False
        before, placement = self.layout.placed, Placement.from_json(saved["placement"])
        if not self.layout.fits(placement):
            return False
        if placement != before:
            self.use(placement)
            if self.world.total([float(not holds_all())]).item() > 0:
                self.use(before)
                return False
        return True

    def restart(self) -> None:
        """Forget what is under way, after state was loaded on all ranks."""
        self._agreed_on_broadcast = False
        self.rounds.restart()
