"""Solving over ranks: each part where it was placed, as soon as its statistics are there.

Solutions leave as soon as they are ready. All ranks then agree on the outcome for every layer before any
of them takes a new solution into use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kronfac.distributed.comm.broadcast import Broadcast, make_broadcasts
from kronfac.distributed.comm.buckets import Bucket
from kronfac.distributed.comm.collectives import Collectives
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.coordinator import Now
from kronfac.distributed.layout import Layout
from kronfac.distributed.solving.layer_solve import Work, solve_parts, takers
from kronfac.protocol.context import Given
from kronfac.state.layer_state import Due, LayerState
from kronfac.state.timing import Phases


class Solving:
    """One refresh of some layers, seen from one rank."""

    def __init__(self, layout: Layout, phases: Phases, due: Due, now: Now) -> None:
        self.layout = layout
        self.phases = phases
        self.due = dict(due)
        self.now = now
        #: By gathered statistic, how many rows each rank contributed.
        self.shards: dict[str, list[int]] = {}
        #: By statistic, what its sum is divided by.
        self.counts: dict[str, float] = {}
        self.means: dict[LayerState, dict[str, Tensor]] = {state: {} for state in due}
        self.outlines: dict[LayerState, dict[str, Tensor]] = {state: {} for state in due}
        self.missing = dict.fromkeys(due, False)
        self.failed = dict.fromkeys(due, False)
        self._solved: set[Work] = set()
        self._local: dict[LayerState, dict[str, Tensor]] = {state: {} for state in due}
        self._messages: list[Broadcast | Bucket] = []
        #: By part that several layers share, the layers that take what one of them has solved.
        self._takers: dict[Work, list[LayerState]] = {}
        #: Shapes of solutions of which the data decides a size, by key.
        self._sizes: dict[str, tuple[int, ...]] = {}

    def skip_old(self) -> None:
        """Leave out parts that there is nothing new for, on which ranks have agreed."""
        self.due = {state: state.news(parts) for state, parts in self.due.items()}

    def run(self, stages: Sequence[Sequence[Work]], arrivals: Iterator[None]) -> None:
        """Solve stage by stage, each when its statistics have arrived, and send off solutions."""
        self._takers = takers(self.due)
        for stage in stages:
            with self.phases("reduce"):
                next(arrivals, None)
            self._solve_stage(stage)
            self._forget_means(stage)
        for _ in arrivals:
            pass

    def _forget_means(self, stage: Sequence[Work]) -> None:
        """Free the means that no part still needs."""
        for state, part in stage:
            self._solved.add((state, part))
            left = [one for one in self.due[state] if (state, one) not in self._solved]
            needed = {name for one in left for name in state.block.parts[one].statistics}
            for name in state.block.parts[part].statistics:
                if name not in needed:
                    self.means[state].pop(name, None)

    def outcome(self) -> dict[LayerState, dict[str, Tensor] | None]:
        """Wait for solutions on their way, and return those on which all ranks agree, by layer.

        A solution is empty where this rank holds none, and ``None`` where none could be found. Layers
        without statistics are left out.
        """
        with self.phases("share"):
            return self._agree()

    def _solve_stage(self, stage: Sequence[Work]) -> None:
        """Solve what is to be solved here, and send and receive what belongs to this column."""
        layout, phases = self.layout, self.phases
        taken = {(state, part) for (_, part), own in self._takers.items() for state in own}
        due = [(state, part) for state, part in stage if part in self.due[state]]
        chosen = [work for work in due if work not in taken]
        divided, owned, to_all, everywhere = [], [], [], []
        for state, part in chosen:
            task = layout.task(state, part)
            if layout.goes_to_all(state, part) and task.rank is not None:
                to_all.append((state, part, task.rank))
            elif not layout.works_on(state):
                continue
            elif task.split:
                divided.append((state, part))
            elif task.rank is None:
                everywhere.append((state, part))
            else:
                owned.append((state, part, task.rank))
        for (state, part), solution in self._solve_all(everywhere).items():
            self._keep(state, part, solution)
        wire = layout.settings.wire_dtype
        for state, part in divided:
            items = self._items(state, part, None)
            with phases("refresh", state.name):
                summand = self._solve_share(state, part)
            with phases("share"):
                for item in items:
                    bucket = Bucket([item], layout.column, wire, phase="share")
                    bucket.flat.put(item.key, None if summand is None else summand[_name(item.key)])
                    bucket.launch()
                    self._messages.append(bucket)
        mine = [*to_all, *owned]
        found = self._solve_all([(s, part) for s, part, rank in mine if rank == layout.world.rank])
        with phases("share"):
            self._send(to_all, found, wire, layout.world.all)
            self._send(owned, found, wire, layout.column)

    def _send(
        self,
        owned: Sequence[tuple[LayerState, str, int]],
        found: Mapping[Work, dict[str, Tensor] | None],
        wire: torch.dtype | None,
        collectives: Collectives,
    ) -> None:
        """Send what was solved here to those who need it; where nobody else does, keep it."""
        if not owned:
            return
        values: dict[str, Tensor] = {}
        for state, part, _ in owned:
            if (state, part) not in found:
                continue
            solution = found[state, part]
            if solution is None or collectives.size == 1:
                self._keep(state, part, solution)
            for name, value in (solution or {}).items():
                values[self.layout.key(state, name)] = value
        if collectives.size == 1:
            return
        self._agree_on_sizes(owned, values, collectives)
        items = [item for state, part, rank in owned for item in self._items(state, part, rank)]
        for broadcast in make_broadcasts(items, collectives, "share", wire):
            if broadcast.mine:
                for key in broadcast.keys:
                    broadcast.put(key, values.get(key))
            broadcast.launch()
            self._messages.append(broadcast)

    def _agree_on_sizes(
        self,
        owned: Sequence[tuple[LayerState, str, int]],
        values: Mapping[str, Tensor],
        collectives: Collectives,
    ) -> None:
        """Let all ranks that receive them know the sizes that the data has decided."""
        open_shapes = {
            self.layout.key(state, name): shape
            for state, part, _ in owned
            for name in state.block.parts[part].solution
            if None in (shape := state.block.solution_shapes[name])
        }
        if not open_shapes:
            return
        found = [
            float(size)
            for key, shape in open_shapes.items()
            for size in (values[key].shape if key in values else [0] * len(shape))
        ]
        flat = torch.tensor(found, dtype=torch.float64, device=self.layout.world.device)
        collectives.all_reduce("control", flat).wait()
        sizes = iter(flat.tolist())
        for key, shape in open_shapes.items():
            self._sizes[key] = tuple(int(next(sizes)) for _ in shape)

    def _items(self, state: LayerState, part: str, root: int | None) -> list[Item]:
        block, weight = state.block, state.layer.weight
        found = []
        for name in block.parts[part].solution:
            key = self.layout.key(state, name)
            shape = self._sizes.get(key) or tuple(n or 0 for n in block.solution_shapes[name])
            symmetric = name in block.symmetric_solutions and self.layout.settings.triangles
            dtype = state.dtype_of(name)
            found.append(Item(key, shape, dtype, weight.device, symmetric, root))
        return found

    # --- one part -------------------------------------------------------------------------------

    def _given(self, state: LayerState, parts: Iterable[str]) -> Given | None:
        """What some parts are solved from; ``None`` if something is missing."""
        means, known = self.means[state], state.block.parts
        names = [name for part in parts for name in known[part].statistics]
        needed = [name for name in names if not state.running[name].statistic.may_be_missing]
        if self.missing[state] or any(name not in means for name in needed):
            self.missing[state] = True
            return None
        shards = {name: self.shards.get(self.layout.key(state, name), ()) for name in names}
        keys = {name: self.layout.key(state, name) for name in names}
        reduced = {name: self.counts[key] for name, key in keys.items() if key in self.counts}
        counts = {**state.counts_of(names), **reduced}
        return self.now.given(
            state,
            {name: means[name] for name in names if name in means},
            outlines=self.outlines[state],
            previous=state.solution_in_use,
            shards=shards,
            counts=counts,
        )

    def _solve_all(self, works: Sequence[Work]) -> dict[Work, dict[str, Tensor] | None]:
        """Solve parts here, those of equal shapes in batches."""
        if not works:
            return {}
        names = [state.name for state, _ in works]
        with self.phases("refresh"), self.phases.part("refresh", *names):
            given = {work: self._given(work[0], [work[1]]) for work in works}
            solved = solve_parts({work: one for work, one in given.items() if one is not None})
        return {work: solved.get(work) for work in works}

    def _solve_last(self, state: LayerState, solved: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Add the parts that come after others, which every worker solves itself."""
        parts = [part for part in self.due[state] if state.block.parts[part].after]
        if not parts or self.missing[state] or self.failed[state]:
            return solved
        with self.phases("refresh", state.name):
            given = self._given(state, parts)
            return (
                None if given is None else state.block.refresh(replace(given, solved=solved), parts)
            )

    def _solve_share(self, state: LayerState, part: str) -> dict[str, Tensor] | None:
        """This rank's summand of a part; nothing if others solve it, or if it cannot be solved."""
        ranks, rank = self.layout.solvers(state, part), self.layout.world.rank
        if rank not in ranks:
            return None
        given = self._given(state, [part])
        if given is None:
            return None
        solution = state.block.solve_share(part, given, ranks.index(rank), len(ranks))
        self.failed[state] |= solution is None
        return solution

    def _keep(self, state: LayerState, part: str, solution: dict[str, Tensor] | None) -> None:
        for one in (state, *self._takers.get((state, part), ())):
            if solution is None:
                self.failed[one] = True
            else:
                self._local[one] |= solution

    # --- the outcome ----------------------------------------------------------------------------

    def _agree(self) -> dict[LayerState, dict[str, Tensor] | None]:
        """Take a solution only if every part of it was found, wherever it was solved."""
        arrived = self._arrived()
        solved: dict[LayerState, dict[str, Tensor]] = {}
        for state in self.due:
            keys = {name: self.layout.key(state, name) for name in state.held}
            here = {name: arrived[key] for name, key in keys.items() if key in arrived}
            here = {**self._local[state], **here}
            whole = self._solve_last(state, here) if self.layout.works_on(state) else here
            self.failed[state] |= whole is None
            solved[state] = whole or {}
        flags = [float(self.missing[state]) for state in self.due]
        flags += [float(self.failed[state] and not self.missing[state]) for state in self.due]
        total = self.layout.world.total(flags).tolist()
        outcome: dict[LayerState, dict[str, Tensor] | None] = {}
        for index, state in enumerate(self.due):
            missing, failed = total[index], total[index + len(self.due)]
            if not missing:
                outcome[state] = None if failed else solved[state]
        return outcome

    def _arrived(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for message in self._messages:
            message.wait()
            found |= {key: message.flat.take(key) for key in message.keys}
        return found


def _name(key: str) -> str:
    return key.rpartition("/")[2]
