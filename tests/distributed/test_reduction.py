"""Buckets leave when everything is in them, and nothing is written into them afterwards."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac.distributed.channel import Arrival
from kronfac.distributed.flat import Item
from kronfac.distributed.reduction import Bucket, Reduction


class Doubling:
    """Stands for two ranks with the same tensors, and is as fast as a channel can be."""

    rank = 0

    def all_reduce(self, phase: Any, flat: Tensor) -> Arrival:
        flat.mul_(2)
        return Arrival(phase)


def bucket(*keys: str) -> Bucket:
    items = [Item(key, (2,), torch.float32, torch.device("cpu")) for key in keys]
    return Bucket(items, Doubling())  # type: ignore[arg-type]


def value(key: str) -> Tensor:
    return torch.full((2,), float(ord(key)))


def sums(reduction: Reduction) -> dict[str, Tensor]:
    return {key: total for arrived in reduction.arrivals() for key, total in arrived.items()}


@pytest.mark.parametrize("early", ["", "a", "b", "c", "ab", "bc", "ca", "abc", "cab"])
def test_every_sum_is_whole_whatever_was_ready_early(early: str) -> None:
    reduction = Reduction([bucket("a", "b"), bucket("c")])
    for key in early:
        reduction.offer(key, value(key))
    reduction.complete(value)
    for key, total in sums(reduction).items():
        assert torch.equal(total, 2 * value(key)), key


def test_what_was_ready_early_but_has_not_left_is_replaced() -> None:
    reduction = Reduction([bucket("a", "b")])
    reduction.offer("b", torch.zeros(2))
    reduction.complete(value)
    assert torch.equal(sums(reduction)["b"], 2 * value("b"))


def test_a_round_that_was_given_up_leaves_nothing_behind() -> None:
    buckets = [bucket("a", "b")]
    Reduction(buckets).offer("a", torch.zeros(2))
    reduction = Reduction(buckets)
    reduction.offer("b", value("b"))
    assert not reduction.has_left("a")
    reduction.complete(value)
    assert torch.equal(sums(reduction)["a"], 2 * value("a"))


def test_a_round_can_be_repeated() -> None:
    reduction = Reduction([bucket("a", "b"), bucket("c")])
    reduction.complete(lambda _: torch.zeros(2))
    reduction.restart()
    reduction.complete(value)
    for key, total in sums(reduction).items():
        assert torch.equal(total, 2 * value(key)), key
