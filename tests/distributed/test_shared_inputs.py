"""Shared inputs on ranks: the numbers of one process, and statistics and solutions that are sent once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import SCHEMES
from tests.distributed.ranks import run
from tests.test_shared_inputs import SHARED, Net, batch, groups

#: Schemes in which all ranks work on all layers; in others, layers of the same ranks share inputs.
TOGETHER = ("replicated", "comm-opt", "spd")
#: Steps at which the inputs of a group are not the same, by rank; "one" means on the last one only.
APART = {"never": [], "one": [3], "late": [5]}
OPTIONS: dict[str, dict[str, Any]] = {
    "eigen": {},
    "cholesky": {"solver": "cholesky"},
    "deferred": {"factor_every": 1, "refresh_every": 3},
    "staggered": {"stagger": True, "refresh_every": 4},
    "Eva": {"method": "Eva"},
}


def make(
    wrapped: bool, model: nn.Module | None = None, method: str = "KFAC", **options: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = (model or Net()).double()
    seen = DistributedDataParallel(model) if wrapped else model
    options = {"factor_every": 1, "refresh_every": 1, "momentum": 0.9, **options}
    return seen, getattr(kronfac, method)(seen, SGD(model.parameters(), lr=0.02), **options)


def step(model: nn.Module, optimizer: kronfac.KFAC, x: Tensor, samples: int) -> None:
    optimizer.zero_grad()
    (model(x).square().sum() / samples).backward()
    optimizer.step()


def shard(x: Tensor, rank: int) -> Tensor:
    return x.tensor_split(dist.get_world_size())[rank]


def data(number: int) -> Tensor:
    return torch.cat([batch(2 * number), batch(2 * number + 1)[:1]])


def train(
    rank: int, name: str, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], tuple[dict[str, Tensor], list[list[str]]]]:
    found = {}
    for options, apart in cases:
        model, optimizer = make(
            "without DDP" not in name, distribute=SCHEMES[name], **OPTIONS[options]
        )
        size = dist.get_world_size()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for number in range(7):
            inner.apart = number in APART[apart] and rank == size - 1
            step(model, optimizer, shard(data(number), rank), 6 // size)
        found[options, apart] = dict(inner.state_dict()), groups(optimizer)
        optimizer.detach()
    return found


class Reference(Net):
    """The net of one process, of which the last samples see another input."""

    ranks = 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.apart:
            return super().forward(x)
        *same, last = x.chunk(self.ranks)
        self.apart = False
        first = super().forward(torch.cat(same))
        self.apart = True
        return torch.cat([first, super().forward(last)])


def in_one_process(options: str, apart: str, ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Reference()
    model.ranks = ranks
    _, optimizer = make(False, model, share_inputs=False, **OPTIONS[options])
    for number in range(7):
        model.apart = number in APART[apart]
        step(model, optimizer, data(number), 6)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("comm-opt", "mem-opt") else pytest.param(n, marks=pytest.mark.slow)
        for n in SCHEMES
    ],
)
def test_ranks_equal_one_process(name: str) -> None:
    cases = [("eigen", "one"), ("deferred", "late"), ("staggered", "one"), ("cholesky", "never")]
    cases += [("eigen", "never"), ("deferred", "one"), ("Eva", "one")]
    if name.startswith("layer-parallel"):
        cases = [one for one in cases if one[0] != "staggered"]
    by_rank = run(2, train, name, cases)
    for options, apart in cases:
        expected = in_one_process(options, apart, 2)
        for found, shared in (one[options, apart] for one in by_rank):
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9)
                assert torch.equal(found[key], by_rank[0][options, apart][0][key])
            if name in TOGETHER:
                assert shared == (SHARED if apart == "never" else SHARED[1:])


def sent(rank: int, name: str) -> list[dict[str, int]]:
    """Bytes by phase, without and with shared inputs."""
    found = []
    for shares in (False, True):
        model, optimizer = make(True, distribute=SCHEMES[name], share_inputs=shares)
        for number in range(2):
            step(model, optimizer, shard(data(number), rank), 3)
        found.append(dict(optimizer.stats()["bytes"]))
        optimizer.detach()
    return found


def width(net: Net, name: str) -> int:
    if name.startswith("attend."):
        return net.attend.embed_dim + 1
    layer = net.get_submodule(name)
    assert isinstance(layer.weight, Tensor)
    return layer.weight[0].numel() + 1


@pytest.mark.parametrize("name", ["replicated", "comm-opt"])
def test_what_is_shared_is_sent_once(name: str) -> None:
    """Each member but the first saves a triangle of A, and vectors and values where they travel."""
    widths = [width(Net(), member) for group in SHARED for member in group[1:]]
    triangles = 8 * sum(d * (d + 1) // 2 for d in widths)
    solutions = 8 * sum(d * (d + 1) for d in widths)
    by_rank = run(2, sent, name)
    for alone, shared in by_rank:
        assert alone["reduce"] - shared["reduce"] == 2 * triangles
        assert alone["spread"] == shared["spread"]
    saved = sum(alone["share"] - shared["share"] for alone, shared in by_rank)
    assert saved == (2 * 2 * solutions if name == "comm-opt" else 0)


def resumed(rank: int, name: str) -> tuple[bool, list[list[str]], list[list[str]]]:
    size = dist.get_world_size()
    model, optimizer = make(True, distribute=SCHEMES[name], refresh_every=2)
    for number in range(3):
        step(model, optimizer, shard(data(number), rank), 6 // size)
    optimizer.consolidate()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, twin = make(True, distribute=SCHEMES[name], refresh_every=2)
    step(other, twin, shard(data(9), rank), 6 // size)
    other.load_state_dict(saved[0])
    twin.load_state_dict(saved[1])
    after = groups(twin)
    for number in range(3, 6):
        step(model, optimizer, shard(data(number), rank), 6 // size)
        step(other, twin, shard(data(number), rank), 6 // size)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), after, groups(twin)


@pytest.mark.parametrize("name", ["mem-opt", pytest.param("comm-opt", marks=pytest.mark.slow)])
def test_resumes_bit_for_bit(name: str) -> None:
    for same, after, later in run(2, resumed, name):
        assert same
        assert after == later
        assert after == SHARED or name not in TOGETHER


def continued(
    rank: int, name: str, saved: tuple[Any, Any]
) -> tuple[dict[str, Tensor], list[list[str]], list[set[int]]]:
    """Go on from what one process has saved; also by group, the columns of its members."""
    model, optimizer = make(True, distribute=SCHEMES[name], refresh_every=2)
    inner: Any = model.module
    inner.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    size = dist.get_world_size()
    for number in range(3, 6):
        step(model, optimizer, shard(data(number), rank), 6 // size)
    placed = optimizer.placement.assignments
    columns = [{placed[member].column for member in group} for group in groups(optimizer)]
    return dict(inner.state_dict()), groups(optimizer), columns


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mem-opt", 2),
        pytest.param("mem-opt", 3, marks=pytest.mark.slow),
        pytest.param("comm-opt", 3, marks=pytest.mark.slow),
        pytest.param("layer-parallel", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_from_one_process(name: str, size: int) -> None:
    model, optimizer = make(False, refresh_every=2)
    for number in range(3):
        step(model, optimizer, data(number), 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for number in range(3, 6):
        step(model, optimizer, data(number), 6)
    for found, shared, columns in run(size, continued, name, saved):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9)
        assert all(len(one) == 1 for one in columns)
        assert shared == SHARED or name not in TOGETHER


def read_again(rank: int, name: str, path: str) -> tuple[float, list[list[str]]]:
    """The largest difference to the job that went on, between refreshes, and what shares an input."""
    size = dist.get_world_size()
    model, optimizer = make(True, distribute=SCHEMES[name], refresh_every=8)
    for number in range(3):
        step(model, optimizer, shard(data(number), rank), 6 // size)
    optimizer.consolidate()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    other, twin = make(True, distribute=SCHEMES[name], refresh_every=8)
    weights, state = get_state_dict(other, twin)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(
        other, twin, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )
    for number in range(3, 6):
        step(model, optimizer, shard(data(number), rank), 6 // size)
        step(other, twin, shard(data(number), rank), 6 // size)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs), groups(twin)


@pytest.mark.parametrize(
    "name", ["comm-opt", "mem-opt", pytest.param("hybrid", marks=pytest.mark.slow)]
)
def test_checkpoints_that_are_read_in_pieces_keep_solutions(name: str, tmp_path: Path) -> None:
    """Such a loader fills the tensors that this placement has, and no others."""
    for difference, shared in run(4 if name == "hybrid" else 2, read_again, name, str(tmp_path)):
        assert difference < 1e-12
        assert shared == SHARED or name not in TOGETHER
