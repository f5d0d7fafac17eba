"""The result of a finished run, read from its folder."""

from __future__ import annotations

from typing import Any

from kronfac.runs.events import read
from kronfac.train.recipe.recipe import Job
from kronfac.train.record.folder import RunFolder
from kronfac.train.run.evaluation import Evaluation
from kronfac.train.run.result import Result
from kronfac.train.run.target import first_reached


def result_of(
    folder: RunFolder, saved: dict[str, Any], job: Job, stop_at_target: bool
) -> Result | None:
    """The result of a finished run; ``None`` if there is something left to do.

    Args:
        folder: of the run.
        saved: its checkpoint, empty if there is none.
        job: what is asked for now; the target may be another than before.
        stop_at_target: whether reaching it is enough.
    """
    if not saved or folder.status != "done":
        return None
    curve = [Evaluation(*one) for one in saved["curve"]]
    target = first_reached(job.train, curve)
    if saved["step"] < saved["steps"] and not (stop_at_target and target):
        return None
    events = read(folder.events)
    start = folder.last_start() or {}
    end = [one for one in events if one["event"] == "finish"][-1]
    return Result(
        step=saved["step"],
        seconds=saved["seconds"],
        curve=curve,
        target=target,
        parameters=start.get("parameters", 0),
        phases=dict(saved["phases"]),
        stats=end.get("stats", {}),
        memory=max((one.get("memory") or 0 for one in events if one["event"] == "step"), default=0),
        folder=folder.path,
        metric=start.get("metric", "accuracy"),
        was_finished=True,
    )
