"""Write the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kronfac.report.page import pictures
from kronfac.report.page.page import GENERATOR, render
from kronfac.report.read.find import load
from kronfac.report.read.summary import chapters
from kronfac.runs import disk
from kronfac.runs.errors import UserError

_FILE = "report.html"
_WITHOUT = "No pictures were written beside this page, because matplotlib is not installed."


def write(runs: Sequence[Path], out: Path, *, title: str | None = None, png: bool = True) -> Path:
    """Read run folders, or folders of them, and write ``report.html`` and PNGs into ``out``.

    An earlier report is replaced, no other file is.

    Returns:
        Where the page is.

    Raises:
        UserError: a folder is no run or has no events, or ``out`` cannot be written.
    """
    found, empty = load([Path(run) for run in runs])
    parts, out = chapters(found), Path(out)
    remark = _WITHOUT if png and not pictures.available() else ""
    page = render(parts, empty, title, remark).encode("utf-8", errors="replace")
    drawn = pictures.draw(parts) if png else {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = {_FILE: page, **drawn}
        for name in files:
            _refuse_others(out / name)
        for name, content in files.items():
            _put(out / name, content)
    except OSError as error:
        raise UserError(
            f"The report cannot be written to {out}: {error.strerror or error}; "
            "choose another folder with --out."
        ) from error
    return out / _FILE


def _refuse_others(path: Path) -> None:
    """Refuse to replace what this module has not written."""
    if not path.exists():
        return
    mark = GENERATOR.encode()
    if not path.is_file() or mark not in path.read_bytes()[:4096]:
        raise UserError(
            f"{path} exists and is not one of ours; move it away or choose another folder with --out."
        )


def _put(path: Path, content: bytes) -> None:
    disk.replace(path, lambda file: file.write(content))
