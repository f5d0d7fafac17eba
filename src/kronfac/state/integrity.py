"""A saved state, looked at before anything is changed: damage is refused, not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kronfac.layers.shards import local

#: More steps than anybody takes: at a thousand a second, 35 years.
MAX_STEP = 2**40

#: Whole numbers that we save, by the last part of their key, and how many of them.
_WHOLE = {
    **{"step": 1, "last_factor": 1, "compared": 1, "dropped": 1},
    **{"interval": 3, "schedule": 6, "stride": 4, "group": 1},
}
_REMEDY = "load another checkpoint"


def check_saved(saved: object) -> None:
    """Raise unless this has the form of an optimizer's ``state_dict()``."""
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"load_state_dict got {_shown(saved)}; give what state_dict() returned, for example "
            "torch.load(path)['optimizer']."
        )
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list | tuple):
        raise ValueError(
            f"load_state_dict got a dict with the keys {_keys(saved)}, but an optimizer's state has a "
            "dict under 'state' and a list under 'param_groups'; give what state_dict() returned."
        )
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(
                f"the checkpoint is damaged: group {number} of param_groups has no list under "
                f"'params'; {_REMEDY}."
            )
        _check_lists(number, group)
    for index, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"the checkpoint is damaged: the state of parameter {index} is {_shown(entry)} and "
                f"not a dict; {_REMEDY}."
            )


def _check_lists(number: int, group: Mapping[str, Any]) -> None:
    """Names and shapes that we add to a group go with its parameters one by one."""
    for key in ("kronfac.names", "kronfac.shapes"):
        value = group.get(key, group["params"] if "kronfac.names" not in group else None)
        if not isinstance(value, list | tuple) or len(value) != len(group["params"]):
            raise ValueError(
                f"the checkpoint is damaged: {key} of group {number} does not go with its "
                f"{len(group['params'])} parameters; {_REMEDY}."
            )


def check_entries(entries: Mapping[str, Mapping[str, Any]], expected: bool) -> None:
    """Raise if what we have saved cannot be meant; ``expected`` says that there must be some of it."""
    steps: dict[int, str] = {}
    for name, entry in entries.items():
        for key, value in entry.items():
            _check_value(name, key, value)
        if "step" in entry:
            steps.setdefault(int(entry["step"]), name)
    if expected and not steps:
        raise ValueError(
            "the checkpoint is damaged: it names K-FAC's parameters, but holds nothing of K-FAC for "
            f"any of them; {_REMEDY}."
        )
    if len(steps) > 1:
        (one, first), (two, second) = list(steps.items())[:2]
        raise ValueError(
            f"the checkpoint is damaged: it was saved at step {one} by {first!r} and at step {two} by "
            f"{second!r}; {_REMEDY}."
        )
    for step in steps:
        _check_times(entries, step)


def _check_times(entries: Mapping[str, Mapping[str, Any]], step: int) -> None:
    """What was done last was not done later than the checkpoint."""
    for name, entry in entries.items():
        for key, value in entry.items():
            kind = key.rpartition(".")[2]
            numbers = value.flatten().tolist() if kind in _WHOLE and kind != "step" else []
            times = {"last_factor": numbers, "schedule": numbers[:2], "interval": numbers[2:]}
            if any(time > step for time in times.get(kind, [])):
                raise ValueError(
                    f"the checkpoint is damaged: {key} of {name!r} is {numbers}, later than step "
                    f"{step}; {_REMEDY}."
                )


def _check_value(name: str, key: str, value: Any) -> None:
    kind = key.rpartition(".")[2]
    if kind == "step" and not _is_step(value):
        raise ValueError(
            f"the checkpoint is damaged: step of {name!r} is {_shown(value)}, not a whole number from "
            f"0 to {MAX_STEP:,}; {_REMEDY}."
        )
    if kind == "step":
        return
    if not isinstance(value, Tensor):
        raise ValueError(
            f"the checkpoint is damaged: {key} of {name!r} is {_shown(value)}, not a tensor; {_REMEDY}."
        )
    if kind in _WHOLE and (value.is_floating_point() or value.numel() != _WHOLE[kind]):
        raise ValueError(
            f"the checkpoint is damaged: {key} of {name!r} has shape {tuple(value.shape)} and type "
            f"{value.dtype}, not {_WHOLE[kind]} whole numbers; {_REMEDY}."
        )
    if value.is_floating_point() and not _is_usable(kind, value):
        least = {"count": "non-negative and ", "damping": "positive and "}.get(kind, "")
        raise ValueError(
            f"the checkpoint is damaged: {key} of {name!r} has numbers that are not {least}finite; "
            f"{_REMEDY}."
        )


def _is_step(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.device.type == "meta":
            return False
        value = value.item()
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return whole and 0 <= value <= MAX_STEP


def _is_usable(kind: str, value: Tensor) -> bool:
    if value.device.type == "meta":
        return True  # a plan without numbers
    value = local(value)  # nothing of a loaded shard is decided with others
    if not bool(torch.isfinite(value).all()):
        return False
    least = {"count": value >= 0, "damping": value > 0}.get(kind)
    return least is None or bool(least.all())


def _keys(value: Mapping[Any, Any]) -> str:
    names = [repr(key) for key in list(value)[:5]]
    return ("none" if not names else ", ".join(names)) + (", ..." if len(value) > 5 else "")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
