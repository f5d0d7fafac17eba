"""Uneven inputs: ranks that have run out of batches go on taking part (``Join([model, optimizer])``).

A rank that has joined observes nothing, but its statistics, its share of the solving and its parameters
go on: an active rank sends it the gradients of each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from kronfac.distributed.comm.broadcast import make_broadcasts
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.comm.process_group import ProcessGroup


class ShadowHook(JoinHook):
    """What a joined rank does for each step of the others."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Take the step of the others with their gradients."""
        self.optimizer.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have taken the same steps: nothing is left to do."""


def is_joining(optimizer: Any) -> bool:
    """Whether a step is taken inside ``Join``; raises if only the model is in it."""
    inside = bool(optimizer._join_config.enable)
    if inside:
        Join.notify_join_context(optimizer)
        return True
    for module in optimizer.model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module._join_config.enable:
            raise RuntimeError(
                "the model is inside join() without its optimizer, which then waits for ranks that "
                "have left: use torch.distributed.algorithms.join.Join([model, optimizer])."
            )
    return False


def exchange_gradients(
    world: ProcessGroup, parameters: Sequence[nn.Parameter], active: bool
) -> None:
    """Give joined ranks the gradients that the active ones agree on."""
    here = [0.0] * world.size
    here[world.rank] = float(active)
    flags = world.total(here).tolist()
    if all(flags):
        return
    root = flags.index(1.0)
    has = [float(p.grad is not None) for p in parameters]
    found = world.total(has if world.rank == root else [0.0] * len(has)).tolist()
    used = [p for p, flag in zip(parameters, found, strict=True) if flag]
    items = [
        Item(str(index), tuple(p.shape), p.dtype, p.device, root=root)
        for index, p in enumerate(used)
    ]
    for broadcast in make_broadcasts(items, world.all, "control", None):
        if broadcast.mine:
            for key in broadcast.keys:
                broadcast.put(key, _dense(used[int(key)].grad))
        broadcast.launch()
        broadcast.wait()
        if not active:
            for key in broadcast.keys:
                used[int(key)].grad = broadcast.take(key).clone()
    if not active:
        for parameter, flag in zip(parameters, found, strict=True):
            if not flag:
                parameter.grad = None


def _dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad
