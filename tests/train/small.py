"""A recipe whose whole run takes a fraction of a second."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronfac.runs.events import Event, Listener
from kronfac.train.recipe.files import change
from kronfac.train.recipe.recipe import Recipe

CONTENT: dict[str, Any] = {
    "description": "A small one",
    "optimizer": "kfac",
    "model": {"name": "cnn", "width": 4, "stages": 2},
    "data": {"name": "digits", "train": 128, "test": 64, "augment": ["crop:1"]},
    "train": {"batch": 32, "steps": 12, "evaluate_every": 1.0, "log_every": 3},
    "schedule": {"shape": "cosine", "warmup": 0.5},
    "optimizers": {
        "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        "adamw": {"lr": 0.01, "betas": [0.9, 0.99]},
        "muon": {"lr": 0.02, "other_lr": 0.01},
        "kfac": {
            "lr": 0.05,
            "other_lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "rescale": "unit",
            "factor_every": 2,
            "refresh_every": 5,
            "weight_decay": 5e-4,
        },
    },
}


def recipe(**changes: Any) -> Recipe:
    """The recipe, with changes by key; double underscores stand for dots."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return change(Recipe.from_dict("small", CONTENT), dotted)


def write(path: Path, **changes: Any) -> Path:
    """The recipe as a file."""
    path.write_text("\n".join(_lines(recipe(**changes).to_dict())), encoding="utf-8")
    return path


def _lines(table: dict[str, Any], name: str = "") -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{name}.{key}" if name else key)
    return lines


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def weights(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint."""
    content: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    model: dict[str, Tensor] = content["model"]
    return model


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether all tensors are equal to the bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


class Events(list[Event]):
    """A listener that keeps what it hears."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: str) -> list[Event]:
        return [one for one in self if one["event"] == kind]


def at_step(step: int, act: Any) -> Listener:
    """A listener that acts once a step is logged."""

    def listen(event: Event) -> None:
        if event["event"] == "step" and event["step"] == step:
            act()

    return listen
