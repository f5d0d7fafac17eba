"""Checks that a run folder belongs to this job: a run must resume bit for bit."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Timetable
from kronfac.train.recipe.recipe import DataPart, Job, ModelPart, SchedulePart, TrainPart
from kronfac.train.recipe.tables import defaults
from kronfac.train.record.folder import RunFolder

#: Keys of [train] that say what is aimed at.
TARGETS = ("target", "target_loss")
#: Keys of [train] that do not change the numbers: a resumed run may have others.
FREE = (*TARGETS, "log_every", "evaluate_every", "evaluate_batch", "checkpoint_every")
#: Two ways to give the length of a run; :func:`check_folder` compares the number of steps.
_LENGTH = ("steps", "epochs")
_PARTS = {"model": ModelPart, "data": DataPart, "train": TrainPart, "schedule": SchedulePart}


def check_folder(folder: RunFolder, job: Job, free: Collection[str] = FREE) -> None:
    """Raise unless the run in a folder is this job with the same length; needs no data."""
    settings = folder.read_config()["settings"]
    check_job(settings, job, folder.path, free)
    _check_length(settings["train"], job.train, folder)


def check_job(settings: dict[str, Any], job: Job, path: Path, free: Collection[str] = FREE) -> None:
    """Raise unless what is in ``path``, of these settings, belongs to this job, whatever its length."""
    apart = {*free, *_LENGTH}
    saved, here = _whole(settings, apart), _whole(job.to_dict(), apart)
    for part in here:
        if saved.get(part) != here[part]:
            detail = _difference(part, saved.get(part), here[part])
            raise UserError(f"{path} belongs to another run: {detail}.")


def _check_length(saved: dict[str, Any], here: TrainPart, folder: RunFolder) -> None:
    if all(saved.get(key) == getattr(here, key) for key in _LENGTH):
        return
    start = folder.last_start()
    samples = _train_samples(start or {}, here)
    if start is None or samples is None or "steps" not in start:
        asked = {key: getattr(here, key) for key in _LENGTH}
        detail = _difference("train", {key: saved.get(key) for key in _LENGTH}, asked)
        raise UserError(f"{folder.path} belongs to another run: {detail}.")
    check_steps(start["steps"], here.num_steps(Timetable(samples, here.batch)), folder.path)


def _train_samples(start: dict[str, Any], here: TrainPart) -> int | None:
    """Samples of an epoch; there are folders that know its steps instead, of one batch size."""
    if "steps_per_epoch" in start and isinstance(here.batch, int):
        return int(start["steps_per_epoch"]) * here.batch
    return start.get("train_samples")


def check_steps(saved: int, here: int, path: Path) -> None:
    """Raise unless both runs have as many steps."""
    if saved != here:
        raise UserError(
            f"{path} belongs to a run of {saved} steps, and this one has {here}; "
            "its schedule would be another."
        )


def _difference(part: str, saved: Any, here: Any) -> str:
    if not isinstance(here, dict) or not isinstance(saved, dict):
        return f"its {part} is {_said(saved)}, and here it is {_said(here)}"
    keys = sorted(key for key in {**saved, **here} if saved.get(key) != here.get(key))
    key = "name" if "name" in keys else keys[0]
    return f"its {part}.{key} is {_said(saved.get(key))}, and here it is {_said(here.get(key))}"


def _said(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _whole(job: dict[str, Any], apart: Collection[str]) -> dict[str, Any]:
    """As JSON would have it, with values that were left at their defaults, without what may change."""
    copy: dict[str, Any] = json.loads(json.dumps(job))
    for part, kind in _PARTS.items():
        if isinstance(copy.get(part), dict):
            copy[part] = {**json.loads(json.dumps(defaults(kind))), **copy[part]}
    copy["train"] = {key: value for key, value in copy["train"].items() if key not in apart}
    return copy
