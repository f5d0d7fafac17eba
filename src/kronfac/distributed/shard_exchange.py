"""Parts of gradients on their way to the ranks that work on their layers, and back.

A layer is worked on by one rank of each row, its *owner*. Before a step all ranks of the row send it
their parts of the layer's gradients (*collect*), and after it they are sent what has become of them
(*spread*): one uneven all-to-all each. What leaves a rank is its own parts of others' layers, and the
others' parts of its own layers: ``2·N/P·(P-1)/P`` elements for N parameters on P ranks. Layers whose
slices are worked on where they are (:mod:`kronfac.distributed.sharded.row_local`) have no part in it.

Large models travel in portions (:mod:`kronfac.distributed.portions`), and messages are under way
while others are worked on, always in the same order:

    collect 0, collect 1 | work on 0 | spread 0, collect 2 | work on 1 | spread 1, collect 3 | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from kronfac.distributed.comm.collectives import Arrival, Collectives
from kronfac.distributed.layout import Layout
from kronfac.distributed.portions import MAX_PORTIONS, make_portions
from kronfac.layers.parameter_view import ShardedView
from kronfac.layers.shards import Box, box_of, local
from kronfac.layers.slices import SlicedView
from kronfac.placement.place import Placement
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases

#: Layers may be unused at some steps; so many choices of those that are used are kept.
MAX_ROUTES = 8 * MAX_PORTIONS
#: Portions whose messages are under way, in each direction, beside the one that is worked on.
AHEAD = 1


@dataclass(frozen=True, eq=False)
class Transfer:
    """A parameter, the member of the row that works on it, and what each member holds of it."""

    parameter: nn.Parameter
    owner: int
    boxes: tuple[Box, ...]

    @cached_property
    def senders(self) -> frozenset[int]:
        """Members whose parts make up the whole: of those with the same part the owner, or the first."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        order = [self.owner, *(m for m in range(len(self.boxes)) if m != self.owner)]
        for member in order:
            if _elements(self.boxes[member]):
                first.setdefault(tuple((s.start, s.stop) for s in self.boxes[member]), member)
        return frozenset(first.values())

    def elements(self, member: int) -> int:
        """Elements of the part that a member holds."""
        return _elements(self.boxes[member])


class Route:
    """What travels together, seen from one member of a row."""

    def __init__(self, transfers: Sequence[Transfer], place: int, members: int) -> None:
        self.first = transfers[0].parameter
        #: By member, what it works on, what this one sends it of that, and what it sends of this one's.
        self.owned: list[list[Transfer]] = [[] for _ in range(members)]
        for one in transfers:
            self.owned[one.owner].append(one)
        self.own = self.owned[place]
        self.leaving = [[t for t in theirs if place in t.senders] for theirs in self.owned]
        self.coming = [[t for t in self.own if m in t.senders] for m in range(members)]
        self.coming_sizes = [[t.elements(m) for t in own] for m, own in enumerate(self.coming)]
        self.owned_sizes = [[t.elements(place) for t in theirs] for theirs in self.owned]


@dataclass
class Message:
    """Flat tensors on their way to the members of a row, and those that come from them."""

    arrival: Arrival
    #: What leaves stays in memory until it has left.
    flat: Tensor
    found: Tensor
    dtype: torch.dtype
    sizes: Sequence[Sequence[int]]

    def take(self) -> list[tuple[Tensor, ...]]:
        """Wait for it; returns what has arrived, by member."""
        self.arrival.wait()
        self.flat = self.flat.new_empty(0)
        pieces = self.found.to(self.dtype).split([sum(own) for own in self.sizes])
        return [tuple(one.split(list(own))) for one, own in zip(pieces, self.sizes, strict=True)]


#: Messages of a portion, and how to unpack them.
Routed = list[tuple[Route, Message]]


class ShardExchange:
    """The whole gradients that exist on this rank during a step, and how they come and go."""

    def __init__(self, layout: Layout, phases: Phases) -> None:
        self.layout = layout
        self.phases = phases
        #: Whole gradients, and whole parameters for methods that look at them, of layers worked on here.
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.values: dict[nn.Parameter, Tensor] = {}
        self._placement: Placement | None = None
        self._transfers: dict[nn.Parameter, Transfer] = {}
        self._routes: dict[tuple[Transfer, ...], list[Route]] = {}
        #: The layers that portions were made of, and these.
        self._planned: list[LayerState] = []
        self._portions: list[list[LayerState]] = []
        #: Whether all gradients of this step are whole.
        self._collected = False

    def attach(self, states: Iterable[LayerState]) -> None:
        """Let layers find their gradients here."""
        self._placement = None
        for state in states:
            piece = self.layout.slice_of(state)
            if piece is None:
                state.view = ShardedView(state.layer, self.gradients, self.values)
            else:
                state.view = SlicedView(state.layer, piece)
        self._channel()  # all ranks make it together, now

    def _channel(self) -> Collectives:
        """The row, for messages that no others wait for."""
        return self.layout.world.collectives(self.layout.row.members, "exchange")

    def collect(self, states: Sequence[LayerState]) -> None:
        """Make all gradients whole where layers are worked on, and parameters that methods look at."""
        with self.phases("collect"):
            self._forget()
            used = _exchanged(states)
            self._land(self._begin(used))
            looks = [state for state in used if _looks_at_weights(state)]
            for route in self._chosen(looks, lambda p: True):
                self.values |= self._gathered(route, self._gather(route, _value))
            self._collected = True

    def portions(
        self, states: Sequence[LayerState], at_once: bool
    ) -> Iterator[Sequence[LayerState]]:
        """Layers whose gradients are whole where they are worked on, until the next ones are asked for.

        ``at_once`` leaves them together; they may have been collected before.
        """
        plan = [list(states)] if at_once else self._plan(states)
        coming: deque[Routed] = deque()
        leaving: deque[Routed] = deque()
        if not self._collected:
            self._forget()
        begun = len(plan) if self._collected else 0
        for number, some in enumerate(plan):
            with self.phases("collect"):
                while begun < min(len(plan), number + 1 + AHEAD):
                    coming.append(self._begin(_exchanged(plan[begun])))
                    begun += 1
                if coming:
                    self._land(coming.popleft())
            yield some
            with self.phases("spread"):
                leaving.append(self._send(_exchanged(some)))
                if len(leaving) > AHEAD:
                    self._receive(leaving.popleft())
        with self.phases("spread"):
            for routed in leaving:
                self._receive(routed)
        self._forget()

    def _forget(self) -> None:
        self.gradients.clear()
        self.values.clear()
        self._collected = False

    # --- who sends what -------------------------------------------------------------------------

    def _chosen(
        self, states: Sequence[LayerState], wanted: Callable[[nn.Parameter], bool]
    ) -> list[Route]:
        """How some layers' parameters travel, each once, in an order that all ranks follow."""
        self._renew()
        found: dict[nn.Parameter, Transfer] = {}
        for state in states:
            for parameter in state.layer.parameters:
                if parameter not in self._transfers:
                    self._transfers[parameter] = self._transfer(parameter, state)
                if wanted(parameter):
                    found[parameter] = self._transfers[parameter]
        key = tuple(found.values())
        if key not in self._routes:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            row = self.layout.row
            place = row.members.index(self.layout.world.rank)
            self._routes[key] = [Route(alike, place, row.size) for alike in _alike(key)]
        return self._routes[key]

    def _plan(self, states: Sequence[LayerState]) -> list[list[LayerState]]:
        """The portions of all layers."""
        self._renew()
        if not self._portions or self._planned != list(states):
            self._planned = list(states)
            self._portions = make_portions(self.layout, states)
        return self._portions

    def _renew(self) -> None:
        """Plan again if layers have come or gone, or have other owners now."""
        if self._placement is not self.layout.placement:
            self._transfers.clear()
            self._routes.clear()
            self._portions = []
            self._placement = self.layout.placement

    def _transfer(self, parameter: nn.Parameter, state: LayerState) -> Transfer:
        world, row = self.layout.world, self.layout.row.members
        owner = row.index(self.layout.gradient_root(state))
        boxes = tuple(box_of(parameter, world.global_ranks[member]) for member in row)
        return Transfer(parameter, owner, boxes)

    # --- on the way -----------------------------------------------------------------------------

    def _begin(self, states: Sequence[LayerState]) -> Routed:
        """Send parts of gradients to the owners of their layers."""
        routes = self._chosen(states, lambda p: p.grad is not None)
        return [(route, self._gather(route, _grad)) for route in routes]

    def _land(self, routed: Routed) -> None:
        """Make gradients whole of the parts that have arrived."""
        while routed:
            self.gradients |= self._gathered(*routed.pop())

    def _gather(self, route: Route, part: Callable[[nn.Parameter], Tensor]) -> Message:
        leaving = [[part(t.parameter).reshape(-1) for t in theirs] for theirs in route.leaving]
        return self._launch(leaving, route.coming_sizes, part(route.first), None)

    @staticmethod
    def _gathered(route: Route, message: Message) -> dict[nn.Parameter, Tensor]:
        """All of some tensors of parameters, at their owners."""
        pieces = message.take()
        whole: dict[nn.Parameter, Tensor] = {}
        for member, own in enumerate(route.coming):
            for transfer, piece in zip(own, pieces[member], strict=True):
                p, box = transfer.parameter, transfer.boxes[member]
                if p not in whole:
                    whole[p] = piece.new_empty(p.shape)
                whole[p][box] = piece.view([one.stop - one.start for one in box])
        return whole

    def _send(self, states: Sequence[LayerState]) -> Routed:
        """Send the parts of whole gradients to those who hold them, and forget the whole."""
        chosen = [state for state in states if state.is_preconditioned]
        found = []
        for route in self._chosen(chosen, lambda p: p.grad is not None):
            leaving = [
                [self.gradients[t.parameter][t.boxes[member]].reshape(-1) for t in route.own]
                for member in range(self.layout.row.size)
            ]
            wire = self.layout.settings.wire_dtype
            message = self._launch(leaving, route.owned_sizes, _grad(route.first), wire)
            found.append((route, message))
        for parameter in {p for state in states for p in state.layer.parameters}:
            self.gradients.pop(parameter, None)
        return found

    def _receive(self, routed: Routed) -> None:
        """Put what has become of parts of gradients into their memory."""
        for route, message in routed:
            for theirs, arrived in zip(route.owned, message.take(), strict=True):
                for transfer, piece in zip(theirs, arrived, strict=True):
                    target = _grad(transfer.parameter)
                    target.copy_(piece.view(target.shape))

    def _launch(
        self,
        leaving: Sequence[Sequence[Tensor]],
        sizes: Sequence[Sequence[int]],
        like: Tensor,
        wire: torch.dtype | None,
    ) -> Message:
        """Send flat tensors to each member of the row, which receives as many of each size."""
        empty = like.new_empty(0)
        flat = torch.cat([empty, *(one for own in leaving for one in own)]).to(wire or like.dtype)
        splits = [sum(one.numel() for one in own) for own in leaving]
        totals = [sum(own) for own in sizes]
        found = flat.new_empty(sum(totals))
        arrival = self._channel().exchange("spread", flat, splits, found, totals)
        return Message(arrival, flat, found, like.dtype, sizes)


def _exchanged(states: Iterable[LayerState]) -> list[LayerState]:
    """Layers with a gradient that is made whole; slices that are worked on alone stay where they are."""
    return [state for state in states if state.has_gradient and state.view.slice is None]


def _looks_at_weights(state: LayerState) -> bool:
    return any(one.source == "weight" for one in state.block.statistics.values())


def _alike(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """Those that can travel in one message."""
    groups: dict[Hashable, list[Transfer]] = {}
    for one in transfers:
        kind = one.parameter.dtype, one.parameter.device
        groups.setdefault(kind, []).append(one)
    return list(groups.values())


def _elements(box: Box) -> int:
    total = 1
    for one in box:
        total *= one.stop - one.start
    return total


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _value(parameter: nn.Parameter) -> Tensor:
    return local(parameter.detach())
