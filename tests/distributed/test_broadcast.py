"""Inputs that stand for all samples: no split of the batch changes their statistics."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
