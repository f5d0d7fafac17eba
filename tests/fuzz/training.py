"""Training with the library, and what is compared afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kronfac
from tests.fuzz.cases import IGNORED, Case, Part
from tests.fuzz.nets import Net


def backward(
    net: Net,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    part: Part,
    step: int,
    micro: int,
) -> None:
    """One micro-batch; ``model`` is the net or what wraps it."""
    net.set_moment(step, micro)
    scores = model(part.x)
    if case.sampled and isinstance(optimizer, kronfac.KFAC):
        optimizer.observe(
            scores,
            mask=part.targets,
            ignore_index=IGNORED,
            samples=case.samples_per_term,
            generator=case.draws(step, micro),
        )
    part.loss(scores).backward()


def take_step(net: Net, optimizer: torch.optim.Optimizer, case: Case, step: int) -> None:
    """Forward and backward in micro-batches, then a step."""
    optimizer.zero_grad()
    for micro, part in enumerate(case.batch(step)):
        backward(net, net, optimizer, case, part, step, micro)
    optimizer.step()


def train(net: Net, optimizer: torch.optim.Optimizer, case: Case, steps: range) -> None:
    for step in steps:
        take_step(net, optimizer, case, step)


def values(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference relative to the parameter's size, and where."""
    found = [(0.0, "")]
    for name, value in left.items():
        size = max(1.0, float(right[name].double().norm()))
        found.append((float((value - right[name]).double().norm()) / size, name))
    return max(found)


def assert_same_bits(left: nn.Module, right: nn.Module) -> None:
    """Parameters and buffers are equal bit for bit."""
    others = values(right)
    for name, value in values(left).items():
        assert torch.equal(value, others[name]), f"{name!r} differs"
