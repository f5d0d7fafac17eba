"""Combinations that would train wrongly, refused with one sentence each."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def check_model(model: object) -> None:
    """Raise unless the model can be watched in this process."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "torch.nn.DataParallel copies the model in every forward, so nothing can be observed; "
            "use one process per device."
        )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameter {name!r} is sharded (DTensor); sharded models are not supported: build "
                "the optimizer before sharding, or train without it."
            )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks is initialised, but statistics are "
            "not combined over ranks in this version: train in one process."
        )


def check_base(base: object) -> None:
    """Raise unless the base optimizer can step on gradients that are already there."""
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base_optimizer must be a torch.optim.Optimizer, not {type(base).__name__}; build it "
            "first, for example torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    closure = inspect.signature(type(base).step).parameters.get("closure")
    if isinstance(base, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise ValueError(
            f"{type(base).__name__} evaluates the loss inside its step and cannot use "
            "preconditioned gradients; use a base such as SGD, AdamW, RMSprop or NAdam."
        )
