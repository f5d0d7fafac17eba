"""What a sample of a data set looks like, known without opening any file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kronfac.train.data import image_folder, text

#: Classes of an image folder that is not there: those of ImageNet.
USUAL_CLASSES = 1000


@dataclass(frozen=True)
class Form:
    """All that a model depends on; ``note`` says what was taken for granted, if anything."""

    kind: Literal["image", "text"]
    num_classes: int
    sample_shape: tuple[int, ...]
    note: str = ""


PUBLISHED = {
    "digits": Form("image", 10, (1, 8, 8)),
    "fashion-mnist": Form("image", 10, (1, 28, 28)),
    "mnist": Form("image", 10, (1, 28, 28)),
    "cifar10": Form("image", 10, (3, 32, 32)),
}


def of_text(length: int = text.DEFAULT_LENGTH) -> Form:
    """The form of texts of so many bytes."""
    text.check_length(length)
    return Form("text", text.Text.num_classes, (length,))


def of_image_folder(path: Path, size: int = image_folder.DEFAULT_SIZE) -> Form:
    """The form of images of so many pixels; classes are counted if the folder is there."""
    image_folder.check_size(size)
    train = path / "train"
    found = sum(folder.is_dir() for folder in train.iterdir()) if train.is_dir() else 0
    note = "" if found else f"{train} is not there: {USUAL_CLASSES} classes are assumed."
    return Form("image", found or USUAL_CLASSES, (3, size, size), note)
