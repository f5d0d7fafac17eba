"""Parts of gradients on their way to the ranks that work on their layers, and back.

A layer is worked on by one rank of each row, its *owner*. Before a step all ranks of the row send it
their parts of the layer's gradients (*collect*), and after it they are sent what has become of them
(*spread*): one uneven all-to-all each. What leaves a rank is its own parts of others' layers, and the
others' parts of its own layers: ``2·N/P·(P-1)/P`` elements for N parameters on P ranks. Layers whose
slices are worked on where they are (:mod:`kronfac.distributed.sharded.row_local`) have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from kronfac.distributed.layout import Layout
from kronfac.layers.parameter_view import ShardedView
from kronfac.layers.shards import Box, box_of, local
from kronfac.layers.slices import SlicedView
from kronfac.placement.place import Placement
from kronfac.state.layer_state import LayerState

#: Layers may be unused at some steps; so many choices of those that are used are kept.
MAX_ROUTES = 8


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


class ShardExchange:
    """The whole gradients that exist on this rank during a step, and how they come and go."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        #: Whole gradients, and whole parameters for methods that look at them, of layers worked on here.
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.values: dict[nn.Parameter, Tensor] = {}
        self._placement: Placement | None = None
        self._transfers: dict[nn.Parameter, Transfer] = {}
        self._routes: dict[tuple[Transfer, ...], list[Route]] = {}

    def attach(self, states: Iterable[LayerState]) -> None:
        """Let layers find their gradients here."""
        for state in states:
            piece = self.layout.slice_of(state)
            if piece is None:
                state.view = ShardedView(state.layer, self.gradients, self.values)
            else:
                state.view = SlicedView(state.layer, piece)

    def collect(self, states: Sequence[LayerState]) -> None:
        """Make gradients whole where their layers are worked on, and parameters that methods look at."""
        self.gradients.clear()
        self.values.clear()
        used = _exchanged(states)
        for route in self._chosen(used, lambda p: p.grad is not None):
            self.gradients |= self._gather(route, _grad)
        looks = [state for state in used if _looks_at_weights(state)]
        for route in self._chosen(looks, lambda p: True):
            self.values |= self._gather(route, _value)

    def spread(self, states: Sequence[LayerState]) -> None:
        """Send the parts of whole gradients to those who hold them, and forget the whole."""
        for route in self._chosen(_exchanged(states), lambda p: p.grad is not None):
            self._scatter(route)
        self.gradients.clear()
        self.values.clear()

    # --- who sends what -------------------------------------------------------------------------

    def _chosen(
        self, states: Sequence[LayerState], wanted: Callable[[nn.Parameter], bool]
    ) -> list[Route]:
        """How some layers' parameters travel, each once, in an order that all ranks follow."""
        if self._placement is not self.layout.placement:  # layers have other owners now
            self._transfers.clear()
            self._routes.clear()
            self._placement = self.layout.placement
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

    def _transfer(self, parameter: nn.Parameter, state: LayerState) -> Transfer:
        world, row = self.layout.world, self.layout.row.members
        owner = row.index(self.layout.gradient_root(state))
        boxes = tuple(box_of(parameter, world.global_ranks[member]) for member in row)
        return Transfer(parameter, owner, boxes)

    # --- on the way -----------------------------------------------------------------------------

    def _gather(
        self, route: Route, part: Callable[[nn.Parameter], Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """All of some tensors of parameters, at their owners."""
        pieces = self._exchange(
            [[part(t.parameter).reshape(-1) for t in theirs] for theirs in route.leaving],
            route.coming_sizes,
            part(route.first),
            None,
        )
        whole: dict[nn.Parameter, Tensor] = {}
        for member, own in enumerate(route.coming):
            for transfer, piece in zip(own, pieces[member], strict=True):
                p, box = transfer.parameter, transfer.boxes[member]
                if p not in whole:
                    whole[p] = piece.new_empty(p.shape)
                whole[p][box] = piece.view([one.stop - one.start for one in box])
        return whole

    def _scatter(self, route: Route) -> None:
        """Put the parts of whole gradients into the memory of those who hold them."""
        leaving = [
            [self.gradients[t.parameter][t.boxes[member]].reshape(-1) for t in route.own]
            for member in range(self.layout.row.size)
        ]
        wire = self.layout.settings.wire_dtype
        pieces = self._exchange(leaving, route.owned_sizes, _grad(route.first), wire)
        for theirs, arrived in zip(route.owned, pieces, strict=True):
            for transfer, piece in zip(theirs, arrived, strict=True):
                target = _grad(transfer.parameter)
                target.copy_(piece.view(target.shape))

    def _exchange(
        self,
        leaving: Sequence[Sequence[Tensor]],
        sizes: Sequence[Sequence[int]],
        like: Tensor,
        wire: torch.dtype | None,
    ) -> list[tuple[Tensor, ...]]:
        """Send flat tensors to each member of the row; returns those that arrive, by member."""
        empty = like.new_empty(0)
        flat = torch.cat([empty, *(one for own in leaving for one in own)]).to(wire or like.dtype)
        splits = [sum(one.numel() for one in own) for own in leaving]
        totals = [sum(own) for own in sizes]
        found = flat.new_empty(sum(totals))
        self.layout.row.exchange("spread", flat, splits, found, totals).wait()
        pieces = found.to(like.dtype).split(totals)
        return [tuple(piece.split(list(own))) for piece, own in zip(pieces, sizes, strict=True)]


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
