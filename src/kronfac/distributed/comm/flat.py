"""Tensors side by side in one flat tensor, which travels as one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.distributed.comm.symmetric import pack, packed_elements, unpack


@dataclass(frozen=True)
class Item:
    """A tensor that travels.

    Args:
        key: its name.
        shape: its shape.
        dtype: its precision.
        device: where it is.
        symmetric: whether one triangle of it travels.
        root: the rank that it comes from, or that needs its sum; ``None`` if all ranks do.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool = False
    root: int | None = None

    @property
    def elements(self) -> int:
        """How many numbers travel."""
        return packed_elements(self.shape, self.symmetric)


class Flat:
    """A flat tensor with a place for each of some tensors of one precision on one device."""

    def __init__(self, items: Sequence[Item], wire: torch.dtype | None = None) -> None:
        self.items = {item.key: item for item in items}
        self.slots: dict[str, slice] = {}
        start = 0
        for item in items:
            self.slots[item.key] = slice(start, start + item.elements)
            start += item.elements
        self.tensor = torch.empty(start, dtype=wire or items[0].dtype, device=items[0].device)
        self.packed: set[str] = set()

    @property
    def full(self) -> bool:
        """Whether every tensor has been put in its place."""
        return len(self.packed) == len(self.items)

    def put(self, key: str, value: Tensor | None) -> None:
        """Copy a tensor into its place; ``None`` stands for zeros."""
        slot = self.tensor[self.slots[key]]
        if value is None:
            slot.zero_()
        else:
            pack(value, self.items[key].symmetric, slot)
        self.packed.add(key)

    def take(self, key: str) -> Tensor:
        """The tensor at its place, in its shape and precision (a view where that is possible)."""
        item = self.items[key]
        slot = self.tensor[self.slots[key]]
        if not item.symmetric and slot.dtype == item.dtype:
            return slot.view(item.shape)
        return unpack(slot, item.shape, item.symmetric, item.dtype)

    def copy(self, key: str) -> Tensor:
        """The same in memory of its own."""
        taken = self.take(key)
        shared = taken.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        return taken.clone() if shared else taken


def alike(items: Sequence[Item]) -> list[list[Item]]:
    """Items that may be neighbours in one flat tensor."""
    groups: dict[tuple[torch.dtype, torch.device], list[Item]] = {}
    for item in items:
        groups.setdefault((item.dtype, item.device), []).append(item)
    return list(groups.values())
