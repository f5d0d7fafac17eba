"""Steps of the optimizer on any loss, and what its public interface says afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import kronfac
from tests.layers.kinds import GAMMA, Loss
from tests.training import frozen_kfac, gradients


def watched(model: nn.Module, **options: Any) -> kronfac.KFAC:
    """K-FAC with newest statistics only, whose base does not move the parameters."""
    return frozen_kfac(model, **({"damping": GAMMA, "decay": 0.0} | options))


def observed(optimizer: kronfac.KFAC, loss: Loss, outputs: Any, **observing: Any) -> None:
    """One backward pass with the call of `observe` that some Fishers need."""
    optimizer.zero_grad()
    optimizer.observe(outputs(optimizer.model), "categorical", **observing)
    with optimizer.no_capture():
        loss(optimizer.model).backward()
    optimizer.step()


def stepped(
    model: nn.Module, optimizer: Optimizer, *losses: Loss
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step on the sum of the losses; gradients before and after preconditioning."""
    optimizer.zero_grad()
    for loss in losses:
        loss(model).backward()
    before = gradients(model)
    optimizer.step()
    return before, gradients(model)


def left_out(optimizer: kronfac.KFAC) -> dict[str, str]:
    """The reason of every parameter that the summary lists as not preconditioned."""
    reasons: dict[str, str] = {}
    reason = ""
    for line in optimizer.summary().partition("Not preconditioned")[2].splitlines()[1:]:
        if line.startswith("    "):
            reasons |= dict.fromkeys(line.split(), reason)
        else:
            reason = line.strip().removesuffix(":")
    return reasons


def statistics(optimizer: kronfac.KFAC) -> dict[str, Tensor]:
    """Every tensor that the optimizer saves for itself, by parameter number and key."""
    return {
        f"{number}.{key}": value
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if key.startswith("kronfac.") and isinstance(value, Tensor)
    }


def assert_roughly(actual: Tensor, expected: Tensor, rtol: float) -> None:
    """Equal up to a share of the norm."""
    assert float(torch.linalg.vector_norm(actual - expected)) < rtol * float(expected.norm())
