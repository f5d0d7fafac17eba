"""Which folders are runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kronfac.report.read.read import Run, read_run
from kronfac.runs.errors import UserError

EVENTS = "events.jsonl"


def load(paths: Sequence[Path]) -> tuple[list[Run], list[Path]]:
    """Read all runs at or below the given paths, each once.

    Returns the runs, and folders of runs that were prepared and left no event. Such a folder is
    an error when it is all there is.
    """
    if not paths:
        raise UserError("No run to report on; name at least one run folder, such as runs/NAME.")
    folders = list(dict.fromkeys(folder for path in paths for folder in _folders(Path(path))))
    runs = [(folder, read_run(folder)) for folder in folders]
    found = [run for _, run in runs if run is not None]
    empty = [folder for folder, run in runs if run is None]
    if not found:
        named = ", ".join(str(path) for path in paths)
        raise UserError(
            f"{named} has no events; a report needs a run that has started and written {EVENTS}."
        )
    return found, empty


def _folders(path: Path) -> list[Path]:
    if path.name == EVENTS and path.is_file():
        path = path.parent
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; a run is a folder that holds {EVENTS}.")
    # A folder with both of the others is a run that was prepared and never began.
    prepared = {mark.parent for mark in path.rglob("environment.json")}
    prepared = {folder for folder in prepared if (folder / "config.json").is_file()}
    begun = {mark.parent for mark in path.rglob(EVENTS)}
    folders = sorted(folder.resolve() for folder in begun | prepared)
    if not folders:
        raise UserError(
            f"{path} is no run: neither it nor a folder in it holds {EVENTS}; "
            "name a folder that `kronfac train` or `kronfac compare` has written."
        )
    return folders
