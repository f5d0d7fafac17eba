"""Training samples kept apart for choosing settings, while the test set stays unseen."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kronfac.runs.errors import UserError
from kronfac.train.data.source import Batch, Drawn, RandomDecoding, Source

_SEED = 20151219  # any fixed number: what is kept apart must be the same in every run


def hold_out(source: Source, count: int) -> HeldOut:
    """Keep ``count`` training samples apart, of a source that may crop at random while it decodes."""
    if isinstance(source, RandomDecoding):
        return RandomHeldOut(source, count)
    return HeldOut(source, count)


class HeldOut:
    """A source whose test part is the last ``count`` samples of its training part.

    Of samples that lie class by class it is the last ones of a fixed shuffle.
    """

    def __init__(self, source: Source, count: int) -> None:
        if not 1 <= count < source.num_train:
            raise UserError(
                f"data.holdout = {count} is not a number of training samples that can be kept apart; "
                f"give one from 1 to {source.num_train - 1}"
            )
        self.source = source
        self.name = source.name
        self.kind: Literal["image", "text"] = source.kind
        self.num_classes = source.num_classes
        self.sample_shape = source.sample_shape
        self.num_train = source.num_train - count
        self.num_test = count
        self.sha256: str | None = getattr(source, "sha256", None)
        self._order: Tensor | None = None
        if getattr(source, "by_class", False):
            generator = torch.Generator().manual_seed(_SEED)
            self._order = torch.randperm(source.num_train, generator=generator)

    def train_batch(self, indices: Tensor) -> Batch:
        """Training samples that are not kept apart."""
        return self.source.train_batch(self._numbers(indices))

    def test_batch(self, indices: Tensor) -> Batch:
        """Samples that are kept apart."""
        return self.source.train_batch(self._numbers(indices + self.num_train))

    def _numbers(self, indices: Tensor) -> Tensor:
        return indices if self._order is None else self._order[indices]


class RandomHeldOut(HeldOut):
    """The same for a source that augments while it decodes, as it still does in training."""

    source: RandomDecoding  # type: ignore[assignment]

    def draw(self, num: int, generator: torch.Generator) -> Drawn:
        """Random numbers of the source."""
        return self.source.draw(num, generator)

    def random_batch(self, indices: Tensor, drawn: Drawn) -> Batch:
        """Training samples that are not kept apart, with the random choices ``drawn``."""
        return self.source.random_batch(self._numbers(indices), drawn)
