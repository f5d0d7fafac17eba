"""One round of statistics: what each rank has observed since the last one is added up.

Every rank keeps decayed sums of its own. A round adds them at the ranks that need them; afterwards one
rank, the keeper, holds the whole sum and the others hold nothing, so that at any time the sum over ranks
is the statistic of all data. On refresh steps tensors leave while the model is still running; what has
left is a copy, and if any rank observes more of it before the step, all of them repeat the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronfac.distributed.comm.buckets import Reduction, make_buckets
from kronfac.distributed.comm.flat import Item
from kronfac.state.fold import fold
from kronfac.state.input_group import InputGroup, groups_of
from kronfac.state.layer_state import Due, LayerState
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.running import new_count

if TYPE_CHECKING:
    from kronfac.distributed.rounds import Rounds


#: The rows that this rank contributes to the gathered statistics of a layer, by name, given what rows
#: of all ranks are divided by.
Compress = Callable[[LayerState, Mapping[str, float]], Mapping[str, Tensor]]
#: With staggered refreshes layers travel in other company each time; so many buckets are kept.
MAX_LAYOUTS = 4


@dataclass(frozen=True)
class Seen:
    """What a rank had observed of a statistic when it left."""

    generation: int
    version: int
    passes: tuple[Pass, ...]


@dataclass
class Moment:
    """How statistics are folded at the coming step."""

    decay: float
    passes: Mapping[Pass, Any]
    #: ``None`` as long as it is not known what the loss is divided by.
    normalizer: Callable[[], Normalizer | None]
    #: What stands for N in statistics that leave for good; ``None`` if nothing can.
    divisor: Callable[[], float | Tensor | None]
    #: Whether N is likely to be the same multiple of that on all ranks.
    proportional: bool = True


class Round:
    """The statistics of some layers, on their way."""

    def __init__(self, rounds: Rounds, due: Due) -> None:
        self.layout, self.plan = rounds.layout, rounds.plan
        self.due = dict(due)
        #: By statistic, the layer that observes it, and those that are solved from it.
        self.sources: dict[str, tuple[LayerState, str]] = {}
        self.users: dict[str, list[LayerState]] = {}
        for state, parts in due.items():
            for name in state.names_of(parts):
                key = self.layout.key(state, name)
                self.sources[key] = (state.lender(name), name)
                self.users.setdefault(key, []).append(state)
        #: Layers that share the inputs of these, whether they are solved now or not.
        self._groups = groups_of(state for state, _ in self.sources.values())
        #: Those of them that some rank has seen apart.
        self.parted: list[InputGroup] = []
        self.gathered = [
            key
            for key, (state, name) in self.sources.items()
            if state.running[name].statistic.combine == "gather"
        ]
        #: Statistics of gradients and weights, which are equal wherever they are seen.
        self.replicated = [
            key
            for key, (state, name) in self.sources.items()
            if state.running[name].statistic.is_replicated
        ]
        #: By gathered statistic, how many rows each rank contributed.
        self.shards: dict[str, list[int]] = {}
        self._newest: dict[str, float] = {}
        self._compressed = False
        #: Statistics that are whole at the one rank that needs them, in parts that are solved in turn.
        self.landed = self._in_turn([key for key in self.sources if self._is_landed(rounds, key)])
        #: What is there, or is gathered, when counts have been added up, and needs no bucket.
        landed = [key for keys in self.landed for key in keys]
        self.unbucketed = frozenset([*self.gathered, *self.replicated, *landed])
        self._sent: dict[str, Seen] = {}
        self._waiting: list[str] = []
        self.counts: dict[str, float] = {}
        self.outlines: dict[str, Tensor] = {}
        groups = self.plan.grouped([key for key in self.sources if key not in self.unbucketed])
        items = tuple(tuple(self._item(key) for key in group) for group in groups)
        if items not in rounds.buckets:
            if len(rounds.buckets) >= MAX_LAYOUTS:
                rounds.buckets.clear()
            wire = self.layout.settings.wire_dtype
            rounds.buckets[items] = make_buckets(items, rounds.early, wire)
        self.reduction = Reduction(rounds.buckets[items])

    def _is_landed(self, rounds: Rounds, key: str) -> bool:
        state, name = self.sources[key]
        root = self.layout.root(state, name)
        return root is not None and rounds.is_whole(state, name, root)

    def _in_turn(self, keys: Sequence[str]) -> list[list[str]]:
        """Statistics of which each rank has about as many as the largest layer has."""
        sizes: dict[str, int] = {}
        largest: dict[LayerState, int] = {}
        for key in keys:
            state, name = self.sources[key]
            sizes[key] = math.prod(state.running[name].statistic.shape)
            largest[state] = largest.get(state, 0) + sizes[key]
        limit = max(largest.values(), default=0) * self.layout.world.size
        groups: list[list[str]] = []
        total = 0
        for key in keys:
            if not groups or total + sizes[key] > limit:
                groups.append([])
                total = 0
            groups[-1].append(key)
            total += sizes[key]
        return groups

    @property
    def early_stages(self) -> int:
        """How many parts of :meth:`finish` come before the first bucket."""
        return len(self.landed) + (1 if self.gathered or self.replicated else 0)

    def stage_of(self, key: str) -> int:
        """With which part of :meth:`finish` a statistic arrives."""
        if key not in self.unbucketed:
            return self.early_stages + self.reduction.bucket_of(key)
        first = self.early_stages - len(self.landed)
        return next((first + n for n, keys in enumerate(self.landed) if key in keys), 0)

    def _item(self, key: str) -> Item:
        state, name = self.sources[key]
        statistic = state.running[name].statistic
        weight = state.layer.weight
        return Item(
            key,
            statistic.shape,
            state.layer.factor_dtype,
            weight.device,
            statistic.symmetric and self.layout.settings.triangles,
            self.layout.root(state, name),
        )

    # --- before the step ------------------------------------------------------------------------

    def observed(self, state: LayerState, source: str, moment: Moment) -> None:
        """Send off statistics of which everything has been observed, going by earlier steps."""
        if state.block.holds_rows or (source == "output" and state.broadcast):
            return  # more of it is added at the step
        version = state.pending.versions[source]
        for name, running in state.running.items():
            key = self.layout.key(state, name)
            if running.statistic.source != source or key not in self.sources:
                continue
            known = key in self._sent or key in self.unbucketed
            if self.plan.calls.get(key) == version and not known:
                self._waiting.append(key)
        normalizer = moment.normalizer()
        for key in list(self._waiting):
            state, name = self.sources[key]
            source = state.running[name].statistic.source
            if source == "output" and normalizer is None:
                continue
            with torch.profiler.record_function("kronfac.reduce.send"):
                folded = fold(state, name, moment.decay, normalizer, preview=True)
                self.reduction.offer(key, folded)
            self._sent[key] = _seen(state, source, moment.passes)
            self._waiting.remove(key)

    def is_stale(self, passes: Mapping[Pass, Any]) -> bool:
        """Whether more has been observed of something that has left."""
        return any(
            _seen(state, state.running[name].statistic.source, passes) != self._sent[key]
            for key, (state, name) in self.sources.items()
            if key in self._sent and self.reduction.has_left(key)
        )

    # --- at the step ----------------------------------------------------------------------------

    def finish(
        self, stale: bool, compress: Compress | None = None
    ) -> Iterator[Mapping[str, Tensor]]:
        """Send off the rest and return the sums that belong to this rank, as they arrive.

        Counts and outlines of all statistics are known when this returns. ``compress`` gives the rows
        that this rank contributes to the gathered statistics of a layer; by default all that it has.
        """
        self.reduction.complete(self._sum)
        header = self._header(stale)
        if header:  # some rank has observed more than it had sent
            self.reduction.restart()
            self.reduction.complete(self._sum)
        if self.parted:  # the round is void
            return self.reduction.arrivals()
        return self._arrivals(compress)

    def _sum(self, key: str) -> Tensor | None:
        state, name = self.sources[key]
        return state.running[name].sum

    def _header(self, stale: bool) -> bool:
        """Add up counts and outlines, and agree whether what has left is complete."""
        world = self.layout.world
        flags = [float(stale), *(float(group.parted) for group in self._groups)]
        numbers = [torch.tensor(flags, dtype=torch.float64, device=world.device)]
        sizes: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {}
        for key, (state, name) in self.sources.items():
            running, block = state.running[name], state.block
            count = new_count(0.0, world.device) if running.count is None else running.count
            numbers.append(count.to(world.device, numbers[0].dtype).reshape(1))
            numbers.append(torch.full_like(numbers[-1], float(running.fresh)))
            shape = block.outline_shapes.get(name)
            if shape is None:
                continue
            outline = None if running.sum is None else block.outline(name, running.sum)
            values = torch.zeros(shape, device=world.device) if outline is None else outline
            sizes[key] = [(name, values.numel(), tuple(shape))]
            numbers.append(values.to(world.device, numbers[0].dtype).reshape(-1))
        total = world.total(torch.cat(numbers))
        found: list[float] = total.tolist()  # the host waits, as it does for any refresh
        position = len(flags)
        parted = zip(self._groups, found[1:position], strict=True)
        self.parted = [group for group, times in parted if times > 0]
        for key, (state, name) in self.sources.items():
            times = self.layout.copies(state, state.running[name].statistic)
            self.counts[key] = found[position] / times
            fresh = found[position + 1] > 0
            state.running[name].agree(self.counts[key], fresh)
            position += 2
            for _, length, shape in sizes.get(key, []):
                values = total[position : position + length].reshape(shape)
                mean = values / max(found[position - 2], torch.finfo(torch.float64).tiny)
                dtype, device = state.layer.factor_dtype, state.layer.weight.device
                self.outlines[key] = mean.to(device, dtype)
                position += length
        return found[0] > 0

    def _arrivals(self, compress: Compress | None) -> Iterator[Mapping[str, Tensor]]:
        at_once = self._gather_all(compress) if self.gathered else {}
        at_once |= {key: own for key in self.replicated if (own := self._sum(key)) is not None}
        if self.gathered or self.replicated:
            yield at_once
        for keys in self.landed:
            yield {key: own for key in keys if (own := self._sum(key)) is not None}
        yield from self.reduction.arrivals()

    def _gather_all(self, compress: Compress | None) -> dict[str, Tensor]:
        """Rows of all ranks, side by side: those of the newest step at which any rank had some."""
        world, self._compressed = self.layout.world, compress is not None
        times = []
        for key in self.gathered:
            state, name = self.sources[key]
            running = state.running[name]
            times.append(-2.0 if running.sum is None else float(running.gathered_at))
        newest = dict(zip(self.gathered, world.largest(times).tolist(), strict=True))
        self._newest = newest
        states = list(dict.fromkeys(self.sources[key][0] for key in self.gathered))
        for state in states:
            for name, running in state.running.items():
                if running.gathered_at < newest.get(self.layout.key(state, name), -2):
                    running.forget()
        self._count_rows()
        rows: dict[str, Tensor] = {}
        for state in states:
            keys = {name: self.layout.key(state, name) for name in state.running}
            counts = {name: self.counts[key] for name, key in keys.items() if key in self.gathered}
            found = state.own_rows() if compress is None else compress(state, counts)
            rows |= {keys[name]: value for name, value in found.items()}
        here = [0.0] * world.size * len(self.gathered)
        for index, key in enumerate(self.gathered):
            here[index * world.size + world.rank] = float(rows[key].shape[-2])
        sizes = [int(n) for n in world.total(here).tolist()]
        for index, key in enumerate(self.gathered):
            shards = sizes[index * world.size : (index + 1) * world.size]
            self.shards[key] = shards
            if max(shards):
                rows[key] = world.all.gather("reduce", rows[key].contiguous(), shards)
        return {key: rows[key] for key in self.gathered}

    def _count_rows(self) -> None:
        """Count again what gathered rows are divided by, without those that were too old."""
        world, counts = self.layout.world, []
        for key in self.gathered:
            state, name = self.sources[key]
            count = state.running[name].count
            here = new_count(0.0, world.device) if count is None else count.to(world.device)
            counts.append(here.reshape(1))
        total = world.total(torch.cat(counts)).tolist()
        self.counts |= dict(zip(self.gathered, total, strict=True))

    def settle(self, sums: Mapping[str, Tensor]) -> None:
        """Leave each statistic with its keeper."""
        for key, (state, name) in self.sources.items():
            running = state.running[name]
            if key in self.replicated or running.statistic.source == "compressed":
                continue
            if key in self.gathered and self._compressed:
                continue  # what has arrived is not what was observed, which stays with its ranks
            if self.counts[key] > 0 and state.keeps(name):
                running.sum = sums[key]
                running.gathered_at = int(self._newest.get(key, -1))
                running.count = new_count(self.counts[key], state.layer.weight.device)
            else:
                running.sum = running.count = None


def _seen(state: LayerState, source: str, passes: Mapping[Pass, Any]) -> Seen:
    which = tuple(passes) if source == "output" else ()
    return Seen(state.pending.generations[source], state.pending.versions[source], which)
