"""Handwritten digits of 8 x 8 pixels, which come with the package.

The file holds the 1797 test images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0),
shuffled; zlib packs first all labels, then all pixels, with values from 0 to 16.
"""

from __future__ import annotations

import zlib
from importlib import resources

import torch

from kronfac.train.data.source import ImageArrays, ImagePart

FILE = "digits.zlib"
NUM, NUM_TEST = 1797, 500


def read() -> ImageArrays:
    """The digits: 1297 for training and 500 for tests."""
    packed = resources.files("kronfac.train.data").joinpath(FILE).read_bytes()
    content = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)
    whole = ImagePart(content[NUM:].view(NUM, 1, 8, 8), content[:NUM].long())
    return ImageArrays(
        "digits",
        whole.select(torch.arange(NUM_TEST, NUM)),
        whole.select(torch.arange(NUM_TEST)),
        num_classes=10,
        mean=(0.3059,),
        std=(0.3764,),
        peak=16,
    )
