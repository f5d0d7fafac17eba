"""What several ranks do together for one optimizer: who does which work, and how it travels."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.distributed.calibrate import measure_compute, measure_link
from kronfac.distributed.comm.buckets import Bucket
from kronfac.distributed.comm.collectives import Collectives
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.comm.plan import Plan
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.distributed.reduce import Moment, Round
from kronfac.distributed.refresh import Solving, Work
from kronfac.distributed.workload import unit_of
from kronfac.placement.costs import Compute, LayerUnit, Link
from kronfac.placement.place import Placement, Task, place
from kronfac.placement.scheme import SCHEMES, Distribute, Hybrid
from kronfac.planner.choose import choose
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.pending import count_dtype


class Distributed:
    """The layers of one optimizer, shared out over the ranks of a world."""

    def __init__(self, world: ProcessGroup, settings: Distribute, phases: Phases) -> None:
        self.world = world
        self.settings = settings
        self.phases = phases
        self.plan = Plan()
        self.placement: Placement | None = None
        self.link: Link | None = None
        self.round: Round | None = None
        #: The way of statistics. They leave early where a rank has observed them, and at the step where
        #: it has not: because a layer is not used there, or because the rank has run out of batches.
        self.early = (
            world.collectives(range(world.size), "early") if settings.overlap else world.all
        )
        #: Memory of messages, kept from one round to the next.
        self.buckets: dict[tuple[tuple[Item, ...], ...], list[Bucket]] = {}
        #: Seconds in which this rank did nothing but wait for statistics.
        self.waited = 0.0
        self._units: dict[LayerState, LayerUnit] = {}
        self._names: dict[LayerState, str] = {}
        self._stale = self._has_news = self._loaded = self._warned = False
        self._expected: list[LayerState] = []
        self._moment: Callable[[], Moment] | None = None

    # --- who does what --------------------------------------------------------------------------

    def attach(self, states: Sequence[LayerState], refresh_every: int) -> None:
        """Give new layers their places; those of others do not change."""
        new = [state for state in states if state not in self._units]
        taken = set(self._names.values())
        tied: dict[Any, str] = {}
        for state in states:
            name = self._names.get(state, "")
            if not name:
                part = state.layer.part
                name = state.name if state.name not in taken else f"{state.name}:{part}"
                taken.add(name)
                self._names[state] = name
            own = state.layer.parameters
            first = next((tied[p] for p in own if p in tied), name)
            tied |= dict.fromkeys(own, first)
            self._units[state] = unit_of(name, state, self.settings.triangles, first)
        units = [self._units[state] for state in new]
        self._place(units, refresh_every)

    def _place(self, units: Sequence[LayerUnit], refresh_every: int) -> None:
        scheme = self.settings.scheme
        if scheme == "auto" and self.placement is not None:
            scheme, grid = self.placement.scheme, self.placement.grid
            scheme = scheme if scheme in SCHEMES else Hybrid(grid.workers / grid.size)
        link, compute = Link(), Compute()
        if scheme in ("auto", "spd") and self.world.size > 1:
            link, compute = self.measured_link(), measure_compute(self.world)
        if scheme == "auto":
            direct = self.world.all.direct
            placement, _ = choose(
                units, self.world.size, link, compute, refresh_every, direct=direct
            )
        else:
            placement = place(
                units,
                self.world.size,
                scheme,
                link=link,
                compute=compute,
                refresh_every=refresh_every,
                balanced=self.settings.balanced,
                split=self.settings.split,
            )
        if self.settings.scheme in ("auto", "spd"):  # they follow measurements
            placement = Placement.from_json(self.world.first(placement.to_json()))
        if self.placement is not None:
            assignments = {**self.placement.assignments, **placement.assignments}
            placement = Placement(placement.scheme, placement.grid, assignments)
        self.use(placement)

    def use(self, placement: Placement) -> None:
        """Work by this placement from now on."""
        self.placement = placement
        grid, rank = placement.grid, self.world.rank
        self.column: Collectives = self.world.collectives(tuple(grid.column(grid.column_of(rank))))
        self.row: Collectives = self.world.collectives(tuple(grid.row(grid.row_of(rank))))
        self.buckets.clear()
        index = itertools.count()
        for state in self._units:
            state.is_worker = self.works_on(state)
            state.observed = state.is_worker or not self.is_local
            kept = [name for name in state.running if self._keeps(state, name, next(index))]
            state.kept = frozenset(kept)

    def measured_link(self) -> Link:
        """How fast messages are, measured once."""
        if self.link is None:
            self.link = measure_link(self.world)
        return self.link

    @property
    def _placed(self) -> Placement:
        assert self.placement is not None
        return self.placement

    @property
    def is_local(self) -> bool:
        """Whether statistics stay where they were observed."""
        return self._placed.scheme == "local"

    @property
    def owns_parameters(self) -> bool:
        """Whether the base optimizer steps a layer only at its owner."""
        return self._placed.scheme == "layer-parallel"

    def name(self, state: LayerState) -> str:
        """The layer's name, unique in the model."""
        return self._names[state]

    def key(self, state: LayerState, name: str) -> str:
        """The name of one of a layer's tensors, unique in the model."""
        return f"{self._names[state]}/{name}"

    def unit(self, state: LayerState) -> LayerUnit:
        """The layer's work in numbers."""
        return self._units[state]

    def works_on(self, state: LayerState) -> bool:
        """Whether this rank holds the layer's solution and preconditions its gradient."""
        return self._placed.is_worker(self._names[state], self.world.rank)

    def owner(self, state: LayerState) -> int:
        """The first of the ranks that hold the layer's solution."""
        return self._placed.workers(self._names[state])[0]

    def task(self, state: LayerState, part: str) -> Task:
        """Where a part of a layer is solved."""
        return self._placed.assignments[self._names[state]].tasks[part]

    def solvers(self, state: LayerState, part: str) -> tuple[int, ...]:
        """The ranks that solve a part of a layer."""
        return self._placed.solvers(self._names[state], part)

    def root(self, state: LayerState, name: str) -> int | None:
        """The one rank that needs a statistic's sum, or ``None`` if several do."""
        needs = self._placed.needs(self._units[state], self.key(state, name))
        return needs[0] if needs is not None and len(needs) == 1 else None

    def _keeps(self, state: LayerState, name: str, index: int) -> bool:
        if self.is_local:
            return state.is_worker
        keeper = self._placed.keeper(self._units[state], self.key(state, name), index)
        return keeper == self.world.rank

    @property
    def is_partial(self) -> bool:
        """Whether ranks have observed something since the last round."""
        return self._has_news and not self.is_local

    def warn_if_partial(self) -> None:
        """Say once that a state leaves something out."""
        if self.is_partial and not self._warned:
            self._warned = True
            warnings.warn(
                "this state leaves out what other ranks have observed since the last refresh; call "
                "optimizer.consolidate() on all ranks before state_dict() to have it in.",
                stacklevel=4,
            )

    def start_anew(self) -> None:
        """Forget what is under way, after state was loaded on all ranks."""
        if self.round is not None:
            for _ in self.round.finish(False):
                pass
        self.round, self._expected, self._has_news, self._loaded = None, [], False, True

    def agree_on_solutions(self, states: Sequence[LayerState]) -> None:
        """After loading: a layer whose solution any of its ranks misses is solved anew by all."""
        if not self._loaded:
            return
        self._loaded = False
        missing = [
            float(s.is_worker and s.solution is None and s.solved_at is not None) for s in states
        ]
        never = [float(state.solved_at is None) for state in states]
        total = self.world.total([*missing, *never]).tolist()
        for index, state in enumerate(states):
            if total[index] or 0 < total[index + len(states)] < self.world.size:
                state.forget_solution()

    def add_up(self, total: Tensor, model: nn.Module) -> Tensor:
        """Add a number over layers, of which each rank knows those that it works on."""
        if self.row.size == 1:
            return total
        device = next(model.parameters()).device
        flat = total.to(device, count_dtype(device)).reshape(1)
        if self._placed.grid.row_of(self.world.rank) != 0:
            flat = torch.zeros_like(flat)  # the ranks of another row know the same layers
        self.world.all.all_reduce("rescale", flat).wait()
        return flat[0]

    def add_rows(self, flat: Tensor) -> None:
        """Add rows up over all ranks, in place."""
        self.world.all.all_reduce("reduce", flat).wait()

    def stats(self) -> dict[str, Any]:
        """What has travelled."""
        return {**self.world.traffic.stats(), "waited": self.waited}

    # --- statistics -----------------------------------------------------------------------------

    def expect(self, due: Sequence[LayerState], moment: Callable[[], Moment] | None) -> None:
        """Say which layers will be refreshed at the coming step, so that statistics may leave early."""
        if self.round is None:
            # After loading, ranks may differ until they have agreed at the next step.
            self._expected = [] if self._loaded else list(due)
            self._moment = moment

    def observed(self, state: LayerState, source: str) -> None:
        """Take note of a call that has been observed."""
        if self.is_local or not self._expected or not self.settings.overlap:
            return
        if self.plan.groups is None:
            for name, running in state.running.items():
                if running.statistic.source == source:
                    self.plan.watch(self.key(state, name))
            return
        if self.round is None:
            for one in self._expected:
                if one.layer.stale():
                    one.reset()
            self.round = Round(self, self._expected)
        if self._moment is not None:
            self.round.observed(state, source, self._moment())

    def before_fold(self, states: Sequence[LayerState], passes: Any) -> None:
        """Look at what has been observed until the step, before it is folded and forgotten."""
        self._has_news = True
        self._stale = self.round is not None and self.round.is_stale(passes)
        for state in states:
            for name, running in state.running.items():
                version = state.pending.versions[running.statistic.source]
                if version:
                    self.plan.calls[self.key(state, name)] = version

    def _finish_round(self, states: Sequence[LayerState]) -> tuple[Round, Iterator[Any]]:
        current, self.round = self.round, None
        may_have_left = self.plan.groups is not None and self.settings.overlap
        if may_have_left and self._expected and self._expected != list(states):
            # Others are due than were expected: what has left on any rank has to arrive on all.
            for _ in (current or Round(self, self._expected)).finish(False):
                pass
            current = None
        if current is None:
            current, self._stale = Round(self, states), False
        self._expected = []
        started = time.perf_counter()
        arrivals = current.finish(self._stale)
        self.waited += time.perf_counter() - started
        done = set(states)
        if all(state in done or not state.layer.weight.requires_grad for state in self._units):
            self._has_news = False
        return current, arrivals

    def consolidate(self, states: Sequence[LayerState]) -> None:
        """Add up all statistics at their keepers."""
        if self.is_local:
            return
        with self.phases("reduce"):
            self._stale = self.round is not None  # it holds what has not been folded yet
            current, arrivals = self._finish_round(states)
            sums: dict[str, Tensor] = {}
            for arrived in arrivals:
                sums.update(arrived)
            current.settle(sums)

    # --- solving --------------------------------------------------------------------------------

    def solve(
        self, due: Sequence[LayerState], damping: float
    ) -> dict[LayerState, dict[str, Tensor] | None]:
        """Solve some layers anew; see :meth:`Solving.run`."""
        solving = Solving(self, due, damping)
        if self.is_local:
            return self._solve_local(solving)
        with self.phases("reduce"):
            current, arrivals = self._finish_round(due)
        for state in due:
            for name in state.running:
                key = self.key(state, name)
                solving.missing[state] |= not current.counts[key] > 0
                if key in current.outlines:
                    solving.outlines[state][name] = current.outlines[key]
        sums: dict[str, Tensor] = {}

        def receive() -> Iterator[None]:
            while True:
                started = time.perf_counter()
                arrived = next(arrivals, None)
                self.waited += time.perf_counter() - started
                if arrived is None:
                    return
                sums.update(arrived)
                for key, total in arrived.items():
                    state, name = current.sources[key]
                    if current.counts[key] > 0:
                        mean = state.running[name].mean_of(total, current.counts[key])
                        solving.means[state][name] = mean
                yield

        outcome = solving.run(self._stages(current), receive())
        current.settle(sums)
        if self.settings.overlap and self.plan.groups is None:
            keys = [key for key in current.sources if key not in current.gathered]
            sizes = {key: self._size(*current.sources[key]) for key in keys}
            self.plan.decide(self.world, sizes, self.measured_link())
            self.buckets.clear()
        return outcome

    def _solve_local(self, solving: Solving) -> dict[LayerState, dict[str, Tensor] | None]:
        for state in filter(self.works_on, solving.due):
            with self.phases("refresh", state.name):
                self._prepare_local(solving, state)
        work = [(state, part) for state in solving.due for part in state.block.parts]
        return solving.run([work], iter(()))

    @staticmethod
    def _prepare_local(solving: Solving, state: LayerState) -> None:
        """Give a layer the means of what this rank has observed."""
        for name, running in state.running.items():
            mean = running.mean()
            if mean is None:
                continue
            solving.means[state][name] = mean
            outline = state.block.outline(name, mean)
            if outline is not None:
                solving.outlines[state][name] = outline

    def _stages(self, current: Round) -> list[list[Work]]:
        """Which parts can be solved after which bucket has arrived."""
        first = 1 if current.gathered else 0
        stages: list[list[Work]] = [[] for _ in range(len(current.reduction.buckets) + first)]
        for state in current.states:
            for part, described in state.block.parts.items():
                keys = [self.key(state, name) for name in described.statistics]
                last = max(
                    0 if key in current.gathered else first + current.reduction.bucket_of(key)
                    for key in keys
                )
                stages[last].append((state, part))
        return stages

    def _size(self, state: LayerState, name: str) -> int:
        unit = self._units[state]
        key = self.key(state, name)
        return next(one.bytes for one in unit.statistics if one.key == key)

    @property
    def spreads(self) -> bool:
        """Whether preconditioned gradients travel at every step."""
        return self.row.size > 1 and not self.owns_parameters

    def gradient_root(self, state: LayerState) -> int:
        """The rank of this row that preconditions a layer's gradient."""
        column = self._placed.assignments[self._names[state]].column
        return self._placed.grid.root(self.world.rank, column)

    # --- saving ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """What all ranks have agreed on, for a resume in a world of the same size."""
        return json.dumps(
            {
                "size": self.world.size,
                "scheme": str(self.settings.scheme),
                "placement": self._placed.to_json(),
                "groups": self.plan.groups,
            }
        )

    def resume(self, described: str, holds_all: Callable[[], bool]) -> None:
        """Take up what a run in an equal world had agreed on; otherwise do nothing.

        ``holds_all`` says whether this rank was given all that it then has to hold: state that was read
        piece by piece (``torch.distributed.checkpoint``) is that of the present placement.
        """
        saved = json.loads(described)
        if saved["size"] != self.world.size or saved["scheme"] != str(self.settings.scheme):
            return
        placement = Placement.from_json(saved["placement"])
        if set(placement.assignments) != set(self._names.values()):
            return
        for state, name in self._names.items():
            parts, tasks = state.block.parts, placement.assignments[name].tasks
            if set(tasks) != set(parts) or any(
                task.split and parts[part].shared_flops is None for part, task in tasks.items()
            ):
                return  # it was solved in another way
        before = self._placed
        if placement != before:
            self.use(placement)
            if self.world.total([float(not holds_all())]).item() > 0:
                self.use(before)
                return
        self.plan.groups = saved["groups"]
        self.buckets.clear()
