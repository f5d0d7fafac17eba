"""FSDP2 equals one process: the quick core."""

from __future__ import annotations

import pytest

from tests.distributed.equivalence import case
from tests.sharded.harness import Way, check


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer", "shared"])
def test_every_kind_of_layer(model: str) -> None:
    check(2, (case(model, steps=4), Way()))


def test_three_ranks_with_uneven_and_empty_shards() -> None:
    check(3, (case("mlp", steps=4), Way("model")), (case("transformer", steps=4), Way("leaves")))
