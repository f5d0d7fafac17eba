"""TensorBoard and Weights & Biases, for those who have them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kronfac.runs.errors import UserError
from kronfac.runs.events import Event, Listener
from kronfac.runs.hints import advice

_STEP = ("loss", "lr", "batch", "samples_per_second", "damping", "kl_clip", "momentum")
_EVAL = ("loss", "accuracy")


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event that are drawn over steps, by name."""
    names = {"step": ("train", _STEP), "eval": ("test", _EVAL)}.get(event["event"])
    if names is None:
        return {}
    prefix, keys = names
    found = {f"{prefix}/{key}": event[key] for key in keys if event.get(key) is not None}
    return found | {f"phases/{key}": value for key, value in event.get("phases", {}).items()}


class TensorBoard:
    """Writes TensorBoard's files into the run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        module = _imported("tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def __call__(self, event: Event) -> None:
        """Log one event."""
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])
        if event["event"] == "finish":
            self._writer.close()


class WandB:
    """Sends scalars to Weights & Biases."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        module = _imported("wandb")
        self._run = module.init(
            project="kronfac", name=folder.name, dir=str(folder), config=dict(config)
        )

    def __call__(self, event: Event) -> None:
        """Log one event."""
        if found := scalars(event):
            self._run.log(found, step=event["step"])
        if event["event"] == "finish":
            self._run.finish()


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Listener]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


def make(name: str, folder: Path, config: Mapping[str, Any]) -> Listener:
    """The logger of this name; what it stumbles over at its start becomes one sentence."""
    try:
        return LOGGERS[name](folder, config)
    except UserError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--log {name} could not start: {said[:300]}") from error


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check(names: Sequence[str]) -> None:
    """Raise unless all of them are loggers whose packages are there."""
    for name in names:
        if name not in LOGGERS:
            raise UserError(f"unknown logger {name!r} in --log; {advice(name, LOGGERS)}")
        _imported(name)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UserError(f"--log {name} needs the package {name}: pip install {name}") from error
