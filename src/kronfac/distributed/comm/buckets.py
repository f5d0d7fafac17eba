"""Statistics on their way to whoever needs their sum: flat buckets that leave in one planned order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kronfac.distributed.comm.collectives import Arrival, Collectives, Segment
from kronfac.distributed.comm.flat import Flat, Item, alike
from kronfac.distributed.comm.traffic import Phase


class Bucket:
    """Tensors that are added over ranks together: first what all of them need, then by rank."""

    def __init__(
        self,
        items: Sequence[Item],
        collectives: Collectives,
        wire: torch.dtype | None = None,
        phase: Phase = "reduce",
        rings: bool = False,
    ) -> None:
        self.collectives = collectives
        self._rings = rings
        self.phase: Phase = phase
        ordered = sorted(items, key=lambda item: -1 if item.root is None else item.root)
        self.flat = Flat(ordered, wire)
        ends: dict[int | None, list[int]] = {}
        for item in ordered:
            slot = self.flat.slots[item.key]
            ends.setdefault(item.root, [slot.start, slot.stop])[1] = slot.stop
        self._common = ends.pop(None, [0, 0])[1]
        self._segments = [Segment(rank, *ends[rank]) for rank in ends if rank is not None]
        self._arrivals: list[Arrival] = []
        self._scratch: dict[int, Tensor] = {}

    @property
    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self.flat.items)

    def launch(self) -> None:
        """Send it off."""
        self.flat.packed.clear()
        self._arrivals = []
        if self._common:
            common = self.flat.tensor[: self._common]
            self._arrivals.append(self.collectives.all_reduce(self.phase, common))
        if self._segments:
            arrival = self.collectives.reduce(
                self.phase, self.flat.tensor, self._segments, self._scratch, self._rings
            )
            self._arrivals.append(arrival)

    @property
    def done(self) -> bool:
        """Whether the sums are there; buckets that go by rings tell it."""
        return all(arrival.done for arrival in self._arrivals)

    def wait(self) -> None:
        """Return when the sums are there."""
        for arrival in self._arrivals:
            arrival.wait()

    def sums(self) -> dict[str, Tensor]:
        """The sums that belong to this rank."""
        mine = (None, self.collectives.rank)
        keys = [key for key, item in self.flat.items.items() if item.root in mine]
        return {key: self.flat.copy(key) for key in keys}


class Reduction:
    """One round of statistics. Buckets leave in their order, each as soon as it is full.

    What has left is a copy: if more is observed afterwards, the round is repeated (:meth:`restart`).
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._where = {key: n for n, bucket in enumerate(self.buckets) for key in bucket.keys}
        self._next = 0

    def bucket_of(self, key: str) -> int:
        """Number of the bucket that a tensor travels in."""
        return self._where[key]

    def restart(self) -> None:
        """Begin again, after the messages under way have arrived."""
        for bucket in self.buckets[: self._next]:
            bucket.wait()
        self._next = 0

    def has_left(self, key: str) -> bool:
        """Whether a tensor is on its way."""
        return self._where[key] < self._next

    def offer(self, key: str, tensor: Tensor | None) -> None:
        """Put a tensor into its bucket and send off what is full and next in order."""
        assert not self.has_left(key)
        self.buckets[self._where[key]].flat.put(key, tensor)
        while self._next < len(self.buckets) and self.buckets[self._next].flat.full:
            self._launch_next()

    def complete(self, content: Callable[[str], Tensor | None]) -> None:
        """Send off whatever has not left."""
        for bucket in self.buckets[self._next :]:
            for key in bucket.keys:
                bucket.flat.put(key, content(key))
            self._launch_next()

    def _launch_next(self) -> None:
        self.buckets[self._next].launch()
        self._next += 1

    def arrivals(self) -> Iterator[Mapping[str, Tensor]]:
        """The sums that belong to this rank, bucket by bucket, as they arrive."""
        for bucket in self.buckets:
            bucket.wait()
            yield bucket.sums()


def make_buckets(
    groups: Sequence[Sequence[Item]], collectives: Collectives, wire: torch.dtype | None
) -> list[Bucket]:
    """One bucket for each group, or several if its tensors differ in precision or device."""
    return [Bucket(items, collectives, wire) for group in groups for items in alike(group)]
