"""Buckets leave in order, once, and nobody writes into them on their way."""

import torch
from torch import Tensor

from kronfac.distributed.comm.buckets import Reduction, make_buckets
from kronfac.distributed.comm.collectives import Arrival, Collectives
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.comm.traffic import Traffic

GROUPS = [["a", "b"], ["c"], ["d", "e"]]


class Slow(Collectives):
    """Looks at a message when it is launched, and again when it is waited for."""

    def __init__(self) -> None:
        super().__init__(None, (0,), 0, Traffic())
        self.launched: list[list[float]] = []

    def all_reduce(self, phase, flat, op=None):  # type: ignore[no-untyped-def]
        self.launched.append(flat.tolist())

        def check() -> None:
            assert flat.tolist() in self.launched, "it was written to on its way"
            flat.mul_(10)

        return Arrival(phase, then=check)


def reduction() -> tuple[Reduction, Slow]:
    collectives = Slow()
    items = [
        [Item(key, (), torch.float32, torch.device("cpu")) for key in group] for group in GROUPS
    ]
    return Reduction(make_buckets(items, collectives, None)), collectives


def number(value: float) -> Tensor:
    return torch.tensor(value)


VALUES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0}


def finish(one: Reduction) -> dict[str, float]:
    one.complete(lambda key: number(VALUES[key]))
    found: dict[str, float] = {}
    for sums in one.arrivals():
        found |= {key: float(value) for key, value in sums.items()}
    return found


TIMES_TEN = {key: 10 * value for key, value in VALUES.items()}


def test_buckets_leave_in_order_as_soon_as_they_are_full() -> None:
    one, collectives = reduction()
    for key in ("c", "b"):
        one.offer(key, number(VALUES[key]))
    assert collectives.launched == []
    one.offer("a", number(1.0))
    assert collectives.launched == [[1.0, 2.0], [3.0]]
    assert one.has_left("c")
    assert not one.has_left("d")
    assert finish(one) == TIMES_TEN
    assert collectives.launched == [[1.0, 2.0], [3.0], [4.0, 5.0]]


def test_what_was_full_but_not_next_leaves_once_and_as_it_is_at_the_end() -> None:
    one, collectives = reduction()
    for key in ("c", "d", "e"):
        one.offer(key, number(-1.0))  # more is observed later
    assert finish(one) == TIMES_TEN
    assert collectives.launched == [[1.0, 2.0], [3.0], [4.0, 5.0]]


def test_nothing_is_left_over_for_the_next_round() -> None:
    one, collectives = reduction()
    for key in ("c", "d", "e"):
        one.offer(key, number(VALUES[key]))
    finish(one)
    again = Reduction(one.buckets)
    collectives.launched.clear()
    again.offer("a", number(1.0))
    again.offer("b", number(2.0))
    assert collectives.launched == [[1.0, 2.0]]
    assert finish(again) == TIMES_TEN


def test_a_round_can_be_repeated() -> None:
    one, collectives = reduction()
    for key in VALUES:
        one.offer(key, number(-1.0))
    assert len(collectives.launched) == 3
    one.restart()
    assert finish(one) == TIMES_TEN
    assert len(collectives.launched) == 6
