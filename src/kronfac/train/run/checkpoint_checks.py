"""Checks that a checkpoint is complete and valid, before anything is loaded from it."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronfac.runs.errors import UserError

#: More steps than any run has; checkpoints beyond it are broken.
_MOST_STEPS = 10**15
#: The flag of folders in the entries of an archive.
_FOLDER = 0x10


def check_archive(path: Path) -> None:
    """Raise if the file is not as it was written; ``torch.load`` looks at no checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip() or _folder_in(archive)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a damaged archive makes the reader stumble in many ways
        raise UserError(f"{path} is damaged or no checkpoint of kronfac.") from error
    if broken is not None:
        raise UserError(
            f"{path} is damaged: {broken} in it is not as it was written; restore the file from a "
            "copy, or start a new run."
        )


def _folder_in(archive: zipfile.ZipFile) -> str | None:
    """An entry that is marked as a folder: ``torch.load`` leaves the memory of such a one unread."""
    found = (one.filename for one in archive.infolist() if one.external_attr & _FOLDER)
    return next(found, None)


def check_content(content: dict[str, Any], path: Path) -> None:
    """Raise unless everything that a resume needs is there, of the right kind, and finite."""
    refuse_first(_problems(content), path)


def refuse_first(problems: Iterator[str], path: Path) -> None:
    """Raise for the first problem, if there is one: later checks may rely on earlier ones."""
    if (problem := next(problems, None)) is not None:
        raise UserError(
            f"{path} cannot be resumed: {problem}; restore the file from a copy, or start a new run."
        )


def _problems(content: dict[str, Any]) -> Iterator[str]:
    for key, (is_good, wanted) in _FIELDS.items():
        if key not in content:
            yield f"it has no {key!r}"
        if not is_good(content[key]):
            yield f"its {key} is {shown(content[key])} instead of {wanted}"
    step, steps = content["step"], content["steps"]
    if step > steps:
        yield f"its step is {step}, and its run has only {steps} steps"
    if content["curve"] and content["curve"][-1][0] > step:
        yield f"its curve goes on to step {content['curve'][-1][0]}, and its step is {step}"
    for name, value in content["model"].items():
        yield from not_finite(f"model {name!r}", value)
    yield from _optimizer_problems(content["optimizer"], step)


def _optimizer_problems(saved: dict[str, Any], step: int) -> Iterator[str]:
    for member in members(saved):
        if not _is_state(member):
            yield f"its optimizer is {shown(member)} instead of a state with groups of parameters"
        for group in member["param_groups"]:
            for key, value in group.items():
                if isinstance(value, float) and not math.isfinite(value):
                    yield f"{key} of its optimizer is {value}"
        for index, entry in member["state"].items():
            for key, value in entry.items():
                yield from not_finite(f"{key} of parameter {index}", value)
                if key == "kronfac.step" and not _is_step(of := _plain(value), step):
                    yield f"its K-FAC state is of step {shown(of)}, and its step is {step}"


def members(saved: dict[str, Any]) -> list[Any]:
    """The states of the one or two optimizers that step a model."""
    both = saved.get("members")
    return both if isinstance(both, list) else [saved]


def not_finite(what: str, value: Any) -> Iterator[str]:
    """Say so if a tensor holds NaN or infinite numbers."""
    if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
        yield f"{what} holds numbers that are not finite"


def _plain(value: Any) -> Any:
    """A number that is kept in a tensor, as a number; everything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_step(value: Any, step: int) -> bool:
    return _is_number(value) and value == step


def shown(value: Any) -> str:
    """A value that is short enough for a sentence, or what it is."""
    text = repr(value) if not isinstance(value, Tensor) else "a tensor"
    return text if len(text) <= 60 else f"a {type(value).__name__}"


# --- what the fields must be ---------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_STEPS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_job(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, dict) and isinstance(value.get("train"), dict)


def _is_curve(value: Any) -> bool:
    """Evaluations: step, seconds, loss, accuracy; a loss may have been infinite."""
    return isinstance(value, list) and all(
        isinstance(one, list | tuple)
        and len(one) == 4
        and _is_count(one[0])
        and all(_is_number(number) for number in one[1:])
        for one in value
    )


def _is_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in value.items()
    )


def _is_times(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_time(one) for one in value.values())


def _is_layers(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_times(one) for one in value.values())


def _is_state(value: Any) -> bool:
    """A state dict of a torch optimizer."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
        and all(isinstance(group.get("params"), list) for group in groups)
        and all(isinstance(entry, dict) for entry in value["state"].values())
    )


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "job": (_is_job, "the settings of a run"),
    "steps": (lambda value: _is_count(value) and value > 0, "a whole number from 1"),
    "step": (_is_count, "a whole number from 0 to that of the run's steps"),
    "seconds": (_is_time, "a number of seconds"),
    "world": (lambda value: _is_count(value) and value > 0, "a number of ranks"),
    "model": (_is_tensors, "tensors by name"),
    "optimizer": (lambda value: isinstance(value, dict), "the state of an optimizer"),
    "mixup": (_is_tensors, "tensors by name"),
    "curve": (_is_curve, "a list of evaluations (step, seconds, loss, accuracy)"),
    "phases": (_is_times, "seconds by phase"),
    "layers": (_is_layers, "seconds by layer and phase"),
    "stats": (lambda value: isinstance(value, dict), "counts by name"),
}
