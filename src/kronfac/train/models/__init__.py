"""Models by name: short definitions whose parameter counts equal the papers'."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from kronfac.runs.errors import UserError
from kronfac.train.models.cnn import CNN
from kronfac.train.models.gpt import GPT
from kronfac.train.models.mlp import MLP
from kronfac.train.models.resnet import LAYERS, CifarResNet, ResNet
from kronfac.train.models.vit import ViT

__all__ = ["CNN", "GPT", "MLP", "NAMES", "CifarResNet", "ResNet", "ViT", "build"]

_CIFAR_DEPTHS = (8, 14, 20, 32, 44, 56, 110)
_MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    **{f"resnet{depth}": partial(CifarResNet, depth) for depth in _CIFAR_DEPTHS},
    **{f"resnet{depth}": partial(ResNet, depth) for depth in LAYERS},
    "vit": ViT,
    "gpt": GPT,
}
NAMES = tuple(_MODELS)
#: The largest values of options that say how often something is repeated, and of all others.
_MOST_REPEATS, _MOST = 1_000, 100_000
_REPEATS = ("stages", "convolutions", "depth")
_GIVEN_BY_DATA = ("num_classes", "sample_shape", "channels", "vocab", "length")


def build(
    name: str, *, num_classes: int, sample_shape: tuple[int, ...], **options: Any
) -> nn.Module:
    """The model ``name`` for this data; ``options`` are keywords of its class."""
    if name not in _MODELS:
        raise UserError(f"unknown model {name!r}; there are {', '.join(NAMES)}")
    model = _MODELS[name]
    parameters = inspect.signature(model).parameters
    known = [option for option in parameters if option not in _GIVEN_BY_DATA]
    for option in options:
        if option not in known:
            raise UserError(f"unknown option model.{option}: {name} has {', '.join(known)}")
        _check_value(option, options[option], parameters[option].default)
    _check_kind(name, sample_shape)
    given = {
        "num_classes": num_classes,
        "sample_shape": tuple(sample_shape),
        "channels": sample_shape[0],
        "vocab": num_classes,
        "length": sample_shape[-1],
    }
    try:
        return model(**{key: given[key] for key in parameters if key in given}, **options)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # too large, as a rule
        said = " ".join(str(error).split())[:200]
        raise UserError(f"[model]: {name} cannot be built with {options!r}: {said}") from error


def _check_value(option: str, value: object, default: object) -> None:
    """Options are numbers, switches or lists of numbers, as their defaults show."""
    most = _MOST_REPEATS if option in _REPEATS else _MOST
    if isinstance(default, bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        good, wanted = _is_count(value, most), f"a whole number from 1 to {most}"
    else:
        good = isinstance(value, list | tuple) and all(_is_count(item, most) for item in value)
        wanted = f"a list of whole numbers from 1 to {most}"
    if not good:
        raise UserError(f"model.{option} = {value!r} is not {wanted}")


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check_kind(name: str, sample_shape: tuple[int, ...]) -> None:
    wanted = 1 if name == "gpt" else 3
    if len(sample_shape) != wanted:
        kind = "text, samples of [S]" if wanted == 1 else "images, samples of [C, H, W]"
        raise UserError(f"{name} wants {kind}, but this data has samples of {list(sample_shape)}")
