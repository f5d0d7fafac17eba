"""Resumes after which ranks do not do what they did before, and resumes of resumes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import kronfac
from tests.distributed import test_checkpoints
from tests.distributed.equivalence import (
    Parameters,
    alone,
    assert_near,
    bounds,
    double_precision,
)
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.distributed.test_checkpoints import ONE, SAVED, STEPS, WITHOUT
from tests.training import parameters

SCHEMES = ["comm-opt", "mem-opt", "layer-parallel", WITHOUT]
WAYS = ["file", "dcp", "parts"]


class Training(test_checkpoints.Training):
    """The same, also with a file for each rank."""

    def save_parts(self, path: Path) -> None:
        self.optimizer.consolidate()
        state = {"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, f"{path}-{dist.get_rank()}")
        dist.barrier()

    def load_parts(self, path: Path) -> None:
        self.load_file(Path(f"{path}-{dist.get_rank()}"))


def go_on(
    rank: int,
    name: str,
    switches: dict[str, Any],
    how: str,
    paths: list[Path | None],
    steps: tuple[int, int],
) -> tuple[Parameters, dict[str, Any]]:
    """Load from the first path, take steps, save to the second; parameters and who does what."""
    before, after = paths
    with double_precision():
        scheme = kronfac.Distribute(name.partition(" ")[0], **switches)
        with mock.patch.object(test_checkpoints, "scheme_of", return_value=scheme):
            training = Training(name)
        if before is not None:
            getattr(training, f"load_{how}")(before)
        training.train(*steps)
        if after is not None:
            getattr(training, f"save_{how}")(after)
        placement = training.optimizer.placement
        assert placement is not None
        return parameters(training.plain), placement.assignments


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_resume_that_would_share_out_otherwise_loses_nothing(
    name: str, world_size: int, how: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    turns: dict[str, Any] = {"balanced": False}
    saved = run(world_size, go_on, name, {}, how, [None, path], (0, SAVED))
    planned = run(world_size, go_on, name, turns, how, [None, None], (0, 1))
    assert saved[0][1] != planned[0][1]  # or the test would show nothing
    for rank, (values, _) in enumerate(
        run(world_size, go_on, name, turns, how, [path, None], (SAVED, STEPS))
    ):
        assert_near(values, alone(ONE).parameters, f"rank {rank}")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", SCHEMES)
def test_what_was_loaded_can_be_saved_again(name: str, how: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(2, go_on, name, {}, how, [None, first], (0, 2))
    run(2, go_on, name, {}, how, [first, second], (2, SAVED))
    for rank, (values, _) in enumerate(
        run(2, go_on, name, {}, how, [second, None], (SAVED, STEPS))
    ):
        assert_near(values, alone(ONE).parameters, f"rank {rank}")


# --- groups that come later -------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer between parameters that belong to none."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(5))
        self.layer = nn.Linear(5, 3)
        self.large = nn.Parameter(torch.zeros(3, 40))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.small) + self.large.sum(1)


def train_in_groups(rank: int, world_size: int) -> Parameters:
    """The large parameter joins after some steps, when the small one has state."""
    with double_precision():
        torch.manual_seed(0)
        model = Scaled()
        first = [model.small, *model.layer.parameters()]
        optimizer = kronfac.KFAC(
            model, AdamW(first, lr=0.01), damping=0.1, rescale="graft", distribute="layer-parallel"
        )
        for number in range(6):
            if number == 3:
                optimizer.add_param_group({"params": [model.large]})
            x, y = KINDS["mlp"].batch(number, 4)
            start, end = bounds(4, world_size)[rank]
            optimizer.zero_grad()
            F.cross_entropy(model(x[start:end]), y[start:end]).backward()
            optimizer.step()
        return parameters(model)


def test_parameters_keep_their_owner_when_others_join() -> None:
    expected = train_in_groups(0, 1)
    for rank, values in enumerate(run(2, train_in_groups, 2)):
        assert_near(values, expected, f"rank {rank}")
