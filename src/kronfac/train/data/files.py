"""Files of a published data set: where they may lie, and that they are what they should be."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kronfac.runs.errors import UserError

_ADVICE = "move it away and fetch it again"


@dataclass(frozen=True)
class FileSet:
    """The files of one data set.

    Attributes:
        title: its name in sentences.
        sums: sha256 of each file's content; a file ``NAME.gz`` is as good as ``NAME``.
        folders: where to look, relative to the data directory (or absolute); a download goes to the
            first of them. ``"."`` is the data directory itself.
        urls: pages to download from, in order of preference: an archive with all files, or a folder
            (ending in ``/``) with ``NAME.gz``.
    """

    title: str
    sums: Mapping[str, str]
    folders: tuple[str, ...]
    urls: tuple[str, ...]

    def find(self, data_dir: Path) -> Path | None:
        """The first folder that holds all the files."""
        for folder in self.folders:
            place = data_dir / folder
            if all(stored(place, name) for name in self.sums) and (
                folder != "." or self._is_this(place)
            ):
                return place
        return None

    def read(self, folder: Path, name: str) -> bytes:
        """The checked content of a file."""
        path = stored(folder, name)
        if path is None:
            raise UserError(f"{self.title} wants the file {folder / name}, which is not there")
        content = unpacked(path)
        self.check(path, name, content)
        return content

    def check(self, where: Path | str, name: str, content: bytes, advice: str = _ADVICE) -> None:
        """Refuse a file with another checksum than the published one."""
        found = hashlib.sha256(content).hexdigest()
        if found != self.sums[name]:
            raise UserError(
                f"{where} is damaged or another file: its content should have sha256 "
                f"{self.sums[name]} but has {found}; {advice}"
            )

    def _is_this(self, folder: Path) -> bool:
        # Several sets use the same file names; the smallest file tells them apart.
        paths = {name: stored(folder, name) for name in self.sums}
        found = {name: path for name, path in paths.items() if path is not None}
        name = min(found, key=lambda name: found[name].stat().st_size)
        return hashlib.sha256(unpacked(found[name])).hexdigest() == self.sums[name]


def stored(folder: Path, name: str) -> Path | None:
    """The file in this folder, packed or not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def unpacked(path: Path, where: str | None = None, advice: str = _ADVICE) -> bytes:
    """The content of a file that may be packed by gzip; ``where`` names it in sentences."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{where or path} is damaged ({error}); {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error


def data_directory(data_dir: Path | None = None) -> Path:
    """Where data sets are kept: ``data_dir``, else ``$KRONFAC_DATA``, else the user's cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if chosen := os.environ.get("KRONFAC_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kronfac"
