"""Inputs that stand for all samples: no split of the batch changes their statistics."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import kronfac
from tests.distributed.equivalence import (
    SCHEMES,
    Case,
    alone,
    assert_equals_one_process,
    assert_near,
    case,
    double_precision,
    on_ranks,
)
from tests.distributed.models import TOKENS
from tests.distributed.ranks import run


def split(**settings: Any) -> Case:
    """A batch that no number of ranks divides into as many samples as there are positions."""
    return case("positions", samples=18, **settings)


CASES = [split(steps=4), split(solver="cholesky", steps=3)]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_equal_one_process(name: str, size: int) -> None:
    by_rank = run(size, on_ranks, name, SCHEMES[name], CASES)
    for one in CASES:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


OTHERS = [
    split(steps=4, uneven=True),
    split(steps=4, micro=2),
    split(steps=3, sharing="reduce"),
    split(steps=3, fisher="exact"),
    split(steps=5, factor_every=2, refresh_every=4),
    split(steps=3, loss_average="token"),
]


def test_with_uneven_shards_micro_batches_and_other_statistics() -> None:
    by_rank = run(3, on_ranks, "comm-opt", "comm-opt", OTHERS)
    for one in OTHERS:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.parametrize("micro", [2, 3, 18])
@pytest.mark.parametrize("options", [{}, {"fisher": "exact"}, {"loss_average": "token"}], ids=str)
def test_micro_batches_are_one_batch(micro: int, options: dict[str, Any]) -> None:
    whole = alone(split(steps=3, **options))
    pieces = alone(split(steps=3, micro=micro, **options))
    if micro < 18:
        assert_near(pieces.parameters, whole.parameters, f"{micro} micro-batches")
    else:  # of one sample each: nothing shows that positions stand for more than one
        assert all(bool(value.isfinite().all()) for value in pieces.parameters.values())


# --- what the statistics are -----------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.positions = nn.Embedding(TOKENS + 1, 3)
        self.head = nn.Linear(3, 2)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(x.shape[1])
        self.embedded = self.positions(order if self.flat else order[None])
        out: Tensor = self.head(torch.tanh(x + self.embedded)).mean(1)
        return out


def factors(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=1)
    optimizer.zero_grad()
    for x in batches:
        (F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)) / len(batches)).backward()
    optimizer.step()
    entry = optimizer.state_dict()["state"][0]
    return {name: entry[f"kronfac.{name}.sum"] / entry[f"kronfac.{name}.count"] for name in "AG"}


@pytest.mark.parametrize("samples", [TOKENS, 6])  # as many as positions, or not
@pytest.mark.parametrize("flat", [False, True])
def test_they_are_those_of_the_gradient_summed_over_all_samples(flat: bool, samples: int) -> None:
    with double_precision():
        torch.manual_seed(0)
        model = Net(flat)
        x = torch.randn(samples, TOKENS, 3)
        loss = F.cross_entropy(model(x), torch.zeros(samples, dtype=torch.long))
        (grad,) = torch.autograd.grad(loss, model.embedded)
        summed = samples * grad.reshape(TOKENS, 3)
        del model.embedded
        expected = {
            "A": torch.tensor([1 / TOKENS] * TOKENS + [0.0]),
            "G": summed.T @ summed / samples,
        }
        assert_close(factors(model, x), expected)
        assert_close(factors(model, *x.split(samples // 2)), expected)


def test_one_token_of_each_sample_is_an_ordinary_input() -> None:
    with double_precision():
        torch.manual_seed(0)
        labels = nn.Embedding(5, 3)
        model = nn.Sequential(labels, nn.Linear(3, 2))
        x = torch.tensor([0, 3, 1, 3, 2, 4])
        whole = factors(model, x)
        assert_close(factors(model, x[:3], x[3:]), whole)


def test_a_layer_whose_rows_change_in_size_says_so() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.project(torch.ones(1, int(x.shape[1]), 3))
            out: Tensor = (x + rows).mean((1, 2))
            return out

    model = Latents()
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for length in (4, 5):
        model(torch.randn(6, length, 3)).square().mean().backward()
    optimizer.step()
    assert "of changing size" in optimizer.summary()


# --- odd ends --------------------------------------------------------------------------------


class Growing(nn.Module):
    """Learned positions of which a batch uses as many as it is long."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, 3))
        self.project = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(self.positions[:, : x.shape[1]])
        out: Tensor = self.head(torch.tanh(x + rows)).mean(1)
        return out


def grow(model: nn.Module, start: int, end: int) -> list[Tensor]:
    """Weights after each step on batches of growing length."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    base = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = {"factor_every": 1, "refresh_every": 1, "damping": 0.1, "rescale": None}
    optimizer = kronfac.KFAC(model, base, **options)  # type: ignore[arg-type]
    history = []
    for number, length in enumerate((4, 4, 5, 2)):
        x = torch.randn(6, length, 3, generator=torch.Generator().manual_seed(number))[start:end]
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        history.append(torch.cat([p.detach().flatten() for p in plain.parameters()]))
    return history


def grow_on_rank(rank: int) -> list[Tensor]:
    with double_precision():
        torch.manual_seed(0)
        return grow(DistributedDataParallel(Growing()), 3 * rank, 3 * rank + 3)


def test_ranks_follow_rows_that_change_in_number() -> None:
    with double_precision():
        torch.manual_seed(0)
        expected = grow(Growing(), 0, 6)
    for found in run(2, grow_on_rank):
        assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_one_row_that_was_routed_to_a_layer_is_an_ordinary_row() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(3, 3)

        def forward(self, x: Tensor, rows: int) -> Tensor:
            out: Tensor = self.expert(x[:rows]).sum() + x.sum()
            return out

    model = Routed()
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=1, decay=1.0)
    for rows in (4, 1):
        optimizer.zero_grad()
        (model(torch.randn(8, 3), rows) / 8).backward()
        optimizer.step()
    assert float(optimizer.state_dict()["state"][0]["kronfac.A.count"]) == 5


def test_a_resumed_run_knows_what_stands_for_all_samples() -> None:
    def step(model: nn.Module, optimizer: kronfac.KFAC, *sizes: int) -> None:
        optimizer.zero_grad()
        for size in sizes:
            x = torch.randn(size, TOKENS, 3, generator=torch.Generator().manual_seed(size))
            target = torch.zeros(size, dtype=torch.long)
            (F.cross_entropy(model(x), target) / len(sizes)).backward()
        optimizer.step()

    def make() -> tuple[Net, kronfac.KFAC]:
        torch.manual_seed(0)
        model = Net(flat=False)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, kronfac.KFAC(model, base, factor_every=1, refresh_every=1, rescale=None)

    with double_precision():
        model, optimizer = make()
        step(model, optimizer, 2, 2)
        again, resumed = make()
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(model, optimizer, 1, 1, 1)  # nothing shows it now
        step(again, resumed, 1, 1, 1)
        assert torch.equal(model.positions.weight, again.positions.weight)


def load_after_a_lone_forward(rank: int) -> bool:
    """One rank has observed something when all of them load."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    model = DistributedDataParallel(plain)
    base = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=1, distribute="comm-opt")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate()
    saved = copy.deepcopy(optimizer.state_dict())
    if rank == 0:
        plain(torch.randn(4, 3))
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    return bool(plain.weight.isfinite().all())


def test_ranks_load_together_whatever_one_of_them_has_observed() -> None:
    assert all(run(2, load_after_a_lone_forward))
