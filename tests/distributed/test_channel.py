"""Messages: sums and copies are right whichever way they travel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.distributed.comm import collectives as channels
from kronfac.distributed.comm.collectives import START_UP_BYTES, Collectives, LostRankError, Segment
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.distributed.comm.traffic import Traffic
from tests.distributed.equivalence import (
    SCHEMES,
    assert_equals_one_process,
    case,
    on_ranks,
)
from tests.distributed.ranks import run

#: Straight from rank to rank, by the backend's own collectives, or as the channel likes.
WAYS = ["direct", "collectives", "chosen"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def collectives(way: str) -> Collectives:
    """All ranks, on which messages travel in a certain way."""
    found = ProcessGroup().all
    if way == "direct":
        found._rings = lambda segments, itemsize: False  # type: ignore[method-assign]
    elif way == "collectives":
        found.direct = False
    return found


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers that differ over ranks; a few of them add up exactly in any precision."""
    return (torch.arange(size, dtype=torch.float64) % 13 + 5 * rank).to(dtype)


def total(size: int, dtype: torch.dtype) -> Tensor:
    return sum(numbers(rank, size, torch.float64) for rank in range(dist.get_world_size())).to(
        dtype  # type: ignore[union-attr]
    )


# --- sums ------------------------------------------------------------------------------------


def all_reduce(rank: int) -> None:
    found = ProcessGroup().all
    for dtype in DTYPES:
        flat = numbers(rank, 10, dtype)
        arrival = found.all_reduce("reduce", flat)
        arrival.wait()
        arrival.wait()  # once more does no harm
        assert torch.equal(flat, total(10, dtype))


def test_all_reduce() -> None:
    run(3, all_reduce)


def reduce(rank: int, way: str, dtype: torch.dtype, name: str, found: Collectives) -> None:
    segments = SEGMENTS[name]
    scratch: dict[int, Tensor] = {}
    size = max(one.stop for one in segments)
    before = found.traffic.stats()
    for _ in range(2):  # the second time in the memory of the first
        flat = numbers(rank, size, dtype)
        found.reduce("reduce", flat, segments, scratch).wait()
        for one in segments:
            if one.rank == rank:
                expected = total(size, dtype)[one.start : one.stop]
                assert torch.equal(flat[one.start : one.stop], expected), (name, way, dtype)
    after = found.traffic.stats()
    sizes = [one.stop - one.start for one in segments if one.stop > one.start]
    for kind in ("bytes", "sent"):
        added = after[kind]["reduce"] - before[kind]["reduce"]
        assert added == 2 * sum(sizes) * dtype.itemsize
    assert after["messages"]["reduce"] - before["messages"]["reduce"] == 2 * len(sizes)


def reduce_everything(rank: int, way: str) -> None:
    found = collectives(way)
    for dtype in DTYPES:
        for name in SEGMENTS:
            reduce(rank, way, dtype, name, found)


SEGMENTS = {
    "one root": [Segment(1, 0, 11)],
    "all roots": [Segment(0, 0, 3), Segment(1, 3, 4), Segment(2, 4, 30)],
    "some roots, in another order": [Segment(2, 0, 5), Segment(0, 5, 8)],
    "empty ones": [Segment(0, 0, 0), Segment(1, 0, 7), Segment(2, 7, 7)],
    "nothing": [Segment(0, 0, 0)],
    "a large one": [Segment(0, 0, 2), Segment(1, 2, 50_002)],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [3, 4])
def test_reduce(world_size: int, way: str) -> None:
    run(world_size, reduce_everything, way)


def fractions(rank: int, way: str) -> bool:
    """What travels in half precision is added in single precision where that is in our hands."""
    found = collectives(way)
    flat = torch.full((3,), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    found.reduce("reduce", flat, [Segment(0, 0, 3)]).wait()
    return rank != 0 or flat.tolist() == [1 + 2.0**-7] * 3


def test_small_addends_are_not_lost_in_half_precision() -> None:
    assert all(run(3, fractions, "direct"))


def alone(rank: int) -> dict[str, Any]:
    found = ProcessGroup().collectives((rank,))
    flat = numbers(rank, 5, torch.float32)
    found.all_reduce("reduce", flat).wait()
    found.reduce("reduce", flat, [Segment(rank, 0, 5)]).wait()
    found.broadcast("share", flat, rank).wait()
    rows = found.gather("reduce", flat.view(5, 1), [5])
    assert torch.equal(flat, numbers(rank, 5, torch.float32))
    assert torch.equal(rows, flat.view(5, 1))
    return found.traffic.stats()


def test_a_lone_rank_sends_nothing() -> None:
    assert run(2, alone) == [Traffic().stats()] * 2


# --- which way -------------------------------------------------------------------------------


def directness(rank: int) -> tuple[bool, bool]:
    world = ProcessGroup(dist.new_group(backend="cpu:gloo"))
    return ProcessGroup().all.direct, world.collectives((0, 1)).direct if rank < 2 else True


def test_a_few_ranks_exchange_messages_themselves() -> None:
    """Also in groups whose backends are named by device, as they are for several kinds of memory."""
    assert run(3, directness) == [(True, True)] * 3


def made(ranks: int) -> Collectives:
    return Collectives(None, tuple(range(ranks)), 0, Traffic())


def by_size(*sizes: int) -> list[Segment]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [
        Segment(i, end - size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def test_two_or_three_ranks_never_need_rings() -> None:
    for ranks in (2, 3):
        assert not made(ranks)._rings(by_size(10**9), 4)


def test_a_large_segment_of_one_rank_goes_by_a_ring() -> None:
    assert made(4)._rings(by_size(10**6), 4)
    assert made(8)._rings(by_size(10, 10**6, 10), 4)


def test_segments_that_are_much_alike_go_straight() -> None:
    for ranks in (4, 8, 32):
        assert not made(ranks)._rings(by_size(*[10**6] * ranks), 4)


def test_the_bound_is_twice_the_bytes_and_the_start_ups() -> None:
    """With 4 ranks and one segment: 3m against 2(m + 4 start-ups)."""
    size = 8 * START_UP_BYTES
    assert not made(4)._rings(by_size(size), 1)
    assert made(4)._rings(by_size(size + 1), 1)
    assert not made(4)._rings([], 4)


def counted(rank: int, size: int) -> int:
    """How many collectives carry one segment."""
    found, calls = ProcessGroup().all, []
    reduce_one = found._reduce_one

    def count(part: Tensor, root: int) -> Any:
        calls.append(root)
        return reduce_one(part, root)

    found._reduce_one = count  # type: ignore[method-assign]
    found.reduce("reduce", torch.ones(size), [Segment(2, 0, size)]).wait()
    return len(calls)


def test_all_ranks_choose_the_same_way() -> None:
    assert run(4, counted, 100) == [0] * 4
    assert run(4, counted, 100_000) == [1] * 4


# --- copies ----------------------------------------------------------------------------------


def broadcast(rank: int, way: str) -> dict[str, Any]:
    found = collectives(way)
    arrivals = []
    for dtype in DTYPES:
        for root in found.members:
            flat = numbers(rank, 9, dtype)
            arrivals.append((root, flat, found.broadcast("share", flat, root)))
    for root, flat, arrival in arrivals:
        arrival.wait()
        assert torch.equal(flat, numbers(root, 9, flat.dtype))
    found.broadcast("share", torch.zeros(0), 0).wait()
    return found.traffic.stats()


@pytest.mark.parametrize("way", ["direct", "collectives"])
def test_broadcast(way: str) -> None:
    for stats in run(4, broadcast, way):
        assert stats["bytes"]["share"] == 4 * 9 * sum(dtype.itemsize for dtype in DTYPES)
        assert stats["messages"]["share"] == 4 * len(DTYPES)


COUNTS = [[2, 2, 2], [1, 4, 2], [0, 3, 1]]


def gather(rank: int) -> None:
    found = ProcessGroup().all
    for dtype in DTYPES:
        for counts in COUNTS:
            parts = [numbers(r, 6 * n, dtype).view(2, n, 3) for r, n in enumerate(counts)]
            rows = found.gather("reduce", parts[rank], counts)
            assert torch.equal(rows, torch.cat(parts, dim=-2))


def test_gather_of_uneven_rows() -> None:
    run(3, gather)


def within_some(rank: int, way: str) -> list[float]:
    """Ranks of a channel are those of the world, not their places in the channel."""
    world = ProcessGroup()
    members = (1, 3) if rank % 2 else (0, 2)
    found = world.collectives(members)
    found.direct = way == "direct"
    flat = torch.full((2,), float(rank))
    found.reduce("reduce", flat, [Segment(members[1], 0, 1), Segment(members[0], 1, 2)]).wait()
    one = torch.full((1,), float(rank))
    found.broadcast("share", one, members[1]).wait()
    mine = 0 if rank == members[1] else 1
    return [float(flat[mine]), float(one)]


@pytest.mark.parametrize("way", ["direct", "collectives"])
def test_messages_among_some_ranks(way: str) -> None:
    assert run(4, within_some, way) == [[2.0, 2.0], [4.0, 3.0], [2.0, 2.0], [4.0, 3.0]]


# --- ranks that are gone ---------------------------------------------------------------------


def left_alone(rank: int, way: str, kind: str) -> str:
    """The other rank has ended; what we are told."""
    found = collectives(way)
    phase = "share" if kind == "broadcast" else "reduce"
    try:
        # Nobody leaves before both have made their channel.
        found.all_reduce(phase, torch.zeros(1)).wait()
        if rank == 1:
            del found  # what refers to the group would keep its connections
            dist.destroy_process_group()
            return ""
        for _ in range(100):
            flat = torch.zeros(1000)
            if kind == "all_reduce":
                found.all_reduce("reduce", flat).wait()
            elif kind == "reduce":
                found.reduce("reduce", flat, [Segment(0, 0, 1000)]).wait()
            else:
                found.broadcast("share", flat, 1).wait()
    except LostRankError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "broadcast"])
@pytest.mark.parametrize("way", ["direct", "collectives"])
def test_a_lost_rank_is_named_as_such(way: str, kind: str) -> None:
    message = run(2, left_alone, way, kind)[0]
    phase = "share" if kind == "broadcast" else "reduce"
    assert message.startswith(f"a message of phase {phase!r} ")
    assert "another rank has probably ended or raised an error" in message
    assert "Restart all ranks from the last checkpoint" in message


def test_a_message_that_cannot_even_begin_is_told_in_the_same_way() -> None:
    found = made(2)

    def gone(part: Tensor, root: int) -> None:
        raise RuntimeError("Connection closed by peer\nand more that nobody needs")

    found._broadcast_one = gone  # type: ignore[method-assign]
    with pytest.raises(LostRankError, match="'share' could not be sent; another rank") as caught:
        found.broadcast("share", torch.zeros(3), 1)
    assert str(caught.value).endswith("[Connection closed by peer]")


# --- a whole run -----------------------------------------------------------------------------


@contextmanager
def travelling(way: str) -> Iterator[None]:
    """By the backend's collectives only, or by rings wherever they carry fewer bytes."""
    name = {"collectives": "MAX_DIRECT", "rings": "START_UP_BYTES"}[way]
    before = getattr(channels, name)
    setattr(channels, name, 0)
    try:
        yield
    finally:
        setattr(channels, name, before)


def trained(rank: int, way: str, name: str, cases: list[Any]) -> Any:
    with travelling(way):
        assert ProcessGroup().all.direct == (way == "rings")
        return on_ranks(rank, name, SCHEMES[name], cases)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("collectives", "comm-opt"),
        ("collectives", "mem-opt"),
        ("collectives", "hybrid"),
        ("rings", "comm-opt"),
    ],
)
def test_other_ways_give_the_same_run(way: str, name: str) -> None:
    cases = [case("cnn", solver="cholesky", steps=5)]
    by_rank = run(4, trained, way, name, cases)
    for one in cases:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])
