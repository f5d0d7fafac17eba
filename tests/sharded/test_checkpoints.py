"""Checkpoints of sharded training: any number of ranks, whole parameters, several formats."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import kronfac
from kronfac.layers.shards import place_like
from tests.distributed.equivalence import Case, alone, assert_near, case, double_precision
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.sharded.harness import Way, ignore_advice, shard, train, whole_parameters

#: Refreshes at 0, 3 and 6; saved in the middle of an interval, when statistics are pending.
SAVED = 5
TRAINED: dict[str, Any] = {"momentum": 0.5, "refresh_every": 3, "steps": 8}
ONE = case("transformer", base="adamw", **TRAINED)
#: Most layers of it are worked on by slices, and their momentum is saved as shards.
SLICED = case("gated", base="adamw", max_dim=8, **TRAINED)
#: Tensor parallelism divides one layer by its outputs, and the next by its inputs.
DIVIDED = case("mlp", base="adamw", **TRAINED)
#: Parameters without curvature, whose momentum is all that is saved.
UNSEEN = case("unseen", base="sgd", rescale="auto", nesterov=True, **TRAINED)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Training:
    """A run that can be saved and resumed; ``kind`` says who holds the parameters."""

    def __init__(self, kind: str, one: Case = ONE, **options: Any) -> None:
        self.kind = kind
        self.one = one
        self.plain: Any = KINDS[one.model].model()
        self.model = self.plain
        if kind in ("FSDP2", "HSDP"):
            shard(self.plain, Way(replicas=2 if kind == "HSDP" else 1))
        elif kind == "FSDP2 x TP":
            self._parallelize()
        elif kind == "DDP":
            self.model = DistributedDataParallel(self.plain)
        base = BASES[one.base](self.plain)
        self.optimizer = kronfac.KFAC(self.model, base, **dict(one.options), **options)

    def _parallelize(self) -> None:
        """Pairs of ranks divide the first layers; the pairs divide the batch."""
        pairs = dist.get_world_size() // 2
        mesh = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("dp", "tp"))
        plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.plain, mesh["tp"], plan)
        fully_shard(self.plain, mesh=mesh["dp"])

    def train(self, first: int, last: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        one = replace(self.one, steps=last)
        train(rank, self.model, self.optimizer, one, first, 2 if self.kind == "FSDP2 x TP" else 1)

    # --- formats --------------------------------------------------------------------------------

    def save(self, how: str, path: Path) -> None:
        self.optimizer.consolidate()
        if how == "file":
            weights = get_model_state_dict(
                self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
            full = self.optimizer.full_state_dict()
            if full is not None:
                torch.save({"model": weights, "optimizer": full}, path)
            if dist.is_initialized():
                dist.barrier()
        elif how == "flat":
            state = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
            dcp.save(
                {"model": get_model_state_dict(self.model), "optimizer": state}, checkpoint_id=path
            )
        else:
            weights, state = get_state_dict(self.model, self.optimizer)
            whole = {"model": weights, "optimizer": state}
            if how == "async":
                dcp.async_save(whole, checkpoint_id=path).result()
            else:
                dcp.save(whole, checkpoint_id=path)

    def load(self, how: str, path: Path) -> None:
        if how == "file":
            state = torch.load(path, weights_only=True)
            if self.kind == "FSDP2 x TP":  # torch does not cut whole tensors for such meshes
                with torch.no_grad():
                    for name, parameter in self.plain.named_parameters():
                        parameter.copy_(place_like(state["model"][name], parameter))
            else:
                options = StateDictOptions(full_state_dict=True)
                set_model_state_dict(self.model, state["model"], options=options)
            self.optimizer.load_state_dict(state["optimizer"])
        elif how == "flat":
            weights = get_model_state_dict(self.model)
            state = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
            set_model_state_dict(self.model, weights)
            set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)
        else:
            weights, state = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state
            )


@contextmanager
def quiet() -> Iterator[None]:
    with double_precision(), warnings.catch_warnings():
        ignore_advice()
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", ".*TypedStorage", UserWarning)
        warnings.filterwarnings("ignore", ".*torch.distributed.*", UserWarning)
        warnings.filterwarnings("error", ".*has no statistics of", UserWarning)
        yield


def save(rank: int, kind: str, how: str, path: Path, one: Case) -> Any:
    """Save in the middle and go on; parameters at the end."""
    with quiet():
        run_ = Training(kind, one)
        run_.train(0, SAVED)
        run_.save(how, path)
        run_.train(SAVED, one.steps)
        return whole_parameters(run_.plain)


def resume(rank: int, kind: str, how: str, path: Path, one: Case, slices: bool = True) -> Any:
    with quiet():
        options = {} if slices else {"distribute": kronfac.Distribute(slices=False)}
        run_ = Training(kind, one, **options)
        run_.load(how, path)
        run_.train(SAVED, one.steps)
        return whole_parameters(run_.plain)


def check(
    tmp_path: Path,
    how: str,
    first: tuple[int, str],
    second: tuple[int, str],
    one: Case = ONE,
    slices: bool = True,
) -> None:
    """Whoever saves and whoever resumes ends where one process ends."""
    expected = alone(one).parameters
    for found in run(first[0], save, first[1], how, tmp_path / "saved", one):
        assert_near(found, expected, "saved and went on")
    for found in run(second[0], resume, second[1], how, tmp_path / "saved", one, slices):
        assert_near(found, expected, "resumed")


@pytest.mark.parametrize("how", ["file", "dcp"])
def test_two_ranks_to_two(tmp_path: Path, how: str) -> None:
    check(tmp_path, how, (2, "FSDP2"), (2, "FSDP2"))


def test_slices_on_another_number_of_ranks(tmp_path: Path) -> None:
    check(tmp_path, "dcp", (2, "FSDP2"), (3, "FSDP2"), SLICED)


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("dcp", (2, "FSDP2"), (3, "FSDP2")),
        pytest.param("file", (3, "FSDP2"), (1, "one process"), marks=pytest.mark.slow),
        pytest.param("dcp", (2, "DDP"), (2, "FSDP2"), marks=pytest.mark.slow),
    ],
)
def test_parameters_without_curvature(tmp_path: Path, how: str, first: Any, second: Any) -> None:
    check(tmp_path, how, first, second, UNSEEN)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "dcp"])
def test_slices_that_are_exchanged_from_then_on(tmp_path: Path, how: str) -> None:
    check(tmp_path, how, (3, "FSDP2"), (3, "FSDP2"), SLICED, slices=False)


@pytest.mark.slow
@pytest.mark.parametrize("one", [ONE, SLICED], ids=["transformer", "slices"])
@pytest.mark.parametrize("how", ["file", "dcp", "flat", "async"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "FSDP2"), (3, "FSDP2")),
        ((3, "FSDP2"), (1, "FSDP2")),
        ((3, "FSDP2"), (2, "FSDP2")),
        ((2, "FSDP2"), (2, "DDP")),
        ((2, "DDP"), (3, "FSDP2")),
        ((2, "FSDP2"), (1, "one process")),
        ((1, "one process"), (2, "FSDP2")),
        ((4, "HSDP"), (3, "FSDP2")),
        ((2, "FSDP2"), (4, "HSDP")),
    ],
    ids=str,
)
def test_other_ranks(tmp_path: Path, how: str, first: Any, second: Any, one: Case) -> None:
    check(tmp_path, how, first, second, one)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "dcp", "flat", "async"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4, "FSDP2 x TP"), (4, "FSDP2 x TP")),
        ((4, "FSDP2 x TP"), (3, "FSDP2")),
        ((2, "FSDP2"), (4, "FSDP2 x TP")),
        ((2, "FSDP2 x TP"), (1, "one process")),
        ((2, "FSDP2 x TP"), (4, "FSDP2 x TP")),
    ],
    ids=str,
)
def test_tensor_parallelism(tmp_path: Path, how: str, first: Any, second: Any) -> None:
    check(tmp_path, how, first, second, DIVIDED)


def whole_state(rank: int, one: Case) -> Any:
    with quiet():
        run_ = Training("FSDP2", one)
        run_.train(0, 3)
        full = run_.optimizer.full_state_dict()
        return None if full is None else full["state"]


@pytest.mark.parametrize("one", [ONE, SLICED], ids=["transformer", "slices"])
def test_trap_9_the_gathered_state_is_complete(one: Case) -> None:
    first, second = run(2, whole_state, one)
    assert second is None
    solutions = [key for entry in first.values() for key in entry if ".solution." in key]
    with quiet():
        expected = Training("one process", one)
        expected.train(0, 3)
        state = expected.optimizer.state_dict()["state"]
    assert sorted(solutions) == sorted(
        key for entry in state.values() for key in entry if ".solution." in key
    )
    for index, entry in state.items():
        assert entry.keys() == first[index].keys()
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and "schedule" not in key:
                assert first[index][key].shape == value.shape, key
            if key in ("kronfac.momentum", "kronfac.coherence", "kronfac.history"):
                torch.testing.assert_close(first[index][key], value, rtol=1e-9, atol=1e-11)
