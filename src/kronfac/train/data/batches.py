"""Which samples a rank sees, in what order, and augmented how."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Sizes, Timetable, sizes_of
from kronfac.train.data.augment import Augmentation, Crop, augmentation
from kronfac.train.data.prefetch import prefetch
from kronfac.train.data.source import Batch, Drawn, RandomDecoding, Source

_ORDER, _AUGMENT = 0, 1  # two streams of random numbers


class Batches:
    """The batches of a run as a pure function of seed and step: resuming is exact.

    :attr:`timetable` says which samples of an epoch's order a step takes.

    Args:
        source: the data set.
        batch: samples of one step, of all ranks together, or pairs of an epoch and a size.
        seed: of the order and of the augmentation.
        rank: takes the rank-th of ``world`` equal slices of each batch.
        world: number of ranks.
        augment: what happens to training inputs, in this order; names as in recipes are fine.
        device: where batches are wanted.
    """

    def __init__(
        self,
        source: Source,
        batch: int | Sizes,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        augment: Sequence[Augmentation | str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        for _, size in sizes_of(batch):
            _check(source, size, rank, world)
        self.source = source
        self.seed = seed
        self.rank = rank
        self.world = world
        self.augment = [augmentation(a) if isinstance(a, str) else a for a in augment]
        for one in self.augment:
            if isinstance(one, Crop):
                one.check(source.sample_shape)
        self.device = torch.device(device)
        self.timetable = Timetable(source.num_train, batch)
        self._order: tuple[int, Tensor] | None = None

    def get(self, step: int) -> Batch:
        """This rank's part of the batch of global step ``step``."""
        place = self.timetable.place(step)
        indices = self._epoch_order(place.epoch)[place.first : place.first + place.batch]
        share = place.batch // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        generator = seeded(self.seed, _AUGMENT, step)
        inputs, targets = self._decode(indices, mine, generator)
        for change in self.augment:
            drawn = change.draw(len(indices), self.source.sample_shape, generator)
            inputs = change.apply(inputs, _slice(drawn, mine))
        return self._move(inputs, targets)

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """``get(step)`` for each step from ``start`` to ``stop - 1``, made ahead in a thread."""
        return prefetch(self.get, range(start, stop))

    def test(self, batch: int) -> Iterator[Batch]:
        """This rank's share of the test part, ``batch`` samples at a time."""
        first, last = (self.source.num_test * r // self.world for r in (self.rank, self.rank + 1))
        parts = torch.arange(first, last).split(batch) if first < last else ()
        return prefetch(self._test_batch, parts)

    def _test_batch(self, indices: Tensor) -> Batch:
        return self._move(*self.source.test_batch(indices))

    def _decode(self, indices: Tensor, mine: slice, generator: torch.Generator) -> Batch:
        if isinstance(self.source, RandomDecoding):
            drawn = self.source.draw(len(indices), generator)
            return self.source.random_batch(indices[mine], _slice(drawn, mine))
        return self.source.train_batch(indices[mine])

    def _epoch_order(self, epoch: int) -> Tensor:
        known = self._order
        if known is None or known[0] != epoch:
            generator = seeded(self.seed, _ORDER, epoch)
            known = epoch, torch.randperm(self.source.num_train, generator=generator)
            self._order = known
        return known[1]

    def _move(self, inputs: Tensor, targets: Tensor) -> Batch:
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        to = self.device
        return inputs.to(to, non_blocking=True), targets.to(to, non_blocking=True)


def seeded(seed: int, stream: int, number: int) -> torch.Generator:
    """A generator of its own for each step or epoch of each stream."""
    # Torch seeds its generator by 32 bits only: neighbours must differ in all of them.
    digest = hashlib.sha256(f"{seed} {stream} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def _slice(drawn: Drawn, mine: slice) -> Drawn:
    return {name: values[mine] for name, values in drawn.items()}


def _check(source: Source, batch: int, rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UserError(f"rank {rank} is not one of {world} ranks")
    if not 1 <= batch <= source.num_train:
        raise UserError(
            f"train.batch = {batch} does not fit: {source.name} has {source.num_train} training "
            f"samples; give a batch from 1 to that"
        )
    if batch % world:
        raise UserError(
            f"train.batch = {batch} cannot be shared by {world} ranks; give a multiple of {world}"
        )
