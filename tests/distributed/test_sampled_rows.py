"""``rows`` on ranks: together they choose what one process chooses, and agree on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.distributed.equivalence import (
    SCHEMES,
    assert_equals_one_process,
    bounds,
    case,
    double_precision,
    on_ranks,
)
from tests.distributed.ranks import run
from tests.test_sampled_rows import Pictures, batch
from tests.training import kfac, layers

#: 600 images of 16 positions, and 2,100 texts of 4: every second sample.
CASES = [
    case("cnn", samples=600, steps=4, rows=4096),
    case("transformer", samples=2100, steps=3, rows=4096, loss_average="token"),
]
OTHERS = [
    case("cnn", samples=600, steps=4, rows=4096, micro=2),
    case("cnn", samples=600, steps=4, rows=4096, uneven=True),
    case("cnn", samples=600, steps=4, rows=4096, fisher="exact"),
    case("cnn", samples=600, steps=4, rows=4096, solver="cholesky", refresh_every=1),
]


@pytest.mark.parametrize(
    "name", ["comm-opt", *(pytest.param(n, marks=pytest.mark.slow) for n in SCHEMES)]
)
def test_ranks_equal_one_process(name: str) -> None:
    cases = CASES if name == "comm-opt" else CASES[:1]
    by_rank = run(3, on_ranks, name, SCHEMES[name], cases)
    for one in cases:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.slow
def test_with_micro_batches_uneven_shards_and_other_statistics() -> None:
    by_rank = run(2, on_ranks, "comm-opt", "comm-opt", OTHERS)
    for one in OTHERS:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


def take_steps(model: nn.Module, optimizer: Any, numbers: range, share: slice, ranks: int) -> None:
    for number in numbers:
        x, y = (part[share] for part in batch(Pictures, number))
        optimizer.zero_grad()
        total = F.cross_entropy(model(x), y, reduction="sum")
        (total * ranks / Pictures.samples).backward()
        optimizer.step()


def made(wrapped: bool, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Pictures()
    seen = DistributedDataParallel(model) if wrapped else model
    base = SGD(model.parameters(), lr=0.01)
    return seen, kfac(seen, base, rows=4096, refresh_every=2, **options)


def pictures(rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Parameters after steps in one go and after a resume, and the strides, on uneven shards."""
    size = dist.get_world_size()
    with double_precision():
        share = slice(*bounds(Pictures.samples, size)[rank])
        options = {"loss_average": Pictures.samples / size}
        model, optimizer = made(True, **options)
        take_steps(model, optimizer, range(3), share, size)
        optimizer.consolidate()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        take_steps(model, optimizer, range(3, 6), share, size)
        other, resumed = made(True, **options)
        take_steps(other, resumed, range(1), share, size)  # DDP makes its buckets again
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        take_steps(other, resumed, range(3, 6), share, size)
        strides = {name: state.stride for name, state in layers(optimizer).items()}
        after = {name: state.stride for name, state in layers(resumed).items()}
        assert strides == after
        return dict(model.module.state_dict()), dict(other.module.state_dict()), strides


def test_positions_are_those_of_one_process_and_resume_bit_for_bit() -> None:
    with double_precision():
        model, optimizer = made(False)
        take_steps(model, optimizer, range(6), slice(None), 1)
    own = layers(optimizer)["mix"].stride
    assert (own.samples, own.positions) == (2, 2)
    by_rank = run(3, pictures)
    for rank, (went_on, resumed, strides) in enumerate(by_rank):
        assert strides["mix"].first == [0, 10, 21][rank]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(went_on[name], value, rtol=1e-8, atol=1e-10)
            assert torch.equal(resumed[name], went_on[name])
            assert torch.equal(went_on[name], by_rank[0][0][name])
