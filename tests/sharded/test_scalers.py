"""Gradient scalers on sharded models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kronfac
from tests.distributed.equivalence import Parameters, alone, assert_near, case, double_precision
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.sharded.harness import Way, shard, whole_parameters

ONE = case("mlp", steps=4)


def scaled(rank: int, sharded: bool, bad: int) -> tuple[Parameters, float]:
    """Steps with a scaler, of which one overflows on the first rank only."""
    with double_precision():
        plain: nn.Module = KINDS["mlp"].model()
        model: Any = shard(plain, Way()) if sharded else DistributedDataParallel(plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        base = BASES["momentum"](plain)
        optimizer = kronfac.KFAC(model, base, grad_scaler=scaler, **dict(ONE.options))
        for number in range(ONE.steps):
            x, y = (part[6 * rank : 6 * rank + 6] for part in KINDS["mlp"].batch(number, 12))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * torch.inf if (number, rank) == (bad, 0) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return whole_parameters(plain), scaler.get_scale()


def test_a_scaler_changes_nothing() -> None:
    for found, scale in run(2, scaled, True, -1):
        assert_near(found, alone(ONE).parameters, "scaled")
        assert scale == 1024.0


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all() -> None:
    expected = run(2, scaled, False, 1)
    for (found, scale), (wanted, _) in zip(run(2, scaled, True, 1), expected, strict=True):
        assert_near(found, wanted, "as under DDP")
        assert scale == 512.0
