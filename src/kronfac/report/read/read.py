"""One run folder, as the program left it.

Reading is lenient, because a report is wanted most when something went wrong: a run may have been
killed in the middle of a line, been resumed, or lack fields. Values that are no numbers, or none that
such a thing can have, count as missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kronfac.runs.disk import read_text
from kronfac.runs.events import read_leniently

Status = Literal["done", "stopped", "failed", "unfinished"]
Record = dict[str, Any]

_LARGEST = 1e100
_MOST_RANKS = 1 << 14
_MOST_STEPS = 10**15
_END_OF_TIME = 253_402_300_799  # the last second of the year 9999


@dataclass(frozen=True)
class Notice:
    """A warning or failure of a run."""

    event: str
    step: int | None
    message: str


@dataclass
class Run:
    """What one run folder says.

    ``steps`` and ``evals`` are records in order of their steps, each step once: what a resumed run
    did again is there once, and its ``seconds`` continue.
    """

    path: Path
    start: Record = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    layers: Record | None = None
    finish: Record | None = None
    resumed: list[int] = field(default_factory=list)
    broken_lines: int = 0
    last_time: int | None = None
    config: Record = field(default_factory=dict)
    environment: Record = field(default_factory=dict)
    summary: str = ""
    _seconds_before: float = 0.0
    _clock_restarted: bool | None = None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.start.get("recipe") or _from_name(self.name)[0] or self.name)

    @property
    def optimizer(self) -> str:
        """Name of the optimizer's table in the recipe."""
        named = self.start.get("optimizer") or _from_name(self.name)[1]
        return str(named or self.start.get("kind") or "unknown")

    @property
    def kind(self) -> str:
        """Kind of the optimizer: ``"kfac"``, ``"sgd"``, ..."""
        return str(self.start.get("kind") or self.optimizer)

    @property
    def method(self) -> str | None:
        """How the optimizer's method is written, if it is one of ours."""
        named = self.start.get("method")
        return None if named is None else str(named)

    @property
    def seed(self) -> str:
        """Seed, as text; empty if unknown."""
        seed = self.start.get("seed")
        return _from_name(self.name)[2] if seed is None else str(seed)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return whole(self.start.get("world"), 1, _MOST_RANKS) or 1

    @property
    def metric(self) -> str:
        """What the target is about: ``"accuracy"`` or ``"loss"``."""
        metric = self.start.get("metric")
        if metric in ("accuracy", "loss"):
            return str(metric)
        accurate = any(number(e.get("accuracy")) is not None for e in self.evals)
        return "accuracy" if accurate or not self.evals else "loss"

    @property
    def target(self) -> float | None:
        """Value of the metric that the run was asked to reach."""
        return number(self.start.get("target"))

    @property
    def status(self) -> Status:
        """How it ended; ``"unfinished"`` if it did not say so (killed, or still running)."""
        if self.finish is not None:
            status = self.finish.get("status")
            return status if status in ("done", "stopped", "failed") else "done"
        return "failed" if any(n.event == "failure" for n in self.notices) else "unfinished"

    @property
    def last_step(self) -> int:
        """The last step that is known to be done."""
        ends = [*self.steps[-1:], *self.evals[-1:], *([self.finish] if self.finish else [])]
        return max((_step(end) or 0 for end in ends), default=0)

    @property
    def seconds(self) -> float | None:
        """Seconds of training, evaluation left out."""
        ends = [number(end.get("seconds")) for end in [*self.steps[-1:], *self.evals[-1:]]]
        return max((s for s in ends if s is not None), default=None)


def number(value: object) -> float | None:
    """The value if it is a number that can be drawn and reckoned with, else ``None``.

    What is larger than any quantity would make sums overflow, and what is smaller is nothing.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) <= _LARGEST:  # not so for nan
        return None
    return float(value) if abs(value) * _LARGEST >= 1 else 0.0


def whole(value: object, least: int, most: int) -> int | None:
    """The value as a whole number if it is one of that range, else ``None``."""
    found = number(value)
    return None if found is None or not least <= found <= most else int(found)


def read_run(folder: Path) -> Run | None:
    """Read one folder; ``None`` if it holds no event."""
    records, broken = read_leniently(folder / "events.jsonl")
    if not records:
        return None
    run = Run(folder, broken_lines=broken)
    for record in records:
        _take(run, record)
    run.steps, run.evals = _in_order(run.steps), _in_order(run.evals)
    run.config = _json(folder / "config.json")
    run.config.pop("resume", None)  # what the rest of it says, once more, and flags
    run.environment = _json(folder / "environment.json")
    run.summary = read_text(folder / "summary.txt").strip()
    return run


def _take(run: Run, record: Record) -> None:
    run.last_time = whole(record.get("time"), 1, _END_OF_TIME) or run.last_time
    match record["event"]:
        case "start":
            _begin(run, record)
        case "step":
            _add(run, run.steps, record)
        case "eval":
            _add(run, run.evals, record)
        case "warning" | "failure" as event:
            message = str(record.get("message") or "no message")
            run.notices.append(Notice(event, _step(record), message))
        case "layers":
            run.layers = record
        case "finish":
            run.finish = record


def _begin(run: Run, record: Record) -> None:
    """Start, or go on from a checkpoint: what came after that checkpoint is done again."""
    resumed = whole(record.get("resumed"), 0, _MOST_STEPS)
    kept = -1 if resumed is None else resumed
    run.steps = [s for s in run.steps if s["step"] <= kept]
    run.evals = [e for e in run.evals if e["step"] <= kept]
    if resumed is not None:
        run.resumed.append(kept)
        # A failure that the run has got over is no longer how it ended.
        run.notices = [
            Notice("warning", n.step, n.message) if n.event == "failure" else n for n in run.notices
        ]
    run.finish = None
    run.start = {**run.start, **record}
    run._seconds_before, run._clock_restarted = run.seconds or 0.0, None


def _add(run: Run, records: list[Record], record: Record) -> None:
    step, seconds = _step(record), number(record.get("seconds"))
    if step is None:
        return
    if seconds is not None and seconds < 0:
        seconds = None
    if seconds is not None:
        if run._clock_restarted is None:
            run._clock_restarted = seconds < run._seconds_before
        seconds += run._seconds_before if run._clock_restarted else 0.0
    records.append({**record, "step": step, "seconds": seconds})


def _step(record: Record) -> int | None:
    return whole(record.get("step"), 0, _MOST_STEPS)


def _in_order(records: list[Record]) -> list[Record]:
    return [record for _, record in sorted({r["step"]: r for r in records}.items())]


def _json(path: Path) -> Record:
    try:
        found = json.loads(read_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _from_name(name: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"(.+)-([^-]+)-s(\d+)(?:-\d+)?", name)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
