"""What a data set is to the rest of the program, and data sets that fit into memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Drawn = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


class Source(Protocol):
    """A data set with a training and a test part; samples are asked for by number.

    ``sample_shape`` is [C, H, W] of an image or [S] of a text. Inputs are normalised floats or int64
    tokens; targets are int64, [N] for images and [N, S] for texts.
    """

    @property
    def name(self) -> str:
        """The name under which :func:`kronfac.train.data.load` knows it."""

    @property
    def kind(self) -> Literal["image", "text"]:
        """What the samples are."""

    @property
    def num_train(self) -> int:
        """Samples in the training part."""

    @property
    def num_test(self) -> int:
        """Samples in the test part."""

    @property
    def num_classes(self) -> int:
        """Values that a target can have."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    def train_batch(self, indices: Tensor) -> Batch:
        """Inputs and targets of these training samples, without augmentation."""

    def test_batch(self, indices: Tensor) -> Batch:
        """Inputs and targets of these test samples."""


@runtime_checkable
class RandomDecoding(Protocol):
    """A source that augments while it decodes, from random numbers that it is given."""

    def draw(self, num: int, generator: torch.Generator) -> Drawn:
        """Random numbers for ``num`` samples; the first dimension is the sample."""

    def random_batch(self, indices: Tensor, drawn: Drawn) -> Batch:
        """Like ``train_batch``, with the random choices ``drawn``."""


@dataclass(frozen=True)
class ImagePart:
    """Images of one part as bytes: ``images`` uint8 [N, C, H, W], ``labels`` int64 [N]."""

    images: Tensor
    labels: Tensor

    def select(self, indices: Tensor) -> ImagePart:
        """The part that consists of these samples, in this order."""
        return ImagePart(self.images.index_select(0, indices), self.labels[indices])


class ImageArrays:
    """Images in memory, one byte per value; normalised when a batch is asked for.

    Args:
        name: of the data set.
        train: the training part.
        test: the test part.
        num_classes: number of labels.
        mean: of each channel, in units of the largest value.
        std: of each channel, in the same units.
        peak: the largest value of a byte.
    """

    kind: Literal["image", "text"] = "image"

    def __init__(
        self,
        name: str,
        train: ImagePart,
        test: ImagePart,
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        peak: int = 255,
    ) -> None:
        self.name = name
        self.num_classes = num_classes
        self.train = train
        self.test = test
        self.num_train = len(train.labels)
        self.num_test = len(test.labels)
        self.sample_shape: tuple[int, ...] = tuple(train.images.shape[1:])
        # (byte / peak - mean) / std as one product and one sum.
        self._scale = (1 / (peak * torch.tensor(std))).view(-1, 1, 1)
        self._shift = (-torch.tensor(mean) / torch.tensor(std)).view(-1, 1, 1)

    def train_batch(self, indices: Tensor) -> Batch:
        """Normalised training images and their labels."""
        return self._batch(self.train, indices)

    def test_batch(self, indices: Tensor) -> Batch:
        """Normalised test images and their labels."""
        return self._batch(self.test, indices)

    def _batch(self, part: ImagePart, indices: Tensor) -> Batch:
        # index_select copies whole images; plain indexing is 30 times slower on bytes.
        images = part.images.index_select(0, indices).float()
        return images.mul_(self._scale).add_(self._shift), part.labels[indices]

    def reduced(self, train: Tensor | None, test: Tensor | None) -> ImageArrays:
        """The data set of these samples only; ``None`` keeps a part as it is."""
        small = copy.copy(self)
        if train is not None:
            small.train, small.num_train = self.train.select(train), len(train)
        if test is not None:
            small.test, small.num_test = self.test.select(test), len(test)
        return small
