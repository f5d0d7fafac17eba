"""Solving over ranks: each part where it was placed, as soon as its statistics are there.

Solutions leave as soon as they are ready. All ranks then agree on the outcome for every layer before any
of them takes a new solution into use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kronfac.distributed.comm.broadcast import Broadcast, make_broadcasts
from kronfac.distributed.comm.buckets import Bucket
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.layout import Layout
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases

#: A layer, and the name of a part of its solution.
Work = tuple[LayerState, str]


class Solving:
    """One refresh of some layers, seen from one rank."""

    def __init__(
        self, layout: Layout, phases: Phases, due: Sequence[LayerState], damping: float
    ) -> None:
        self.layout = layout
        self.phases = phases
        self.due = list(due)
        self.damping = damping
        self.means: dict[LayerState, dict[str, Tensor]] = {state: {} for state in due}
        self.outlines: dict[LayerState, dict[str, Tensor]] = {state: {} for state in due}
        self.missing = dict.fromkeys(due, False)
        self.failed = dict.fromkeys(due, False)
        self._local: dict[LayerState, dict[str, Tensor]] = {state: {} for state in due}
        self._messages: list[Broadcast | Bucket] = []
        #: Shapes of solutions of which the data decides a size, by key.
        self._sizes: dict[str, tuple[int, ...]] = {}

    def run(self, stages: Sequence[Sequence[Work]], arrivals: Iterator[None]) -> None:
        """Solve stage by stage, each when its statistics have arrived, and send off solutions."""
        for stage in stages:
            with self.phases("reduce"):
                next(arrivals, None)
            self._solve_stage(stage)
        for _ in arrivals:
            pass

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
        ours = [(state, part) for state, part in stage if layout.works_on(state)]
        divided, owned = [], []
        for state, part in ours:
            task = layout.task(state, part)
            if task.split:
                divided.append((state, part))
            elif task.rank is None:
                with phases("refresh", state.name):
                    self._keep(state, self._solve(state, part))
            else:
                owned.append((state, part, task.rank))
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
        found: dict[Work, dict[str, Tensor] | None] = {}
        for state, part, rank in owned:
            if rank == layout.world.rank:
                with phases("refresh", state.name):
                    found[state, part] = self._solve(state, part)
        if layout.column.size == 1:
            for (state, _), solution in found.items():
                self._keep(state, solution)
            return
        with phases("share"):
            self._send(owned, found, wire)

    def _send(
        self,
        owned: Sequence[tuple[LayerState, str, int]],
        found: Mapping[Work, dict[str, Tensor] | None],
        wire: torch.dtype | None,
    ) -> None:
        values: dict[str, Tensor] = {}
        for (state, _), solution in found.items():
            if solution is None:
                self.failed[state] = True
            for name, value in (solution or {}).items():
                values[self.layout.key(state, name)] = value
        self._agree_on_sizes(owned, values)
        items = [item for state, part, rank in owned for item in self._items(state, part, rank)]
        for broadcast in make_broadcasts(items, self.layout.column, "share", wire):
            if broadcast.mine:
                for key in broadcast.keys:
                    broadcast.put(key, values.get(key))
            broadcast.launch()
            self._messages.append(broadcast)

    def _agree_on_sizes(
        self, owned: Sequence[tuple[LayerState, str, int]], values: Mapping[str, Tensor]
    ) -> None:
        """Let all ranks of the column know the sizes that the data has decided."""
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
        self.layout.column.all_reduce("control", flat).wait()
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
            dtype = state.layer.factor_dtype
            found.append(Item(key, shape, dtype, weight.device, symmetric, root))
        return found

    # --- one part -------------------------------------------------------------------------------

    def _ready(self, state: LayerState, part: str) -> dict[str, Tensor] | None:
        means = self.means[state]
        names = state.block.parts[part].statistics
        if self.missing[state] or any(name not in means for name in names):
            self.missing[state] = True
            return None
        return {name: means[name] for name in names}

    def _solve(self, state: LayerState, part: str) -> dict[str, Tensor] | None:
        means = self._ready(state, part)
        if means is None:
            return None
        outlines, previous = self.outlines[state], state.solution
        return state.block.solve(part, means, outlines, previous, self.damping)

    def _solve_share(self, state: LayerState, part: str) -> dict[str, Tensor] | None:
        """This rank's summand of a part; nothing if others solve it, or if it cannot be solved."""
        ranks, rank = self.layout.solvers(state, part), self.layout.world.rank
        if rank not in ranks:
            return None
        means = self._ready(state, part)
        if means is None:
            return None
        solution = state.block.solve_share(
            part, means, self.outlines[state], self.damping, ranks.index(rank), len(ranks)
        )
        self.failed[state] |= solution is None
        return solution

    def _keep(self, state: LayerState, solution: dict[str, Tensor] | None) -> None:
        if solution is None:
            self.failed[state] = True
        else:
            self._local[state] |= solution

    # --- the outcome ----------------------------------------------------------------------------

    def _agree(self) -> dict[LayerState, dict[str, Tensor] | None]:
        """Take a solution only if every part of it was found, wherever it was solved."""
        flags = [float(self.missing[state]) for state in self.due]
        flags += [float(self.failed[state] and not self.missing[state]) for state in self.due]
        total = self.layout.world.total(flags).tolist()
        arrived = self._arrived()
        outcome: dict[LayerState, dict[str, Tensor] | None] = {}
        for index, state in enumerate(self.due):
            missing, failed = total[index], total[index + len(self.due)]
            if missing:
                continue
            if failed:
                outcome[state] = None
            elif self.layout.works_on(state):
                names = state.block.solution_shapes
                keys = {name: self.layout.key(state, name) for name in names}
                own = self._local[state]
                outcome[state] = {
                    name: arrived[key] if key in arrived else own[name]
                    for name, key in keys.items()
                }
            else:
                outcome[state] = {}
        return outcome

    def _arrived(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for message in self._messages:
            message.wait()
            found |= {key: message.flat.take(key) for key in message.keys}
        return found


def _name(key: str) -> str:
    return key.rpartition("/")[2]
