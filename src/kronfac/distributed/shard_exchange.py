"""Parts of gradients on their way to the ranks that work on their layers, and back.

A layer is worked on by one rank of each row, its *owner*. Before a step all ranks of the row send it
their parts of the layer's gradients (*collect*), and after it they are sent what has become of them
(*spread*): one uneven all-to-all each. What leaves a rank is its own parts of others' layers, and the
others' parts of its own layers: ``2·N/P·(P-1)/P`` elements for N parameters on P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kronfac.distributed.comm.traffic import Phase
from kronfac.distributed.layout import Layout
from kronfac.layers.parameter_view import ShardedView
from kronfac.layers.shards import Box, box_of, local
from kronfac.state.layer_state import LayerState


@dataclass(frozen=True, eq=False)
class Transfer:
    """A parameter, the member of the row that works on it, and what each member holds of it."""

    parameter: nn.Parameter
    owner: int
    boxes: tuple[Box, ...]

    @property
    def senders(self) -> tuple[int, ...]:
        """Members whose parts make up the whole: of those with the same part the owner, or the first."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        order = [self.owner, *(m for m in range(len(self.boxes)) if m != self.owner)]
        for member in order:
            if _elements(self.boxes[member]):
                first.setdefault(tuple((s.start, s.stop) for s in self.boxes[member]), member)
        return tuple(sorted(first.values()))


class ShardExchange:
    """The whole gradients that exist on this rank during a step, and how they come and go."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        #: Whole gradients, and whole parameters for methods that look at them, of layers worked on here.
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.values: dict[nn.Parameter, Tensor] = {}
        self._transfers: dict[nn.Parameter, Transfer] = {}

    def attach(self, states: Iterable[LayerState]) -> None:
        """Let layers find their gradients here."""
        self._transfers.clear()
        for state in states:
            state.view = ShardedView(state.layer, self.gradients, self.values)

    def collect(self, states: Sequence[LayerState]) -> None:
        """Make gradients whole where their layers are worked on, and parameters that methods look at."""
        self.gradients.clear()
        self.values.clear()
        used = [state for state in states if state.has_gradient]
        chosen = self._chosen(used)
        self.gradients |= self._gather([t for t in chosen if t.parameter.grad is not None], _grad)
        looks = [
            state
            for state in used
            if any(one.source == "weight" for one in state.block.statistics.values())
        ]
        self.values |= self._gather(self._chosen(looks), _value)

    def spread(self, states: Sequence[LayerState]) -> None:
        """Send the parts of whole gradients to those who hold them, and forget the whole."""
        used = [state for state in states if state.has_gradient]
        chosen = [t for t in self._chosen(used) if t.parameter.grad is not None]
        for transfers in _alike(chosen):
            self._scatter(transfers)
        self.gradients.clear()
        self.values.clear()

    # --- one precision on one device ------------------------------------------------------------

    def _chosen(self, states: Sequence[LayerState]) -> list[Transfer]:
        """What travels of some layers, each parameter once, in an order that all ranks follow."""
        found: dict[nn.Parameter, Transfer] = {}
        for state in states:
            for parameter in state.layer.parameters:
                if parameter not in self._transfers:
                    self._transfers[parameter] = self._transfer(parameter, state)
                found[parameter] = self._transfers[parameter]
        return list(found.values())

    def _transfer(self, parameter: nn.Parameter, state: LayerState) -> Transfer:
        world, row = self.layout.world, self.layout.row.members
        owner = row.index(self.layout.gradient_root(state))
        boxes = tuple(box_of(parameter, world.global_ranks[member]) for member in row)
        return Transfer(parameter, owner, boxes)

    @property
    def _place(self) -> int:
        return self.layout.row.members.index(self.layout.world.rank)

    def _gather(
        self, transfers: Sequence[Transfer], part: Callable[[nn.Parameter], Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """All of some tensors of parameters, at their owners."""
        whole: dict[nn.Parameter, Tensor] = {}
        for alike in _alike(transfers):
            here, members = self._place, range(self.layout.row.size)
            leaving = [[t for t in alike if t.owner == m and here in t.senders] for m in members]
            coming = [[t for t in alike if t.owner == here and m in t.senders] for m in members]
            pieces = self._exchange(
                [[part(t.parameter).reshape(-1) for t in own] for own in leaving],
                [[_elements(t.boxes[m]) for t in own] for m, own in enumerate(coming)],
                part(alike[0].parameter),
                None,
            )
            for member, own in enumerate(coming):
                for transfer, piece in zip(own, pieces[member], strict=True):
                    p, box = transfer.parameter, transfer.boxes[member]
                    if p not in whole:
                        whole[p] = piece.new_empty(p.shape)
                    whole[p][box] = piece.view([one.stop - one.start for one in box])
        return whole

    def _scatter(self, transfers: Sequence[Transfer]) -> None:
        """Put the parts of whole gradients into the memory of those who hold them."""
        here, members = self._place, range(self.layout.row.size)
        own = [t for t in transfers if t.owner == here]
        coming = [[t for t in transfers if t.owner == m] for m in members]
        pieces = self._exchange(
            [[self.gradients[t.parameter][t.boxes[m]].reshape(-1) for t in own] for m in members],
            [[_elements(t.boxes[here]) for t in theirs] for theirs in coming],
            _grad(transfers[0].parameter),
            self.layout.settings.wire_dtype,
        )
        for theirs, arrived in zip(coming, pieces, strict=True):
            for transfer, piece in zip(theirs, arrived, strict=True):
                target = _grad(transfer.parameter)
                target.copy_(piece.view(target.shape))

    def _exchange(
        self,
        leaving: Sequence[Sequence[Tensor]],
        sizes: Sequence[Sequence[int]],
        like: Tensor,
        wire: torch.dtype | None,
        phase: Phase = "spread",
    ) -> list[tuple[Tensor, ...]]:
        """Send flat tensors to each member of the row; returns those that arrive, by member."""
        empty = like.new_empty(0)
        flat = torch.cat([empty, *(one for own in leaving for one in own)]).to(wire or like.dtype)
        splits = [sum(one.numel() for one in own) for own in leaving]
        found = flat.new_empty(sum(map(sum, sizes)))
        self.layout.row.exchange(phase, flat, splits, found, [sum(own) for own in sizes]).wait()
        found = found.to(like.dtype)
        return [
            tuple(piece.split(list(own)))
            for piece, own in zip(found.split([sum(own) for own in sizes]), sizes, strict=True)
        ]


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
