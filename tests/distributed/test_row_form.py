"""``row_form`` on ranks: each has only its own rows, so all of them take the product form."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.step import row_form
from tests.distributed.equivalence import double_precision
from tests.distributed.ranks import run
from tests.test_row_form import WIDE, Net, batch, build, chosen, parameters, train
from tests.training import hooks, saved_and_loaded

OPTIONS: dict[str, Any] = {"momentum": 0.9, "nesterov": True}


def on_rank(rank: int, scheme: str) -> tuple[set[str], int, dict[str, Any], Any]:
    """What is chosen, hooks, parameters and the whole state after three steps on half batches."""
    with double_precision(), patch.object(row_form, "LEAST_SAVING", 0):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        base = SGD(model.parameters(), lr=0.002)
        settings = {"damping": 0.1, "rescale": None, "factor_every": 2, "refresh_every": 4}
        optimizer = kronfac.KFAC(
            model, base, solver="cholesky", distribute=scheme, **settings, **OPTIONS
        )
        size = dist.get_world_size()
        for number in range(3):
            x, y = (part.chunk(size)[rank] for part in batch(number))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        state = optimizer.full_state_dict()
        return chosen(optimizer), hooks(model.module.second), parameters(model.module), state


@pytest.mark.parametrize("scheme", ["replicated", "mem-opt"])
def test_ranks_take_the_product_form(
    scheme: str, double_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_form, "LEAST_SAVING", 0)
    alone = train(build(**OPTIONS), numbers=range(3))
    assert chosen(alone) == set(WIDE)
    found = run(2, on_rank, scheme)
    for names, count, values, _ in found:
        assert not names
        assert count == 1  # that of statistics
        torch.testing.assert_close(values, parameters(alone.model), rtol=1e-10, atol=1e-12)
    other = build(**OPTIONS)
    other.model.load_state_dict(found[0][2])
    other.load_state_dict(saved_and_loaded(found[0][3]))
    train(other, numbers=range(3, 7))
    train(alone, numbers=range(3, 7))
    assert chosen(other) == set(WIDE)
    torch.testing.assert_close(
        parameters(other.model), parameters(alone.model), rtol=1e-10, atol=1e-12
    )


def one_rank(rank: int) -> set[str]:
    """What a group of a single process chooses."""
    with double_precision(), patch.object(row_form, "LEAST_SAVING", 0):
        return chosen(train(build(**OPTIONS), numbers=range(2)))


def test_a_group_of_one_rank_has_all_rows() -> None:
    assert run(1, one_rank) == [set(WIDE)]
