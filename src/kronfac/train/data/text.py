"""Plain text as bytes, for a language model that predicts the next byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kronfac.train.data.source import Batch
from kronfac.train.data.subset import check_size
from kronfac.train.errors import UserError

DEFAULT_SIZE = 4_000_000


class Text:
    """Windows of ``length`` bytes; the target of each byte is the byte after it.

    The last tenth of the text is the test part. ``train`` and ``test`` keep only the first so many
    windows of a part.
    """

    name = "text"
    kind: Literal["image", "text"] = "text"
    num_classes = 256

    def __init__(
        self, content: bytes, length: int, train: int | None = None, test: int | None = None
    ) -> None:
        if not isinstance(length, int) or length < 1:
            raise UserError(f"data.length = {length!r} is not a number of bytes; give 1 or more")
        boundary = len(content) - len(content) // 10
        self.sample_shape: tuple[int, ...] = (length,)
        self._train = _as_tensor(content[:boundary], length)
        self._test = _as_tensor(content[boundary:], length)
        self.num_train = _num_windows(self._train, length, "train", train)
        self.num_test = _num_windows(self._test, length, "test", test)

    def train_batch(self, indices: Tensor) -> Batch:
        """Tokens [N, S] of training windows and the tokens that follow."""
        return self._windows(self._train, indices)

    def test_batch(self, indices: Tensor) -> Batch:
        """Tokens [N, S] of test windows and the tokens that follow."""
        return self._windows(self._test, indices)

    def _windows(self, part: Tensor, indices: Tensor) -> Batch:
        length = self.sample_shape[0]
        places = (indices * length)[:, None] + torch.arange(length + 1)
        tokens = part[places].long()
        return tokens[:, :-1], tokens[:, 1:]


def read(
    path: Path | None = None,
    length: int = 128,
    size: int = DEFAULT_SIZE,
    train: int | None = None,
    test: int | None = None,
) -> Text:
    """At most ``size`` bytes of a file, of a folder's files, or of Python's own standard library."""
    if not isinstance(size, int) or size < 1:
        raise UserError(f"data.size = {size!r} is not a number of bytes; give 1 or more")
    content = bytearray()
    for file in _files(path):
        try:
            content += file.read_bytes()
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror})") from error
        if len(content) >= size:
            break
    return Text(bytes(content[:size]), length, train, test)


def _files(path: Path | None) -> Iterator[Path]:
    """Files in a fixed order; of the standard library the modules without their tests."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        # Names with "_sysconfigdata" hold the settings of one machine's build.
        yield from sorted(library.glob("[!_]*.py"))
        for folder in ("asyncio", "email", "json", "logging", "unittest", "xml"):
            yield from sorted((library / folder).rglob("*.py"))
    elif path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file())
    elif path.is_file():
        yield path
    else:
        raise UserError(f"data.path = {str(path)!r} is neither a file nor a folder of text")


def _as_tensor(content: bytes, length: int) -> Tensor:
    if len(content) <= length:
        raise UserError(
            f"the text is too short: a part of {len(content)} bytes (the test part is a tenth of "
            f"all) holds no window of {length} bytes; give more text or a smaller data.length"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _num_windows(part: Tensor, length: int, what: str, wanted: int | None) -> int:
    available = (len(part) - 1) // length
    if wanted is None:
        return available
    check_size(what, wanted, available)
    return wanted
