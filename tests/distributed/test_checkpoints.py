"""Checkpoints know names, not ranks: they resume in any world, under any scheme."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import kronfac
from kronfac.distributed import layout
from kronfac.placement.costs import Compute, Link
from tests.distributed.equivalence import (
    Case,
    Parameters,
    alone,
    assert_near,
    bounds,
    case,
    double_precision,
    same_bits,
    take_step,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.training import assert_same, parameters

#: Refreshes at 0, 3 and 6; saved in the middle of an interval, when statistics are pending.
SAVED, STEPS = 5, 8
ONE = case("cnn", base="adamw", momentum=0.5, refresh_every=3, steps=STEPS)
SLOW = pytest.mark.slow
WITHOUT = "layer-parallel without DDP"
QUICK, SLUGGISH = Link(1e-6, 1e-12), Link(1e-2, 1e-6)


class Training:
    """A run that can be saved and resumed."""

    def __init__(self, name: str = "", case: Case = ONE) -> None:
        self.case = case
        self.kind = KINDS[case.model]
        self.plain = self.kind.model()
        distributed = dist.is_initialized()
        wrapped = distributed and "without DDP" not in name
        self.model: nn.Module = DistributedDataParallel(self.plain) if wrapped else self.plain
        options = dict(case.options)
        if distributed:
            options["distribute"] = scheme_of(name)
        self.optimizer = kronfac.KFAC(self.model, BASES[case.base](self.plain), **options)
        rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.start, self.end = bounds(case.samples, size)[rank]

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            x, y = self.kind.batch(number, self.case.samples)
            shard = (x[self.start : self.end], y[self.start : self.end])
            take_step(self.model, self.optimizer, shard, self.case)

    def throw_away(self) -> None:
        """Let DDP settle its buckets: it does so after its first backward."""
        with self.optimizer.no_capture():
            x, _ = self.kind.batch(0, self.case.samples)
            self.model(x[self.start : self.end]).sum().backward()
            self.model(x[self.start : self.end])
        self.optimizer.zero_grad()

    # --- one file ----------------------------------------------------------------------------

    def save_file(self, path: Path) -> None:
        self.optimizer.consolidate()
        full = self.optimizer.full_state_dict()
        if dist.get_rank() == 0:
            torch.save({"model": self.plain.state_dict(), "optimizer": full}, path)
        else:
            assert full is None
        dist.barrier()

    def load_file(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    # --- torch.distributed.checkpoint --------------------------------------------------------

    def save_dcp(self, path: Path) -> None:
        self.optimizer.consolidate()
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)

    def load_dcp(self, path: Path) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state)


def scheme_of(name: str) -> Any:
    return kronfac.Hybrid(0.5) if name == "hybrid" else name.partition(" ")[0]


@contextmanager
def measured(link: Link) -> Iterator[None]:
    """What "auto" and "spd" find, on a machine that may be busy with anything else."""
    with (
        mock.patch.object(layout, "measure_link", return_value=link),
        mock.patch.object(layout, "measure_compute", return_value=Compute()),
    ):
        yield


def save(rank: int, name: str, how: str, path: Path) -> Parameters:
    """Save in the middle and go on; parameters at the end."""
    with double_precision(), measured(QUICK):
        training = Training(name)
        training.train(0, SAVED)
        getattr(training, f"save_{how}")(path)
        training.train(SAVED, STEPS)
        assert same_bits(training.plain)
        return parameters(training.plain)


def resume(rank: int, name: str, how: str, path: Path, throw_away: bool = False) -> Parameters:
    # A file brings the scheme that was chosen; DCP reads no more than the scheme found now needs.
    with double_precision(), measured(QUICK if how == "dcp" else SLUGGISH):
        training = Training(name)
        if throw_away:
            training.throw_away()
        getattr(training, f"load_{how}")(path)
        training.train(SAVED, STEPS)
        assert same_bits(training.plain)
        return parameters(training.plain)


def save_alone(rank: int, how: str, path: Path) -> None:
    """In a world of one."""
    with double_precision():
        training = Training("replicated")
        training.train(0, SAVED)
        getattr(training, f"save_{how}")(path)


#: Who resumes, by who saved.
OTHERS = {
    "replicated": [("mem-opt", 3), (WITHOUT, 2)],
    "comm-opt": [("replicated", 1), ("spd", 2), ("layer-parallel", 3)],
    "mem-opt": [("comm-opt", 1), ("mem-opt", 2), ("replicated", 3)],
    "hybrid": [(WITHOUT, 1), ("hybrid", 2)],
    "layer-parallel": [("comm-opt", 2), ("mem-opt", 3)],
    WITHOUT: [("mem-opt", 1), ("replicated", 2), (WITHOUT, 3)],
    "spd": [("layer-parallel", 2)],
    "auto": [("auto", 3)],
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "file") for name in OTHERS),
        *(
            (name, "dcp") if name in ("mem-opt", "spd") else pytest.param(name, "dcp", marks=SLOW)
            for name in OTHERS
        ),
    ],
)
def test_four_ranks_resume_as_fewer_and_under_another_scheme(
    name: str, how: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    expected = alone(ONE).parameters
    for values in run(4, save, name, how, path):
        assert_near(values, expected, f"saved by {name}")
    for other, world_size in OTHERS[name]:
        for values in run(world_size, resume, other, how, path):
            assert_near(values, expected, f"saved by {name}, resumed by {world_size} × {other}")


@pytest.mark.parametrize("name", ["mem-opt", WITHOUT])
def test_a_file_of_ranks_resumes_without_any(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    run(3, save, name, "file", path)
    with double_precision():
        training = Training()
        training.load_file(path)
        training.train(SAVED, STEPS)
        assert_near(parameters(training.plain), alone(ONE).parameters, f"saved by {name}")


@pytest.mark.parametrize("how", ["file", "dcp"])
@pytest.mark.parametrize("name", ["comm-opt", "mem-opt", WITHOUT])
def test_one_rank_resumes_as_four(name: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    run(1, save_alone, how, path)
    for values in run(4, resume, name, how, path):
        assert_near(values, alone(ONE).parameters, f"resumed by {name}")


# --- bit for bit ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["file", "dcp"])
@pytest.mark.parametrize(
    "name",
    ["replicated", "comm-opt", "mem-opt", "local", "layer-parallel", WITHOUT, "spd", "auto"],
)
def test_two_ranks_resume_bit_for_bit(name: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    went_on = run(2, save, name, how, path)
    assert_same(run(2, resume, name, how, path), went_on)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_without_ddp_resume_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    went_on = run(world_size, save, WITHOUT, "file", path)
    assert_same(run(world_size, resume, WITHOUT, "file", path), went_on)


@pytest.mark.parametrize("name", ["comm-opt", "hybrid"])
def test_more_ranks_resume_bit_for_bit_once_ddp_has_settled(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    went_on = run(4, save, name, "file", path)
    assert_same(run(4, resume, name, "file", path, True), went_on)


# --- without consolidating --------------------------------------------------------------------


def save_in_the_middle(rank: int, name: str) -> tuple[list[str], list[str], bool]:
    """Warnings of two calls in the middle, of one after consolidating; whether it can be loaded."""
    with double_precision():
        training = Training(name)
        training.train(0, SAVED)
        with warnings.catch_warnings(record=True) as partial:
            warnings.simplefilter("always")
            training.optimizer.state_dict()
            state = training.optimizer.state_dict()
        other = Training(name)
        other.plain.load_state_dict(training.plain.state_dict())
        other.optimizer.load_state_dict(state)
        other.train(SAVED, STEPS)
        loadable = same_bits(other.plain)
        training.optimizer.consolidate()
        with warnings.catch_warnings(record=True) as whole:
            warnings.simplefilter("always")
            training.optimizer.state_dict()
        return [str(w.message) for w in partial], [str(w.message) for w in whole], loadable


@pytest.mark.parametrize("name", ["replicated", "comm-opt", "mem-opt", WITHOUT])
def test_a_state_in_the_middle_warns_once_and_can_be_loaded(name: str) -> None:
    for partial, whole, loadable in run(2, save_in_the_middle, name):
        assert len(partial) == 1
        assert "consolidate" in partial[0]
        assert whole == []
        assert loadable


def look_on_one_rank(rank: int) -> Parameters:
    with double_precision():
        training = Training("mem-opt")
        for number in range(STEPS):
            training.train(number, number + 1)
            if rank == 0 and number % 3 == 0:  # right after a refresh nothing is pending
                training.optimizer.state_dict()
        return parameters(training.plain)


def test_a_state_dict_on_one_rank_does_not_wait_for_others() -> None:
    for values in run(2, look_on_one_rank):
        assert_near(values, alone(ONE).parameters, "looked at")


def consolidate_often(rank: int, name: str) -> Parameters:
    with double_precision():
        training = Training(name)
        for number in range(STEPS):
            training.train(number, number + 1)
            training.optimizer.consolidate()
        return parameters(training.plain)


@pytest.mark.parametrize("name", ["replicated", "comm-opt", "mem-opt", "spd", WITHOUT])
def test_consolidating_changes_no_number(name: str) -> None:
    for values in run(3, consolidate_often, name):
        assert_near(values, alone(ONE).parameters, name)
