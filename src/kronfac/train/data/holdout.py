"""Training samples kept apart for choosing settings, so that the test set stays unseen."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kronfac.train.data.source import Batch, Source
from kronfac.train.errors import UserError


class HeldOut:
    """A source whose test part is the last ``count`` samples of its training part."""

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

    def train_batch(self, indices: Tensor) -> Batch:
        """Training samples that are not kept apart."""
        return self.source.train_batch(indices)

    def test_batch(self, indices: Tensor) -> Batch:
        """Samples that are kept apart."""
        return self.source.train_batch(indices + self.num_train)
