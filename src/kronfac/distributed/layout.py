"""Who does what: the layers of one optimizer, and the ranks that they are placed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kronfac.distributed.calibrate import measure_compute, measure_link
from kronfac.distributed.comm.collectives import Collectives
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.distributed.sharded.row_local import local_slices
from kronfac.distributed.sharded.sharding import Sharding
from kronfac.distributed.workload import Intervals, unit_of
from kronfac.layers.slices import Slice
from kronfac.placement.costs import Compute, LayerUnit, Link
from kronfac.placement.place import Placement, Task, place
from kronfac.placement.scheme import SCHEMES, Distribute, Hybrid, Sharded
from kronfac.planner.choose import choose
from kronfac.protocol.block import Statistic
from kronfac.state.layer_state import LayerState


class Layout:
    """Layers, their names and their work in numbers, and the placement of that work."""

    def __init__(
        self, world: ProcessGroup, settings: Distribute, sharding: Sharding | None = None
    ) -> None:
        self.world = world
        self.settings = settings
        #: How parameters are sharded, unless all of them are whole.
        self.sharding = sharding
        self.placement: Placement | None = None
        #: The layers' work in numbers, and their names, which are unique in the model.
        self.units: dict[LayerState, LayerUnit] = {}
        self.names: dict[LayerState, str] = {}
        #: Of layers that all ranks work on, the slices that are here.
        self._slices: dict[LayerState, Slice] = {}
        #: By statistic, the rank that keeps it.
        self._keepers: dict[str, int] = {}
        self._link: Link | None = None
        self._refresh_every = 1

    # --- placing --------------------------------------------------------------------------------

    def attach(self, states: Sequence[LayerState], intervals: Intervals) -> None:
        """Give new layers their places; those of others do not change."""
        new = [state for state in states if state not in self.units]
        self._slices |= self._new_slices(new, states)
        taken = set(self.names.values())
        tied: dict[Any, str] = {}
        for state in states:
            name = self.names.get(state, "")
            if not name:
                part = state.layer.part
                name = state.name if state.name not in taken else f"{state.name}:{part}"
                taken.add(name)
                self.names[state] = name
            own = state.layer.parameters
            first = next((tied[p] for p in own if p in tied), name)
            tied |= dict.fromkeys(own, first)
            sliced = self.slice_of(state) is not None
            triangles = self.settings.triangles
            self.units[state] = unit_of(name, state, triangles, first, intervals, sliced)
        self._refresh_every = intervals.refresh
        self._place([self.units[state] for state in new], intervals.refresh)

    def _new_slices(
        self, new: Sequence[LayerState], states: Sequence[LayerState]
    ) -> dict[LayerState, Slice]:
        """Which part of each new layer is worked on here, if that is not up to its owner."""
        if self.sharding is None or not self.settings.slices:
            return {}
        rank = self.world.global_ranks[self.world.rank]
        return local_slices(new, states, rank, self.world.size // self.sharding.replicas)

    def slice_of(self, state: LayerState) -> Slice | None:
        """The part of a layer that this rank works on, where all ranks do; else ``None``."""
        return self._slices.get(state)

    def share_inputs(self, new: Sequence[LayerState]) -> None:
        """Place layers again of which some share their inputs; nothing is held of them yet."""
        if self.keeps_owners:
            self.use(self._with_shared_parts(self.placed))
        else:
            self._place([self._placed_unit(state) for state in new], self._refresh_every)

    def _placed_unit(self, state: LayerState) -> LayerUnit:
        """A layer's own work, and the layer that it shares its input with, if it does."""
        unit, group = self.units[state], state.group
        if group is None or group.leader is state:
            return unit
        own = tuple(part for part in unit.parts if part.name not in self._shared_parts(state))
        return replace(unit, parts=own, beside=self.names[group.leader])

    @staticmethod
    def _shared_parts(state: LayerState) -> list[str]:
        """Parts of a layer that are solved from statistics of another one alone."""
        group = state.group
        if group is None or group.leader is state:
            return []
        parts = state.block.shared_parts.items()
        return [name for name, one in parts if set(one.statistics) <= set(group.statistics)]

    def _with_shared_parts(self, placement: Placement) -> Placement:
        """The same, with shared statistics solved where those of the first layer are."""
        assignments = dict(placement.assignments)
        for state, name in self.names.items():
            if (parts := self._shared_parts(state)) and state.group is not None:
                first = assignments[self.names[state.group.leader]]
                tasks = {**assignments[name].tasks, **{part: first.tasks[part] for part in parts}}
                assignments[name] = replace(assignments[name], tasks=tasks)
        return Placement(placement.scheme, placement.grid, assignments)

    def _place(self, units: Sequence[LayerUnit], refresh_every: int) -> None:
        placement = self._placement_of(units, refresh_every)
        if self.scheme in ("auto", "spd"):  # they follow measurements
            placement = Placement.from_json(self.world.first(placement.to_json()))
        if self.placement is not None:
            assignments = {**self.placement.assignments, **placement.assignments}
            placement = Placement(placement.scheme, placement.grid, assignments)
        self.use(self._with_shared_parts(placement))

    @property
    def scheme(self) -> str | Hybrid | Sharded:
        """What was asked for, or what sharded parameters ask for."""
        return self.settings.scheme if self.sharding is None else Sharded(self.sharding.replicas)

    def _placement_of(self, units: Sequence[LayerUnit], refresh_every: int) -> Placement:
        scheme = self.scheme
        if scheme == "auto" and self.placement is not None:
            scheme, grid = self.placement.scheme, self.placement.grid
            scheme = scheme if scheme in SCHEMES else Hybrid(grid.workers / grid.size)
        size, link, compute = self.world.size, Link(), Compute()
        if scheme in ("auto", "spd") and size > 1:
            link, compute = self.measured_link(), measure_compute(self.world)
        if scheme == "auto":
            direct = self.world.all.direct
            return choose(units, size, link, compute, refresh_every, direct=direct)[0]
        return place(
            units,
            size,
            scheme,
            link=link,
            compute=compute,
            refresh_every=refresh_every,
            balanced=self.settings.balanced,
            split=self.settings.split,
        )

    def use(self, placement: Placement) -> None:
        """Work by this placement from now on."""
        self.placement = placement
        grid, rank = placement.grid, self.world.rank
        self.column: Collectives = self.world.collectives(tuple(grid.column(grid.column_of(rank))))
        self.row: Collectives = self.world.collectives(tuple(grid.row(grid.row_of(rank))))
        index = itertools.count()
        for state in self.units:
            state.is_worker = self.works_on(state)
            state.observed = state.is_worker or not self.is_local
            for name in state.running:
                key = self.own_key(state, name)
                self._keepers[key] = placement.keeper(self.units[state], key, next(index))
            kept = [name for name in state.running if self._keeps(state, name)]
            state.kept = frozenset(kept)
        for state in self.units:  # what layers have in common is kept where it is first kept
            shared = {
                name: lender
                for name in state.running
                if (lender := state.lender(name)) is not state
            }
            own = [name for name in state.kept or () if name not in shared]
            state.kept = frozenset([*own, *(n for n, one in shared.items() if one.keeps(n))])

    def _keeps(self, state: LayerState, name: str) -> bool:
        if self.is_local:
            return state.is_worker
        if state.running[name].statistic.is_replicated:
            return state.is_worker
        return self._keepers[self.own_key(state, name)] == self.world.rank

    def keeper(self, state: LayerState, name: str) -> int:
        """The rank that keeps a statistic, which layers may share."""
        return self._keepers[self.key(state, name)]

    def copies(self, state: LayerState, statistic: Statistic) -> int:
        """How many ranks hold the same sum: gradients and weights are seen where they are worked on."""
        return self.placed.grid.workers if statistic.is_replicated else 1

    def goes_to_all(self, state: LayerState, part: str) -> bool:
        """Whether all ranks need a part of a layer's solution: to work on it, or to observe it."""
        if self.placed.grid.columns == 1 or self.is_local:
            return False
        if self.slice_of(state) is not None:
            return True
        return not state.block.seen_through.isdisjoint(state.block.parts[part].solution)

    def measured_link(self) -> Link:
        """How fast messages are, measured once."""
        if self._link is None:
            self._link = measure_link(self.world)
        return self._link

    # --- looking up -----------------------------------------------------------------------------

    @property
    def placed(self) -> Placement:
        """The placement, once there is one."""
        assert self.placement is not None
        return self.placement

    @property
    def is_local(self) -> bool:
        """Whether statistics stay where they were observed."""
        return self.placed.scheme == "local"

    @property
    def owns_parameters(self) -> bool:
        """Whether the base optimizer steps a layer only at its owner."""
        return self.placed.scheme == "layer-parallel"

    @property
    def keeps_owners(self) -> bool:
        """Whether layers stay on the ranks that work on them.

        Parameters or shards may be bound to these, and loaders that read piece by piece
        (``torch.distributed.checkpoint``) fill what ranks hold before inputs are known to be shared.
        """
        return self.owns_parameters or self.sharding is not None or self.placed.grid.columns > 1

    @property
    def spreads(self) -> bool:
        """Whether preconditioned gradients travel at every step."""
        return self.row.size > 1 and not self.owns_parameters

    @property
    def defers(self) -> bool:
        """Whether ranks keep statistics of their own from one refresh to the next.

        Those who shard their parameters for lack of memory do not: each leaves for its keeper at once.
        """
        return self.settings.deferred and self.sharding is None

    @property
    def is_first_row(self) -> bool:
        """Whether this rank is in the first row; the ranks of another row know the same layers."""
        return self.placed.grid.row_of(self.world.rank) == 0

    def key(self, state: LayerState, name: str) -> str:
        """The name of one of a layer's tensors, unique in the model; layers may share a tensor."""
        return self.own_key(state.lender(name), name)

    def own_key(self, state: LayerState, name: str) -> str:
        """The same, also where it is shared with another layer."""
        return f"{self.names[state]}/{name}"

    def works_on(self, state: LayerState) -> bool:
        """Whether this rank holds the layer's solution and preconditions its gradient."""
        return self.placed.is_worker(self.names[state], self.world.rank)

    def owner(self, state: LayerState) -> int:
        """The first of the ranks that a layer is assigned to."""
        return self.placed.grid.column(self.placed.assignments[self.names[state]].column)[0]

    def task(self, state: LayerState, part: str) -> Task:
        """Where a part of a layer is solved."""
        return self.placed.assignments[self.names[state]].tasks[part]

    def solvers(self, state: LayerState, part: str) -> tuple[int, ...]:
        """The ranks that solve a part of a layer."""
        return self.placed.solvers(self.names[state], part)

    def root(self, state: LayerState, name: str) -> int | None:
        """The one rank that needs a statistic's sum, or ``None`` if several do."""
        group = state.group
        shared = group is not None and name in group.statistics
        found: set[int] = set()
        for one in group.members if group is not None and shared else [state]:
            needs = self.placed.needs(self.units[one], self.own_key(one, name))
            if needs is None:
                return None
            found |= set(needs)
        return found.pop() if len(found) == 1 else None

    def gradient_root(self, state: LayerState) -> int:
        """The rank of this row that preconditions a layer's gradient."""
        column = self.placed.assignments[self.names[state]].column
        return self.placed.grid.root(self.world.rank, column)

    def statistic_bytes(self, state: LayerState, name: str) -> int:
        """Bytes of a statistic in a message."""
        key = self.own_key(state, name)
        return next(one.bytes for one in self.units[state].statistics if one.key == key)

    def fits(self, placement: Placement) -> bool:
        """Whether a placement is one of these layers, solved in the same parts."""
        if set(placement.assignments) != set(self.names.values()):
            return False
        for state, name in self.names.items():
            parts, tasks = state.block.shared_parts, placement.assignments[name].tasks
            if placement.assignments[name].sliced != self.units[state].sliced:
                return False
            if set(tasks) != set(parts) or any(
                task.split and parts[part].shared_flops is None for part, task in tasks.items()
            ):
                return False
        return True
