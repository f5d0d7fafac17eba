"""The folder that a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kronfac.runs import disk
from kronfac.runs.errors import UserError
from kronfac.runs.events import Event, read


class RunFolder:
    """``config.json``, ``environment.json``, ``summary.txt``, ``events.jsonl`` and ``checkpoint.pt``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.config = path / "config.json"

    def check_new(self) -> None:
        """Raise if there is something already."""
        if self.path.exists():
            raise UserError(
                f"{self.path} exists already and is left as it is; choose another --out, or "
                "continue it with --resume."
            )

    def create(self, files: Mapping[str, str]) -> None:
        """Make the folder with these files, or none at all; one that is there is never touched."""
        self.check_new()
        with disk.explained(self.path):
            self.path.mkdir(parents=True)
        try:
            for name, text in files.items():
                self._write(name, text)
        except UserError:
            with suppress(OSError):
                for name in files:
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
            raise

    def _write(self, name: str, text: str) -> None:
        disk.replace(self.path / name, lambda file: file.write(text.encode()))

    def read_config(self) -> dict[str, Any]:
        """What the run was started with."""
        try:
            content = json.loads(self.config.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"{self.path} is no run folder: it has no config.json.") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{self.config} cannot be read or is damaged.") from error
        if not _is_config(content):
            raise UserError(f"{self.config} is damaged or no config.json of a run.")
        return dict(content)

    @property
    def status(self) -> str:
        """How the run's last part ended: ``"done"``, ``"stopped"``, ``"failed"``, or nothing yet."""
        last = [one for one in read(self.events) if one["event"] in ("start", "finish")]
        return str(last[-1].get("status", "")) if last and last[-1]["event"] == "finish" else ""

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end, well or badly."""
        return self.status in ("done", "failed")

    def last_saved(self) -> int | None:
        """The step of the last checkpoint that was written, whether or not it is still there."""
        if not self.events.is_file():  # a device could be read without end
            return None
        steps = [one.get("step") for one in read(self.events) if one["event"] == "checkpoint"]
        known = [step for step in steps if isinstance(step, int)]
        return known[-1] if known else None

    def last_start(self) -> Event | None:
        """The event with which the run's last part began."""
        starts = [one for one in read(self.events) if one["event"] == "start"]
        return starts[-1] if starts else None


def as_json(content: Any) -> str:
    """The text of one of the small files."""
    return json.dumps(content, indent=2, default=str) + "\n"


def _is_config(content: Any) -> bool:
    wanted = {"recipe": str, "optimizer": str, "seed": int, "settings": dict, "changes": list}
    if not isinstance(content, dict):
        return False
    if not all(isinstance(content.get(key), kind) for key, kind in wanted.items()):
        return False
    if not isinstance(content.get("file"), str | None) or not _is_comparison(
        content.get("comparison")
    ):
        return False
    return isinstance(content["settings"].get("train"), dict) and _is_kept(
        content.get("resume", {})
    )


def _is_kept(content: Any) -> bool:
    """Whether it is what a resume needs; nothing is enough, because there are folders without it."""
    wanted = {"recipe": dict, "data_dir": str | None, "stop_at_target": bool, "log": list}
    return (
        isinstance(content, dict)
        and all(key in wanted and isinstance(value, wanted[key]) for key, value in content.items())
        and _are_names(content.get("log", []))
    )


def _is_comparison(content: Any) -> bool:
    """Whether it names optimizers and how many seeds there are, or is nothing."""
    if content is None:
        return True
    if not isinstance(content, dict) or not _are_names(content.get("optimizers", [])):
        return False
    seeds = content.get("seeds", 1)
    return isinstance(seeds, int) and not isinstance(seeds, bool)


def _are_names(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(name, str) for name in content)


def run_name(recipe: str, optimizer: str, seed: int) -> str:
    """The usual name of a run folder."""
    return f"{recipe}-{optimizer}-s{seed}"


def free_path(root: Path, name: str) -> Path:
    """``root/name``, or the first of ``name-2``, ``name-3``, ... that does not exist."""
    path, number = root / name, 1
    while path.exists():
        number += 1
        path = root / f"{name}-{number}"
    return path


def last_run(root: Path, name: str) -> Path:
    """The newest folder of this name that has a checkpoint."""
    found = [root / name, *root.glob(f"{name}-[0-9]*")]
    saved = [path / "checkpoint.pt" for path in found if (path / "checkpoint.pt").is_file()]
    if not saved:
        raise UserError(
            f"there is no run {root / name} with a checkpoint to resume; name its folder with "
            "--resume FOLDER, or start one without --resume."
        )
    return max(saved, key=lambda path: path.stat().st_mtime_ns).parent
