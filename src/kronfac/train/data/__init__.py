"""Data sets by name, and the batches that a run takes from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kronfac.runs.errors import UserError
from kronfac.train.data import cifar, digits, download, forms, idx, image_folder, text
from kronfac.train.data.augment import Augmentation, Crop, Flip, augmentation
from kronfac.train.data.batches import Batches
from kronfac.train.data.files import FileSet, data_directory
from kronfac.train.data.forms import Form
from kronfac.train.data.holdout import HeldOut, hold_out
from kronfac.train.data.source import ImageArrays, Source
from kronfac.train.data.subset import subset

__all__ = [
    "NAMES",
    "Augmentation",
    "Batches",
    "Crop",
    "Flip",
    "Form",
    "HeldOut",
    "Source",
    "augmentation",
    "data_directory",
    "fetch",
    "form",
    "hold_out",
    "load",
]

_PUBLISHED: dict[str, tuple[FileSet, Callable[[Path], ImageArrays]]] = {
    "fashion-mnist": (idx.FILES["fashion-mnist"], lambda folder: idx.read("fashion-mnist", folder)),
    "mnist": (idx.FILES["mnist"], lambda folder: idx.read("mnist", folder)),
    "cifar10": (cifar.FILES, cifar.read),
}
_GIVEN: dict[str, Callable[..., Source]] = {
    "image-folder": image_folder.read,
    "text": text.read,
}
NAMES = ("digits", *_PUBLISHED, *_GIVEN)


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    train: int | None = None,
    test: int | None = None,
    **options: Any,
) -> Source:
    """The data set ``name``, downloaded first if it is not in the data directory.

    Args:
        name: one of :data:`NAMES`.
        data_dir: by default ``$KRONFAC_DATA``, else ``kronfac`` in the user's cache directory.
        train: use only so many training samples: the first of a fixed shuffle, classes alike.
        test: the same of the test part.
        options: of ``"image-folder"`` (path, by default the data directory; size, crop, workers) and
            ``"text"`` (path, by default Python's own library; length, size). A path is looked for
            here and then in the data directory.
    """
    _check(name, options)
    if name in _GIVEN:
        return _GIVEN[name](**_with_path(name, options, data_dir), train=train, test=test)
    source = digits.read() if name == "digits" else _PUBLISHED[name][1](_locate(name, data_dir))
    return source.reduced(
        subset("train", source.train.labels, train), subset("test", source.test.labels, test)
    )


def form(name: str, data_dir: Path | None = None, **options: Any) -> Form:
    """What the samples of ``load(name, data_dir, **options)`` look like; no file is opened."""
    _check(name, options)
    if name == "text":
        return forms.of_text(**_only(options, "length"))
    if name == "image-folder":
        return forms.of_image_folder(**_only(_with_path(name, options, data_dir), "path", "size"))
    return forms.PUBLISHED[name]


def fetch(name: str, data_dir: Path | None = None) -> Path:
    """The folder with the files of a published data set, checked; downloads what is not there."""
    _check_name(name)
    if name == "digits":
        return Path(digits.__file__).parent
    if name in _GIVEN:
        raise UserError(f"{name} has nothing to fetch: it reads what data.path names")
    folder = _locate(name, data_dir)
    files = _PUBLISHED[name][0]
    for file in files.sums:
        files.read(folder, file)
    return folder


def _locate(name: str, data_dir: Path | None) -> Path:
    directory = data_directory(data_dir)
    files = _PUBLISHED[name][0]
    return files.find(directory) or download.download(files, directory)


def _with_path(name: str, options: dict[str, Any], data_dir: Path | None) -> dict[str, Any]:
    directory = data_directory(data_dir)
    path = options.get("path", directory if name == "image-folder" else None)
    if path is None:
        return options
    here = Path(str(path)).expanduser()
    return {**options, "path": here if here.exists() else directory / here}


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise UserError(f"unknown data set {name!r}; there are {', '.join(NAMES)}")


def _only(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _check(name: str, options: dict[str, Any]) -> None:
    _check_name(name)
    given = tuple(inspect.signature(_GIVEN[name]).parameters) if name in _GIVEN else ()
    known = given[:-2]  # without train and test, which all have
    for option in options:
        if option not in known:
            has = f"has {', '.join(known)}" if known else "has no options but train and test"
            raise UserError(f"unknown option data.{option}: {name} {has}")
