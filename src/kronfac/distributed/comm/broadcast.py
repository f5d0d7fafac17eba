"""Tensors that one rank sends to others: solutions, preconditioned gradients, weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.distributed.comm.collectives import Arrival, Collectives
from kronfac.distributed.comm.flat import Flat, Item, alike
from kronfac.distributed.comm.traffic import Phase


class Broadcast:
    """Tensors of one rank in one message to all members of a channel."""

    def __init__(
        self,
        items: Sequence[Item],
        root: int,
        collectives: Collectives,
        phase: Phase,
        wire: torch.dtype | None,
    ) -> None:
        self.root = root
        self.collectives = collectives
        self.phase: Phase = phase
        self.flat = Flat(items, wire)
        self._arrival: Arrival | None = None

    @property
    def mine(self) -> bool:
        """Whether this rank fills it."""
        return self.root == self.collectives.rank

    @property
    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self.flat.items)

    def put(self, key: str, value: Tensor | None) -> None:
        """Copy a tensor into its place, on the rank that sends it."""
        self.flat.put(key, value)

    def launch(self) -> None:
        """Send it off, or get ready to receive it."""
        self._arrival = self.collectives.broadcast(self.phase, self.flat.tensor, self.root)

    def wait(self) -> None:
        """Return when it is there."""
        if self._arrival is not None:
            self._arrival.wait()

    def take(self, key: str) -> Tensor:
        """A tensor of it, as all ranks see it: rounded if it was rounded for the way."""
        return self.flat.take(key)


def make_broadcasts(
    items: Sequence[Item], collectives: Collectives, phase: Phase, wire: torch.dtype | None
) -> list[Broadcast]:
    """Parcels by root, in the order of roots, so that all members send in the same order."""
    by_root: dict[int, list[Item]] = {}
    for item in items:
        assert item.root is not None
        by_root.setdefault(item.root, []).append(item)
    return [
        Broadcast(group, root, collectives, phase, wire)
        for root in sorted(by_root)
        for group in alike(by_root[root])
    ]
