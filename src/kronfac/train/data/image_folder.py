"""Images in folders, one folder per class, as ImageNet is usually kept.

``path`` holds ``train/CLASS/*.jpeg`` and ``val/CLASS/*.jpeg`` (or ``test``). Images are decoded when a
batch is asked for, by a few threads (Pillow releases the interpreter while it works).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kronfac.runs.errors import UserError
from kronfac.train.data.crop_box import TRIES, Box, Tries, centre_box, random_box
from kronfac.train.data.source import Batch, Drawn
from kronfac.train.data.subset import is_count, subset

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp"}
#: Pixels of a side.
DEFAULT_SIZE = 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class FolderPart:
    """Files of one part and their labels, int64 [N]."""

    files: list[Path]
    labels: Tensor

    def select(self, indices: Tensor | None) -> FolderPart:
        """The part that consists of these samples; ``None`` means all."""
        if indices is None:
            return self
        return FolderPart([self.files[i] for i in indices.tolist()], self.labels[indices])


class ImageFolder:
    """Images of ``size`` x ``size`` pixels from folders.

    Training images are crops of random area and shape (``crop="random"``) or from the centre; test
    images always are from the centre, after the shorter side was brought to 8/7 of ``size``.
    """

    name = "image-folder"
    kind: Literal["image", "text"] = "image"
    #: Samples lie class by class.
    by_class = True

    def __init__(
        self,
        train: FolderPart,
        test: FolderPart,
        classes: list[str],
        *,
        size: int,
        crop: str,
        workers: int,
    ) -> None:
        self.train, self.test, self.classes = train, test, classes
        self.num_train, self.num_test = len(train.files), len(test.files)
        self.num_classes = len(classes)
        self.sample_shape: tuple[int, ...] = (3, size, size)
        self.size = size
        self.crop = crop
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kronfac-decode")
        self._scale = (1 / (255 * torch.tensor(_STD))).view(-1, 1, 1)
        self._shift = (-torch.tensor(_MEAN) / torch.tensor(_STD)).view(-1, 1, 1)

    def train_batch(self, indices: Tensor) -> Batch:
        """Training images, cropped at the centre, and labels."""
        return self._batch(self.train, indices, [None] * len(indices))

    def test_batch(self, indices: Tensor) -> Batch:
        """Test images, cropped at the centre, and labels."""
        return self._batch(self.test, indices, [None] * len(indices))

    def draw(self, num: int, generator: torch.Generator) -> Drawn:
        """``box``: float64 [N, 10, 4], uniform numbers for ten tries of a crop."""
        return {"box": torch.rand(num, TRIES, 4, generator=generator, dtype=torch.float64)}

    def random_batch(self, indices: Tensor, drawn: Drawn) -> Batch:
        """Training images, cropped at random if this source does that, and labels."""
        boxes: list[Tries | None] = [None] * len(indices)
        if self.crop == "random":
            boxes = drawn["box"].tolist()
        return self._batch(self.train, indices, boxes)

    def _batch(self, part: FolderPart, indices: Tensor, boxes: list[Tries | None]) -> Batch:
        files = [part.files[i] for i in indices.tolist()]
        images = torch.stack(list(self._pool.map(self._decode, files, boxes)))
        floats = images.permute(0, 3, 1, 2).float().contiguous()
        return floats.mul_(self._scale).add_(self._shift), part.labels[indices]

    def _decode(self, file: Path, tries: Tries | None) -> Tensor:
        """One image as uint8 [H, W, C]."""
        from PIL import Image

        try:
            with Image.open(file) as image:
                box = centre_box(*image.size) if tries is None else random_box(*image.size, tries)
                pixels = _resized(image, box, self.size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{file} cannot be decoded as an image ({error})") from error
        flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        return flat.view(self.size, self.size, 3)


def _resized(image: Image, box: Box, size: int) -> bytes:
    """The bytes of a part of an image as RGB, brought to size x size pixels."""
    from PIL import Image

    width, height = image.size
    if image.format == "JPEG":  # decode at a half, quarter or eighth where that is fine enough
        scale = min(box[2] - box[0], box[3] - box[1]) / size
        image.draft("RGB", (math.ceil(width / scale), math.ceil(height / scale)))
    shrink_x, shrink_y = image.width / width, image.height / height
    box = (box[0] * shrink_x, box[1] * shrink_y, box[2] * shrink_x, box[3] * shrink_y)
    small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
    return small.tobytes()


def read(
    path: Path,
    size: int = DEFAULT_SIZE,
    crop: str = "random",
    workers: int | None = None,
    train: int | None = None,
    test: int | None = None,
) -> ImageFolder:
    """Find the images below ``path``; ``workers`` threads decode them (default: cores, up to 8)."""
    _check(size, crop, workers)
    train_folder = _first_folder(path, ("train",))
    test_folder = _first_folder(path, ("val", "test"))
    found = _scan(train_folder), _scan(test_folder)
    _check_same_classes(train_folder, found[0], test_folder, found[1])
    parts = _part(found[0]), _part(found[1])
    return ImageFolder(
        parts[0].select(subset("train", parts[0].labels, train)),
        parts[1].select(subset("test", parts[1].labels, test)),
        list(found[0]),
        size=size,
        crop=crop,
        workers=workers or min(8, os.cpu_count() or 1),
    )


def _scan(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, both in the order of their names; a folder without any is no class."""
    found: dict[str, list[Path]] = {}
    for place in sorted(place for place in folder.iterdir() if place.is_dir()):
        images = sorted(file for file in place.rglob("*") if file.suffix.lower() in SUFFIXES)
        if images:
            found[place.name] = images
    if not found:
        raise UserError(f"{folder} holds no images in folders of classes ({folder}/CLASS/*.jpeg)")
    return found


def _check_same_classes(
    train: Path, in_train: Mapping[str, Any], test: Path, in_test: Mapping[str, Any]
) -> None:
    """Refuse classes that could not be learned, or not be tested."""
    for here, other, more, fewer in (
        (train, test, in_train, in_test),
        (test, train, in_test, in_train),
    ):
        if missing := [name for name in more if name not in fewer]:
            first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise UserError(
                f"{other} holds no images of {len(missing)} of the classes in {here}: {first}; both "
                "folders must hold the same classes"
            )


def _part(found: Mapping[str, list[Path]]) -> FolderPart:
    counts = torch.tensor([len(files) for files in found.values()])
    labels = torch.arange(len(found)).repeat_interleave(counts)
    return FolderPart([file for files in found.values() for file in files], labels)


def _first_folder(root: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise UserError(
        f"{root} holds no folder {' or '.join(names)} with a folder per class in it; "
        "set data.path to the folder that holds train and val"
    )


def check_size(size: int) -> None:
    """Raise unless images can have so many pixels on each side."""
    if not is_count(size):
        raise UserError(f"data.size = {size!r} is not a number of pixels; give 1 or more")


def _check(size: int, crop: str, workers: int | None) -> None:
    check_size(size)
    if crop not in ("random", "center"):
        raise UserError(f"data.crop = {crop!r} is unknown; there are 'random' and 'center'")
    if workers is not None and not is_count(workers):
        raise UserError(f"data.workers = {workers!r} is not a number of threads; give 1 or more")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError(
            "image-folder decodes images by Pillow, which is not installed; "
            "run: pip install 'kronfac[train]'"
        ) from error
