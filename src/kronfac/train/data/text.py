"""Plain text as bytes, for a language model that predicts the next byte."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kronfac.runs.errors import UserError
from kronfac.train.data.source import Batch
from kronfac.train.data.subset import check_size, is_count

DEFAULT_SIZE = 4_000_000
DEFAULT_LENGTH = 128
#: Neighbouring windows that stay in one part.
_RUN = 64
_SEED = 20151219  # any fixed number: parts must be the same in every run


class Text:
    """Windows of ``length`` bytes; the target of each byte is the byte after it.

    Every tenth run of neighbouring windows is for testing, so that both parts hold the same kinds of
    text. ``train`` and ``test`` keep only so many windows of a part, the first of a fixed shuffle.
    """

    name = "text"
    kind: Literal["image", "text"] = "text"
    num_classes = 256

    def __init__(
        self, content: bytes, length: int, train: int | None = None, test: int | None = None
    ) -> None:
        check_length(length)
        count = max(0, len(content) - 1) // length
        if count < 10:
            raise UserError(
                f"the text is too short: {len(content)} bytes hold {count} windows of {length} "
                "bytes, and 10 are needed; give more text or a smaller data.length"
            )
        self.sample_shape: tuple[int, ...] = (length,)
        #: Of the text: another machine, or another Python, may have another one.
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._content = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        tested = torch.arange(count) // min(_RUN, count // 10) % 10 == 9
        self._train = _shuffled("train", (~tested).nonzero()[:, 0], train)
        self._test = _shuffled("test", tested.nonzero()[:, 0], test)
        self.num_train, self.num_test = len(self._train), len(self._test)

    def train_batch(self, indices: Tensor) -> Batch:
        """Tokens [N, S] of training windows and the tokens that follow."""
        return self._windows(self._train[indices])

    def test_batch(self, indices: Tensor) -> Batch:
        """Tokens [N, S] of test windows and the tokens that follow."""
        return self._windows(self._test[indices])

    def _windows(self, numbers: Tensor) -> Batch:
        length = self.sample_shape[0]
        places = (numbers * length)[:, None] + torch.arange(length + 1)
        tokens = self._content[places].long()
        return tokens[:, :-1], tokens[:, 1:]


def check_length(length: int) -> None:
    """Raise unless a window can have so many bytes."""
    if not is_count(length):
        raise UserError(f"data.length = {length!r} is not a number of bytes; give 1 or more")


def read(
    path: Path | None = None,
    length: int = DEFAULT_LENGTH,
    size: int = DEFAULT_SIZE,
    train: int | None = None,
    test: int | None = None,
) -> Text:
    """At most ``size`` bytes of a file, of a folder's files, or of Python's own standard library."""
    if not is_count(size):
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


def _shuffled(what: str, numbers: Tensor, wanted: int | None) -> Tensor:
    """Windows in a fixed random order, only the first ``wanted`` of them."""
    generator = torch.Generator().manual_seed(_SEED)
    order = numbers[torch.randperm(len(numbers), generator=generator)]
    if wanted is None:
        return order
    check_size(what, wanted, len(order))
    return order[:wanted]
