"""Buckets of statistics on their way: in order, complete, and not touched while they travel."""

import torch
import torch.distributed as dist

from tests.distributed.ranks import run


def second_bucket_first(rank: int) -> list[float]:
    """The bucket that is second in order is full before the first one, and then outdated."""
    from kronfac.distributed.channel import Channel
    from kronfac.distributed.flat import Item
    from kronfac.distributed.ledger import Ledger
    from kronfac.distributed.reduction import Reduction, make_buckets

    size = dist.get_world_size()
    channel = Channel(dist.group.WORLD, tuple(range(size)), rank, Ledger())
    device = torch.device("cpu")
    groups = [[Item(key, (1000,), torch.float32, device)] for key in ("first", "second")]
    reduction = Reduction(make_buckets(groups, channel, None))
    reduction.offer("second", torch.full((1000,), -5.0))
    values = {"first": torch.full((1000,), 1.0), "second": torch.full((1000,), 10.0)}
    reduction.complete(values.get)
    found = {key: value for sums in reduction.arrivals() for key, value in sums.items()}
    return [*found["first"].unique().tolist(), *found["second"].unique().tolist()]


def test_a_bucket_that_is_full_early_leaves_in_its_turn_with_the_newest_content() -> None:
    assert run(3, second_bucket_first) == [[3.0, 30.0]] * 3
