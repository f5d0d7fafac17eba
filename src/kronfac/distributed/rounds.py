"""When statistics travel: early where a rank has observed them, and the rest at the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from kronfac.distributed.comm.buckets import Bucket
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.comm.plan import Plan
from kronfac.distributed.landing import abandon, land
from kronfac.distributed.layout import Layout
from kronfac.distributed.reduce import Compress, Moment, Round
from kronfac.distributed.stream import Stream
from kronfac.distributed.stream_plan import Learned
from kronfac.state.input_group import InputGroup
from kronfac.state.layer_state import Due, LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.normalizer import Normalizer


class Rounds:
    """The round of statistics that is under way, and what is kept from one to the next."""

    def __init__(self, layout: Layout, phases: Phases, observers: int = 1) -> None:
        world, settings = layout.world, layout.settings
        self.layout = layout
        self.phases = phases
        #: How many ranks observe the same samples.
        self.observers = observers
        self.plan = Plan()
        #: The way of statistics. They leave early where a rank has observed them, and at the step where
        #: it has not: because a layer is not used there, or because the rank has run out of batches.
        self.early = (
            world.collectives(range(world.size), "early") if settings.overlap else world.all
        )
        #: Statistics that leave for good during the passes, where no rank has memory for all of them.
        streams = settings.overlap and layout.sharding is not None
        self.stream = Stream(layout, self.early) if streams else None
        #: By statistic, the rank where its sum is whole.
        self._whole: dict[str, int] = {}
        #: Memory of messages, kept from one round to the next.
        self.buckets: dict[tuple[tuple[Item, ...], ...], list[Bucket]] = {}
        #: Seconds in which this rank did nothing but wait for statistics.
        self.waited = 0.0
        #: Whether state was loaded, on which ranks have not agreed yet.
        self.loaded = False
        self._current: Round | None = None
        self._stale = self._has_new_statistics = False
        self._expected: Due = {}
        self._moment: Callable[[], Moment] | None = None

    @property
    def is_partial(self) -> bool:
        """Whether ranks have observed something since the last round."""
        return self._has_new_statistics and not self.layout.is_local

    @property
    def learned(self) -> dict[str, Any] | None:
        """What earlier steps have shown of statistics that leave during the passes."""
        return None if self.stream is None else self.stream.learned.to_json()

    @learned.setter
    def learned(self, saved: dict[str, Any] | None) -> None:
        if self.stream is not None:
            self.stream.learned = Learned(**saved) if saved else Learned()

    def restart(self) -> None:
        """Forget what is under way, after state was loaded on all ranks."""
        self.drain()
        self._whole.clear()
        if self.stream is not None:
            abandon(self.stream, None if self._moment is None else self._moment())
        self._has_new_statistics, self.loaded = False, True

    def drain(self) -> None:
        """Give up the round that is under way: whatever has left on any rank has to arrive on all."""
        overlap = self.layout.settings.overlap and self.plan.groups is not None
        if self._expected and overlap and not self.layout.is_local:
            for _ in (self._current or Round(self, self._expected)).finish(False):
                pass
        self._current, self._expected = None, {}

    # --- before the step ------------------------------------------------------------------------

    def expect(self, coming: Callable[[], Due], moment: Callable[[], Moment]) -> None:
        """Say which layers will be refreshed at the coming step."""
        if self._current is None:
            # After loading, ranks may differ until they have agreed at the next step.
            self._expected = {} if self.loaded or self.stream is not None else coming()
            self._moment = moment

    def observed(self, state: LayerState, source: str) -> None:
        """Take note of a call that has been observed."""
        layout = self.layout
        if self.stream is not None and self._moment is not None:
            self.stream.observed(state, source, self._moment())
        if layout.is_local or not self._expected or not layout.settings.overlap:
            return
        if self.plan.groups is None:
            for name, running in state.running.items():
                if running.statistic.source == source:
                    self.plan.watch(layout.key(state, name))
            return
        if self._current is None:
            for one in self._expected:
                one.renew_if_stale()
            self._current = Round(self, self._expected)
        if self._moment is not None:
            self._current.observed(state, source, self._moment())

    def land(self, normalizer: Callable[[], Normalizer]) -> None:
        """Leave what has been observed since the last step with its keepers, as far as it can leave."""
        self._whole.clear()
        if self.stream is None or self._moment is None:
            return
        if self.stream.off:
            self.stream.off = False
            return
        started = time.perf_counter()
        self._whole = land(self.stream, self._moment(), normalizer(), self.observers)
        self.waited += time.perf_counter() - started

    def is_whole(self, state: LayerState, name: str, rank: int) -> bool:
        """Whether nothing of a statistic is elsewhere than at a rank."""
        source = state.running[name].statistic.source
        if source == "output" and state.broadcast:  # it is added up at the step
            return False
        return self._whole.get(self.layout.key(state, name)) == rank

    def before_fold(self, states: Sequence[LayerState], passes: Mapping[Any, Any]) -> None:
        """Look at what has been observed until the step, before it is folded and forgotten."""
        self._has_new_statistics = True
        self._stale = self._current is not None and self._current.is_stale(passes)
        for state in states:
            for name, running in state.running.items():
                version = state.pending.versions.get(running.statistic.source)
                if version:
                    self.plan.calls[self.layout.key(state, name)] = version

    # --- at the step ----------------------------------------------------------------------------

    def finish(
        self, due: Due, compress: Compress | None = None
    ) -> tuple[Round, Iterator[Mapping[str, Tensor]]]:
        """Send off what has not left of these layers; returns sums as they arrive."""
        current, self._current = self._current, None
        may_have_left = self.plan.groups is not None and self.layout.settings.overlap
        if may_have_left and self._expected and self._expected != due:
            # Others are due than were expected: what has left on any rank has to arrive on all.
            for _ in (current or Round(self, self._expected)).finish(False):
                pass
            current = None
        if current is None:
            current, self._stale = Round(self, due), False
        self._expected = {}
        started = time.perf_counter()
        arrivals = current.finish(self._stale, compress)
        if current.parted:
            for _ in arrivals:
                pass
            self._part(current.parted)
            current = Round(self, due)
            arrivals = current.finish(False, compress)
        self.waited += time.perf_counter() - started
        if all(
            set(state.block.shared_parts) <= set(due.get(state, ()))
            or not state.layer.weight.requires_grad
            for state in self.layout.units
        ):
            self._has_new_statistics = False
        return current, arrivals

    def close(self, current: Round, sums: Mapping[str, Tensor]) -> None:
        """Leave each statistic with its keeper, and the memory of messages to others if it is scarce."""
        current.settle(sums)
        if self.layout.sharding is not None:
            self.buckets.clear()

    def _part(self, groups: Sequence[InputGroup]) -> None:
        """Let layers go on alone whose inputs some rank has seen apart."""
        for group in groups:
            group.dissolve()
        self.layout.use(self.layout.placed)
        self.buckets.clear()

    def timed(self, arrivals: Iterator[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """Count the seconds until each message has arrived."""
        while True:
            started = time.perf_counter()
            arrived = next(arrivals, None)
            self.waited += time.perf_counter() - started
            if arrived is None:
                return
            yield arrived

    def consolidate(self, states: Sequence[LayerState]) -> None:
        """Add up all statistics at their keepers."""
        if self.layout.is_local:
            return
        if self._all_whole(states):
            self._has_new_statistics = False
            return
        with self.phases("reduce"):
            self._stale = self._current is not None  # it holds what has not been folded yet
            current, arrivals = self.finish({s: tuple(s.block.shared_parts) for s in states})
            sums: dict[str, Tensor] = {}
            for arrived in arrivals:
                sums.update(arrived)
            self.close(current, sums)

    def _all_whole(self, states: Sequence[LayerState]) -> bool:
        """Whether each statistic is whole at its keeper."""
        keeper = self.layout.keeper
        return bool(self._whole) and all(
            one.statistic.is_replicated or self.is_whole(state, name, keeper(state, name))
            for state in states
            for name, one in state.running.items()
        )

    def decide_groups(self, current: Round) -> None:
        """After the first round, choose in which company statistics leave."""
        if not self.layout.settings.overlap or self.plan.groups is not None:
            return
        if self.stream is not None:
            return
        sources = current.sources
        keys = [key for key in sources if key not in current.unbucketed]
        sizes = {key: self.layout.statistic_bytes(*sources[key]) for key in keys}
        self.plan.decide(self.layout.world, sizes, self.layout.measured_link())
        self.buckets.clear()
