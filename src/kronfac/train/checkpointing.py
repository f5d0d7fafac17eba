"""Saving a run whole, and going on from it to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronfac.optimizer import Preconditioned
from kronfac.train import disk
from kronfac.train.errors import UserError
from kronfac.train.evaluation import Evaluation
from kronfac.train.loop import Loop
from kronfac.train.pair import Pair, kfac_of
from kronfac.train.recipe import Job
from kronfac.train.result import Reached

FORMAT = 2
#: Keys of [train] that do not change the numbers, so that a resumed run may have others.
_FREE = (
    "target",
    "target_loss",
    "log_every",
    "evaluate_every",
    "evaluate_batch",
    "checkpoint_every",
    "steps",
    "epochs",
)


def save(path: Path, loop: Loop) -> None:
    """Write a checkpoint in the place of the last one; all ranks call it together."""
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
        "target": None if result.target is None else [result.target.step, result.target.seconds],
        "phases": dict(result.phases),
        "layers": {name: dict(seconds) for name, seconds in loop.clock.layers.items()},
        "stats": loop.counters.total(),
    }


def _optimizer_state(optimizer: Any) -> dict[str, Any] | None:
    if isinstance(optimizer, Preconditioned):
        return optimizer.full_state_dict(to=0)
    if isinstance(optimizer, Pair):
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
    """Read a checkpoint."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}, so that nothing can be resumed.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is damaged or no checkpoint of kronfac.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no checkpoint of this version of kronfac.")
    return content


def check_job(settings: dict[str, Any], job: Job, path: Path) -> None:
    """Raise unless what is in ``path``, of these settings, belongs to this job."""
    saved, here = _plain(settings), _plain(job.to_dict())
    for part in here:
        if saved.get(part) != here[part]:
            detail = _difference(part, saved.get(part), here[part])
            raise UserError(f"{path} belongs to another run: {detail}.")


def _difference(part: str, saved: Any, here: Any) -> str:
    if not isinstance(here, dict) or not isinstance(saved, dict):
        return f"its {part} is {saved!r}, and here it is {here!r}"
    keys = sorted(key for key in {**saved, **here} if saved.get(key) != here.get(key))
    key = "name" if "name" in keys else keys[0]
    return f"its {part}.{key} is {saved.get(key)!r}, and here it is {here.get(key)!r}"


def _plain(job: dict[str, Any]) -> dict[str, Any]:
    """As JSON would have it, without what may change."""
    copy: dict[str, Any] = json.loads(json.dumps(job))
    copy["train"] = {key: value for key, value in copy["train"].items() if key not in _FREE}
    return copy


def restore(loop: Loop, content: dict[str, Any], path: Path) -> None:
    """Continue from what :func:`collect` returned; all ranks call it together."""
    setup = loop.setup
    if content["steps"] != setup.steps:
        raise UserError(
            f"{path} belongs to a run of {content['steps']} steps, and this one has {setup.steps}; "
            "its schedule would be another."
        )
    _settle_buckets(loop, content["step"])
    try:
        setup.plain.load_state_dict(content["model"])
        setup.optimizer.load_state_dict(content["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        first = " ".join(str(error).split())
        raise UserError(f"{path} does not fit this model or optimizer: {first[:300]}") from error
    if loop.stepper.mixup is not None:
        loop.stepper.mixup.load_state_dict(content["mixup"], setup.device)
    loop.step = content["step"]
    loop.clock.seconds = content["seconds"]
    loop.result.curve = [Evaluation(*one) for one in content["curve"]]
    loop.result.target = None if content["target"] is None else Reached(*content["target"])
    loop.result.phases = dict(content["phases"])
    loop.clock.layers = content["layers"]
    loop.counters.go_on(content["stats"])


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
