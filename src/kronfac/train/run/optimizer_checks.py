"""Checks that a saved optimizer state is complete: a resume must be bit for bit.

Loading alone does not show it: torch and K-FAC treat missing tensors as not yet initialised, and
would start them again from zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronfac.optimizer.base import Preconditioned
from kronfac.train.optim.composite import Composite
from kronfac.train.run.checkpoint_checks import members, refuse_first, shown


def check_optimizer(saved: dict[str, Any], optimizer: Any, step: int, path: Path) -> None:
    """Raise unless ``saved``, after ``step`` steps, is a complete state of this optimizer."""
    refuse_first(_problems(saved, optimizer, step), path)


def check_counts(saved: dict[str, Any], fresh: Mapping[str, Any], path: Path) -> None:
    """Raise unless saved counts can be added to those of this optimizer."""
    refuse_first(_count_problems("stats", saved, fresh), path)


def check_mixup(saved: dict[str, Tensor], batch: int, step: int, path: Path) -> None:
    """Raise unless the last mixed batch is complete after ``step`` steps."""
    refuse_first(_mixup_problems(saved, batch, step), path)


def _problems(saved: dict[str, Any], optimizer: Any, step: int) -> Iterator[str]:
    here = optimizer.members if isinstance(optimizer, Composite) else [optimizer]
    there = members(saved)
    if len(there) != len(here):
        yield f"it has the state of {len(there)} optimizer(s), and this run has {len(here)}"
    for state, one in zip(there, here, strict=True):
        fresh = one.state_dict()
        yield from _group_problems(state["param_groups"], fresh["param_groups"])
        if step > 0:
            yield from _missing_entries(state, fresh["state"])
            base = one.base if isinstance(one, Preconditioned) else one
            yield from _base_problems(state, base)


def _group_problems(saved: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> Iterator[str]:
    if len(saved) != len(fresh):
        yield f"its optimizer has {len(saved)} groups of parameters, and this one has {len(fresh)}"
    for group, wanted in zip(saved, fresh, strict=True):
        for key in wanted:
            if key not in group:
                yield f"a group of its optimizer has no {key!r}"
        if len(group["params"]) != len(wanted["params"]):
            count = len(wanted["params"])
            yield f"a group of its optimizer has {len(group['params'])} parameters instead of {count}"


def _missing_entries(saved: dict[str, Any], fresh: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """What K-FAC saves of a layer from the start on is there later, too."""
    names = [_names(group) for group in saved["param_groups"]]
    flat = {index: name for group in names for index, name in group.items()}
    for index, wanted in fresh.items():
        entry = saved["state"].get(index, {})
        for key in wanted:
            # Checkpoints of before have no `.rows`; they count from the next refresh on.
            if key not in entry and not key.endswith(".rows"):
                yield f"its optimizer has no {key} of parameter {flat.get(index, index)!r}"


def _names(group: Mapping[str, Any]) -> dict[int, str]:
    return dict(zip(group["params"], group.get("kronfac.names", ()), strict=False))


def _base_problems(saved: dict[str, Any], base: Optimizer) -> Iterator[str]:
    for group, here in zip(saved["param_groups"], base.param_groups, strict=True):
        for index, parameter in zip(group["params"], here["params"], strict=True):
            entry = saved["state"].get(index, {})
            wanted = _kept(base, group)
            if wanted is None and not entry:
                yield f"its optimizer has no state of parameter {index}"
            for key in wanted or ():
                if key not in entry:
                    yield f"its optimizer has no {key} of parameter {index}"
                if key != "step" and not _fits(entry[key], parameter):
                    yield f"{key} of parameter {index} is {_form(entry[key])} instead of " + (
                        str(list(parameter.shape))
                    )


def _kept(base: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What an optimizer keeps of each parameter; ``None`` if only that it keeps something is known."""
    if isinstance(base, torch.optim.SGD):
        return ("momentum_buffer",) if group.get("momentum") else ()
    if isinstance(base, torch.optim.Muon):
        return ("momentum_buffer",)
    if isinstance(base, torch.optim.AdamW):
        more = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
        return ("step", "exp_avg", "exp_avg_sq", *more)
    return None


def _fits(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _form(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else shown(value)


def _count_problems(where: str, saved: Any, fresh: Any) -> Iterator[str]:
    if isinstance(fresh, dict):
        if not isinstance(saved, dict):
            yield f"its {where} is {shown(saved)} instead of a table"
        for key in fresh:
            if key in saved:
                yield from _count_problems(f"{where}.{key}", saved[key], fresh[key])
    elif isinstance(fresh, int | float) and not isinstance(saved, int | float):
        yield f"its {where} is {shown(saved)} instead of a number"


def _mixup_problems(saved: dict[str, Tensor], batch: int, step: int) -> Iterator[str]:
    for key in ("inputs", "targets") if step > 0 else ():
        if key not in saved:
            yield f"it has no {key} of the last mixed batch"
        if saved[key].shape[:1] != (batch,):
            yield f"{key} of its last mixed batch are {list(saved[key].shape)}, not of {batch} samples"
