"""What loaders do before the first forward, and checkpoints that hold the state of one rank only."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.distributed.equivalence import alone, assert_near, case, double_precision
from tests.distributed.ranks import run
from tests.sharded.harness import Way, build, train, whole_parameters

#: Statistics at 0, 4 and 8, solutions at 0 and 8: neither right after the state was saved.
OPTIONS: dict[str, Any] = {"factor_every": 4, "refresh_every": 8}
ONE = case("mlp", steps=10, **OPTIONS)
FIRST, SAVED = case("mlp", steps=5, **OPTIONS), 5
BEFORE = Way(order="before")


def saves(rank: int, path: Path) -> None:
    with double_precision():
        model, optimizer = build(FIRST, Way())
        train(rank, model, optimizer, FIRST)
        optimizer.consolidate()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def resumes(rank: int, path: Path) -> Any:
    """An optimizer that was made before the model was sharded, as Accelerate does it."""
    with double_precision():
        model, optimizer = build(FIRST, BEFORE)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        train(rank, model, optimizer, ONE, first=SAVED)
        return whole_parameters(model)


def test_state_is_loaded_before_the_first_forward(tmp_path: Path) -> None:
    run(2, saves, tmp_path / "saved")
    for found in run(2, resumes, tmp_path / "saved"):
        assert_near(found, alone(ONE).parameters, "resumed")


def gathers_by_torch(rank: int) -> tuple[list[str], set[str], set[str], bool]:
    """The names of layers that a rank is warned of; those that it works on; those solved afterwards."""
    with double_precision():
        model, optimizer = build(FIRST, Way())
        train(rank, model, optimizer, FIRST)
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer, options=full)
        model, optimizer = build(FIRST, Way())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_optimizer_state_dict(model, optimizer, state, options=options)
        own = {s.name for s in optimizer.layers if s.is_worker}
        # Not a step at which statistics are due, but for what is missing.
        train(rank, model, optimizer, case("mlp", steps=6, **OPTIONS), first=SAVED)
        solved = {s.name for s in optimizer.layers if s.solution is not None and has_values(s)}
        told = [str(one.message) for one in caught if "no statistics of" in str(one.message)]
        return told, own, solved, dist.get_rank() == 0


def has_values(state: Any) -> bool:
    return all(bool((value != 0).any()) for value in state.solution.values())


def test_trap_9_a_state_gathered_by_torch_says_what_it_lacks() -> None:
    for told, own, solved, is_first in run(2, gathers_by_torch):
        assert len(told) == (0 if is_first else 1), told
        assert is_first or all(repr(name) in told[0] for name in own)
        assert solved == own
