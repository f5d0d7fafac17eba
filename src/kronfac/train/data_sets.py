"""The data sets that there are, for ``kronfac data``."""

from __future__ import annotations

from pathlib import Path

from kronfac.runs.errors import UserError
from kronfac.runs.hints import nearest
from kronfac.train import data

_ABOUT = {
    "digits": "8 x 8 handwritten digits, part of kronfac",
    "fashion-mnist": "28 x 28 pictures of clothes, 60,000 + 10,000",
    "mnist": "28 x 28 handwritten digits, 60,000 + 10,000",
    "cifar10": "32 x 32 colour photographs, 50,000 + 10,000",
    "image-folder": "your own pictures, a folder for each class (data.path)",
    "text": "byte by byte (data.path); by default Python's own library",
}


def overview(data_dir: Path | None) -> list[str]:
    """One line for each data set."""
    width = max(len(name) for name in data.NAMES)
    lines = [f"{name:{width}}  {_ABOUT.get(name, '')}" for name in data.NAMES]
    return [*lines, f"`kronfac data NAME` fetches one into {data.data_directory(data_dir)}"]


def fetch(name: str, data_dir: Path | None) -> Path:
    """Download a data set if it is missing; returns its folder."""
    if name not in data.NAMES and (near := nearest(name, data.NAMES)):
        raise UserError(f"unknown data set {name!r}; did you mean {near!r}?")
    return data.fetch(name, data_dir)
