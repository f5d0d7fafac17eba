"""A compiled model on ranks gives the numbers of one process in eager mode."""

import warnings
from typing import Any

import pytest
import torch

from tests.distributed.equivalence import (
    SCHEMES,
    Case,
    Outcome,
    assert_equals_one_process,
    case,
    on_ranks,
)
from tests.distributed.ranks import run


def compiled_on_ranks(rank: int, name: str, scheme: Any, cases: list[Case]) -> dict[str, Outcome]:
    torch._dynamo.reset()
    # Of torch, when a compiled part begins inside the model.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    try:
        return on_ranks(rank, name, scheme, cases)
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comm-opt", "mem-opt", "layer-parallel without DDP", "spd"])
@pytest.mark.parametrize("compiled", ["before", "after", "later"])
def test_ranks_equal_one_process(name: str, compiled: str) -> None:
    cases = [
        case("mlp", compiled=compiled, refresh_every=3, steps=5),
        case("cnn", compiled=compiled, micro=2, samples=24, steps=4),
    ]
    by_rank = run(2, compiled_on_ranks, name, SCHEMES[name], cases, limit=500)
    for one in cases:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])
