"""Data sets of a few samples, in the formats of the real ones."""

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kronfac.train import data
from kronfac.train.data import cifar, idx
from kronfac.train.data.files import FileSet

IDX_FILES = tuple(idx.FILES["mnist"].sums)


def idx_content(array: torch.Tensor) -> bytes:
    header = struct.pack(f">BBBB{array.dim()}I", 0, 0, 8, array.dim(), *array.shape)
    return header + array.numpy().tobytes()


def idx_contents(seed: int) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for num in (40, 20):
        images = torch.randint(256, (num, 28, 28), generator=generator, dtype=torch.uint8)
        parts += [images, (torch.arange(num, dtype=torch.uint8) + seed) % 10]
    return dict(zip(IDX_FILES, map(idx_content, parts), strict=True))


def cifar_contents() -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(0)
    contents = {}
    for name in cifar.FILES.sums:
        records = torch.randint(256, (20, 3073), generator=generator, dtype=torch.uint8)
        records[:, 0] = torch.arange(20) % 10
        contents[name] = records.numpy().tobytes()
    return contents


def publish(monkeypatch: pytest.MonkeyPatch, name: str, contents: dict[str, bytes]) -> FileSet:
    """Pretend that these are the published files, and that no page on the internet has them."""
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    known = idx.FILES.get(name, cifar.FILES)
    folders = tuple(folder for folder in known.folders if not folder.startswith("/"))
    files = replace(known, sums=sums, folders=folders, urls=("file:///nowhere/",))
    if name in idx.FILES:
        monkeypatch.setitem(idx.FILES, name, files)
    else:
        monkeypatch.setattr(cifar, "FILES", files)
    monkeypatch.setitem(data._PUBLISHED, name, (files, data._PUBLISHED[name][1]))
    return files


def write(folder: Path, contents: dict[str, bytes], *, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
