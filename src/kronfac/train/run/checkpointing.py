"""Saving a run, and resuming it bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronfac.optimizer.base import Preconditioned
from kronfac.runs import disk
from kronfac.runs.errors import UserError
from kronfac.train.optim.composite import Composite, kfac_of
from kronfac.train.run.checkpoint_checks import check_archive, check_content
from kronfac.train.run.evaluation import Evaluation
from kronfac.train.run.loop import Loop
from kronfac.train.run.optimizer_checks import check_counts, check_mixup, check_optimizer
from kronfac.train.run.resume_checks import check_steps
from kronfac.train.run.target import first_reached

FORMAT = 2
#: What loading into another model or optimizer raises.
_MISFITS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def save(path: Path, loop: Loop) -> None:
    """Replace the last checkpoint; all ranks call it together."""
    content = collect(loop)
    loop.setup.ranks.on_first(lambda: disk.replace(path, lambda file: torch.save(content, file)))


def collect(loop: Loop) -> dict[str, Any]:
    """Everything that the rest of the run depends on, on the first rank."""
    setup, result = loop.setup, loop.result
    return {
        "format": FORMAT,
        "job": setup.job.to_dict(),
        "steps": setup.steps,
        "step": loop.step,
        "seconds": loop.clock.seconds,
        "world": setup.ranks.size,
        "model": setup.plain.state_dict(),
        "optimizer": _optimizer_state(setup.optimizer),
        "mixup": _mixup_state(loop),
        "curve": [[e.step, e.seconds, e.loss, e.accuracy] for e in result.curve],
        "phases": dict(result.phases),
        "layers": {name: dict(seconds) for name, seconds in loop.clock.layers.items()},
        "stats": loop.counters.total(),
    }


def _optimizer_state(optimizer: Any) -> dict[str, Any] | None:
    if isinstance(optimizer, Preconditioned):
        return optimizer.full_state_dict(to=0)
    if isinstance(optimizer, Composite):
        return {"members": [_optimizer_state(one) for one in optimizer.members]}
    state: dict[str, Any] = optimizer.state_dict()
    return state


def _mixup_state(loop: Loop) -> dict[str, Tensor]:
    """The last mixed batch of all ranks, in their order."""
    if loop.stepper.mixup is None:
        return {}
    states = [one for one in loop.setup.ranks.gather(loop.stepper.mixup.state_dict()) if one]
    keys = states[0] if states else {}
    return {key: torch.cat([state[key].cpu() for state in states]) for key in keys}


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; a damaged or incomplete one is a :class:`UserError`."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}: nothing can be resumed.")
    check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is damaged or no checkpoint of kronfac.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no checkpoint of this version of kronfac.")
    check_content(content, path)
    return content


def restore(loop: Loop, content: dict[str, Any], path: Path) -> None:
    """Continue from what :func:`collect` returned; all ranks call it together."""
    setup = loop.setup
    check_steps(content["steps"], setup.steps, path)
    _check_fit(loop, content, path)
    _settle_buckets(loop, content["step"])
    try:
        setup.plain.load_state_dict(content["model"])
        setup.optimizer.load_state_dict(content["optimizer"])
    except _MISFITS as error:
        first = " ".join(str(error).split())
        raise UserError(f"{path} does not fit this model or optimizer: {first[:300]}") from error
    if loop.stepper.mixup is not None:
        loop.stepper.mixup.load_state_dict(content["mixup"], setup.device)
    loop.step = content["step"]
    loop.clock.seconds = content["seconds"]
    loop.result.curve = [Evaluation(*one) for one in content["curve"]]
    loop.result.target = first_reached(setup.job.train, loop.result.curve)
    loop.result.phases = dict(content["phases"])
    loop.clock.layers = content["layers"]
    loop.counters.go_on(content["stats"])


def _check_fit(loop: Loop, content: dict[str, Any], path: Path) -> None:
    """Raise unless the state is complete and of this run, before any of it is loaded."""
    check_optimizer(content["optimizer"], loop.setup.optimizer, content["step"], path)
    check_counts(content["stats"], loop.counters.total(), path)
    if loop.stepper.mixup is not None:
        last = loop.setup.timetable.batch(max(0, content["step"] - 1))
        check_mixup(content["mixup"], last, content["step"], path)


def _settle_buckets(loop: Loop, step: int) -> None:
    """Let DistributedDataParallel order its buckets, as it had when the state was saved.

    It does so after its first backward pass, and the order decides about rounding from three ranks on.
    """
    setup = loop.setup
    if setup.ranks.size < 3:
        return
    inputs, targets = setup.batches.get(step % setup.steps)
    optimizer = setup.optimizer
    if (kfac := kfac_of(optimizer)) is not None:
        with kfac.no_capture():
            loop.stepper.loss(inputs, targets).backward()
    else:
        loop.stepper.loss(inputs, targets).backward()
    optimizer.zero_grad()
