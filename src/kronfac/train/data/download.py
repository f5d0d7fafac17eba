"""Fetching the files of a data set from the pages that publish them."""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kronfac.runs.errors import UserError
from kronfac.train.data.files import FileSet, stored, unpacked

_TIMEOUT = 30.0  # seconds without an answer
_ADVICE = "try again later"
_NETWORK = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def download(files: FileSet, data_dir: Path) -> Path:
    """Put the files into their folder below ``data_dir`` and return it; never overwrite."""
    folder = data_dir / files.folders[0]
    problem = ""
    for url in files.urls:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (_each_file if url.endswith("/") else _archive)(files, url, folder)
            return folder
        except _NETWORK as error:
            problem = f"{url} does not answer ({getattr(error, 'reason', error)})"
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror or error})") from error
    missing = [name for name in files.sums if stored(folder, name) is None]
    raise UserError(
        f"{files.title} is not in {data_dir} and {problem}; "
        f"put {', '.join(missing)} (or the same names with .gz) into {folder}"
    )


def _each_file(files: FileSet, url: str, folder: Path) -> None:
    for name in files.sums:
        if stored(folder, name) is not None:
            continue
        with _temporary(folder, ".gz") as path:
            page = f"{url}{name}.gz"
            _copy(page, path)
            files.check(page, name, unpacked(path, page, _ADVICE), _ADVICE)
            _keep(path, folder / f"{name}.gz")


def _archive(files: FileSet, url: str, folder: Path) -> None:
    with _temporary(folder, ".tar.gz") as packed:
        _copy(url, packed)
        try:
            _unpack(files, url, packed, folder)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
            raise UserError(f"{url} sent a damaged archive ({error}); {_ADVICE}") from error


def _unpack(files: FileSet, url: str, packed: Path, folder: Path) -> None:
    with tarfile.open(packed) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        for name in files.sums:
            opened = archive.extractfile(members[name]) if name in members else None
            if opened is None:
                raise UserError(
                    f"the archive {url} does not hold {name}, which {files.title} wants"
                )
            content = opened.read()
            files.check(f"{name} in {url}", name, content, _ADVICE)
            with _temporary(folder, ".part") as path:
                path.write_bytes(content)
                _keep(path, folder / name)


def _copy(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, path.open("wb") as file:
        shutil.copyfileobj(answer, file)


@contextmanager
def _temporary(folder: Path, suffix: str) -> Iterator[Path]:
    """A file of our own in the folder, gone afterwards unless it was renamed."""
    handle, name = tempfile.mkstemp(suffix=suffix, prefix=".fetch-", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _keep(path: Path, target: Path) -> None:
    """Give the file its name in one step; another process may have been faster."""
    if not target.exists():
        path.chmod(0o644)
        path.rename(target)
