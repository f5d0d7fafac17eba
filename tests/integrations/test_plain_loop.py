"""A plain loop in the manner of torchtitan: every piece of it changes nothing or the same."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import kronfac
from tests.training import assert_same, batch, kfac, loss_of, parameters

STEPS, WIDTH = 6, 4


class Block(nn.Module):
    """A residual block, with or without activation checkpointing."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.work, x, use_reentrant=False)
        return self.work(x)

    def work(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Network(nn.Module):
    """Blocks whose weights are made in a second step."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def init_weights(self) -> None:
        torch.manual_seed(0)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.RMSNorm):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Optimizers:
    """One optimizer per part of the model, stepped, cleared and saved as one."""

    def __init__(self, parts: list[nn.Module], make: Callable[[nn.Module], Optimizer]) -> None:
        self.parts = parts
        self.optimizers = [make(part) for part in parts]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        found = [
            get_optimizer_state_dict(part, optimizer)
            for part, optimizer in zip(self.parts, self.optimizers, strict=True)
        ]
        return {str(number): state for number, state in enumerate(found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            set_optimizer_state_dict(part, optimizer, state[str(number)])


def make_optimizer(model: nn.Module) -> kronfac.KFAC:
    base = AdamW(model.parameters(), lr=0.01)
    return kfac(model, base, factor_every=2, refresh_every=4, momentum=0.5)


class Run:
    """Model, optimizers and schedule; ``meta`` says how the model is made."""

    def __init__(self, meta: bool = True, checkpointed: bool = True) -> None:
        with torch.device("meta" if meta else "cpu"):
            self.model = Network(checkpointed)
        self.model.to_empty(device="cpu")
        self.model.init_weights()
        self.optimizers = Optimizers([self.model], make_optimizer)
        self.schedules = [
            LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
            for optimizer in self.optimizers.optimizers
        ]

    def train(self, numbers: range) -> None:
        for number in numbers:
            self.optimizers.zero_grad()
            loss_of(self.model, batch(number)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
            self.optimizers.step()
            for schedule in self.schedules:
                schedule.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": self.optimizers.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        self.optimizers.load_state_dict(state["optimizer"])


@pytest.mark.parametrize(("meta", "checkpointed"), [(True, False), (False, True), (True, True)])
def test_meta_tensors_and_checkpointed_blocks_change_nothing(
    meta: bool, checkpointed: bool
) -> None:
    plain, run = Run(meta=False, checkpointed=False), Run(meta, checkpointed)
    plain.train(range(STEPS))
    run.train(range(STEPS))
    assert_same(parameters(run.model), parameters(plain.model))


def resumed(half: Run, state: dict[str, Any]) -> Run:
    run = Run()
    run.load(state)
    for new, old in zip(run.schedules, half.schedules, strict=True):
        new.load_state_dict(old.state_dict())
    run.train(range(3, STEPS))
    return run


def test_a_state_in_memory_resumes_bit_for_bit() -> None:
    whole, half = Run(), Run()
    whole.train(range(STEPS))
    half.train(range(3))
    run = resumed(half, copy.deepcopy(half.state()))
    assert_same(parameters(run.model), parameters(whole.model))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_in_files_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, half = Run(), Run()
    whole.train(range(STEPS))
    half.train(range(3))
    dcp.save(half.state(), checkpoint_id=tmp_path, no_dist=True)
    state = Run().state()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert_same(parameters(resumed(half, state).model), parameters(whole.model))
