"""What the summary says of ranks."""

import re
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.distributed.distributed import Distributed
from kronfac.optimizer.summary import _bytes
from kronfac.placement.place import Assignment, Placement, Task
from tests.distributed.fake import world
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.test_summary import MODELS
from tests.training import mlp

SCHEMES: dict[str, Any] = {
    "auto": "auto",
    "replicated": "replicated",
    "comm-opt": "comm-opt",
    "mem-opt": "mem-opt",
    "hybrid": kronfac.Hybrid(0.5),
    "local": "local",
    "layer-parallel": "layer-parallel",
    "spd": "spd",
}


def made(model: nn.Module, scheme: Any = "comm-opt", **options: Any) -> kronfac.KFAC:
    return kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), distribute=scheme, **options)


def line(optimizer: kronfac.KFAC) -> str:
    """What is said of all ranks."""
    return optimizer.summary().splitlines()[1]


def owners(optimizer: kronfac.KFAC) -> list[str]:
    """The column of owners, by layer."""
    lines = optimizer.summary().splitlines()
    (header,) = [number for number, one in enumerate(lines) if one.startswith("layer ")]
    start = lines[header].index("owner")
    end = lines[header].index("memory")
    found = []
    for one in lines[header + 2 :]:
        if " layers, " in one:
            break
        found.append(re.split(r" {2,}", one[start:end].strip())[0])
    return found


# --- the line about ranks --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("comm-opt", "comm-opt: 4 of 4 ranks work on each layer; this is rank 1."),
        ("replicated", "replicated: 4 of 4 ranks work on each layer; this is rank 1."),
        ("mem-opt", "mem-opt: 1 of 4 ranks works on each layer; this is rank 1."),
        (kronfac.Hybrid(0.5), "hybrid(0.5): 2 of 4 ranks work on each layer; this is rank 1."),
        (kronfac.Hybrid(0.3), "hybrid(0.3): 1 of 4 ranks works on each layer; this is rank 1."),
    ],
    ids=str,
)
def test_scheme_and_ranks_are_named(scheme: Any, said: str) -> None:
    with world(4, 1):
        assert line(made(mlp(), scheme)) == said


def test_the_choice_of_auto_is_named() -> None:
    with world(4, 3):
        optimizer = made(mlp(), "auto")
        assert optimizer.placement is not None
        assert line(optimizer).startswith(f"auto, {optimizer.placement.scheme}: ")
        assert line(optimizer).endswith("; this is rank 3.")


def test_one_process_says_nothing_of_ranks() -> None:
    summary = made(mlp()).summary()
    assert "rank" not in summary
    assert "owner" not in summary
    with world(1, 0):
        assert made(mlp()).summary() == summary


# --- who solves ------------------------------------------------------------------------------


def test_owners_of_each_scheme() -> None:
    """Three layers over three ranks."""
    with world(3, 0):
        assert owners(made(mlp(), "replicated")) == ["all"] * 3
        assert sorted(owners(made(mlp(), "mem-opt"))) == ["0", "1", "2"]
        for shown in owners(made(mlp(), "comm-opt")):
            assert set(shown.split(",")) <= {"0", "1", "2"}


def test_owners_of_parts_and_of_divided_parts() -> None:
    with world(8, 2):
        optimizer = made(mlp(), "comm-opt")
        placed, coordinator = optimizer.placement, optimizer._preconditioner.coordinator
        assert placed is not None
        assert isinstance(coordinator, Distributed)

        def shown(**tasks: Task) -> str:
            assignments = {**placed.assignments, "0": Assignment(0, tasks)}
            coordinator.use(Placement(placed.scheme, placed.grid, assignments))
            return owners(optimizer)[0]

        assert shown(A=Task(5), G=Task(5)) == "5"
        assert shown(A=Task(0), G=Task(3)) == "0,3"
        assert shown(A=Task(), G=Task()) == "all"
        assert shown(A=Task(), G=Task(3)) == "all,3"
        assert shown(A=Task(split=True, ranks=(0, 2, 3)), G=Task(1)) == "0+2+3,1"
        assert shown(A=Task(split=True), G=Task(1)) == "8 ranks,1"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [4, 4096])
def test_realistic_models_fit_into_80_columns(model: str, size: int) -> None:
    for scheme in SCHEMES.values():
        with world(size, size - 1):
            optimizer = made(MODELS[model](), scheme, solver="cholesky")
            widest = max(optimizer.summary().splitlines(), key=len)
            assert len(widest) <= 80, f"{scheme}: {widest}"
            optimizer.detach()


# --- memory ----------------------------------------------------------------------------------


def measured(rank: int, scheme: Any, wrapped: bool, options: dict[str, Any]) -> dict[str, Any]:
    """What the summary of a rank prints, and what is there after refreshes at every step."""
    kind = KINDS["cnn"]
    plain = kind.model()
    model = DistributedDataParallel(plain) if wrapped else plain
    optimizer = made(model, scheme, factor_every=1, refresh_every=1, **options)
    printed = optimizer.summary()
    for number in range(3):
        x, y = kind.batch(10 * number + rank, 3)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    held = messages = 0
    ours = optimizer._preconditioner
    for state in ours.layers.values():
        kept = [running.sum for running in state.running.values()]
        kept += [*(state.solution or {}).values(), *state.buffers.values()]
        held += sum(tensor.nbytes for tensor in kept if tensor is not None)
    coordinator = ours.coordinator
    assert isinstance(coordinator, Distributed)
    ownership = coordinator.ownership
    buckets = [one for group in coordinator.rounds.buckets.values() for one in group]
    for bucket in [*buckets, *ownership._buckets]:
        messages += bucket.flat.tensor.nbytes
        messages += sum(tensor.nbytes for tensor in bucket._scratch.values())
    broadcasts = [*(ownership._broadcasts or []), *coordinator.spreading._broadcasts]
    messages += sum(broadcast.flat.tensor.nbytes for broadcast in broadcasts)
    return {"printed": printed, "held": held, "messages": messages}


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "solver": "cholesky"}],
    ids=["eigen", "momentum and inverses"],
)
@pytest.mark.parametrize("name", [*SCHEMES, "layer-parallel without DDP"])
def test_the_memory_printed_is_what_this_rank_holds(name: str, options: dict[str, Any]) -> None:
    scheme = SCHEMES.get(name, "layer-parallel")
    ranks = run(3, measured, scheme, "without" not in name, options)
    for one in ranks:
        found = re.search(r"Memory of this rank: ([\d.]+ \w?B) for statistics", one["printed"])
        assert found is not None
        assert found[1] == _bytes(one["held"])
        found = re.search(r"and ([\d.]+ \w?B) for messages", one["printed"])
        assert found is not None
        assert found[1] == _bytes(one["messages"])


def test_the_memory_of_ranks_adds_up_where_each_layer_has_one_owner() -> None:
    with world(1, 0):
        alone = sum(s.held_bytes for s in made(mlp())._preconditioner.layers.values())
    total = 0
    for rank in range(3):
        with world(3, rank):
            optimizer = made(mlp(), "mem-opt")
            total += sum(s.held_bytes for s in optimizer._preconditioner.layers.values())
    assert total == alone


# --- stats -----------------------------------------------------------------------------------


def test_every_key_of_stats_is_documented() -> None:
    documented = re.findall(r"``(\w+)``", kronfac.KFAC.stats.__doc__ or "")
    with world(3, 0):
        assert set(made(mlp()).stats()) <= set(documented)
    assert set(made(mlp()).stats()) <= set(documented)
    assert {"learning_rate", "momentum"} <= set(documented)
