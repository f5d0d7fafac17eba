"""The ranks that the other tests run on."""

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import Pool, RankError, RankTimeoutError, run


def summed(rank: int, factor: int) -> tuple[int, int, float]:
    value = torch.tensor(float(rank * factor))
    dist.all_reduce(value)
    return rank, dist.get_world_size(), float(value)


def much(rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor + rank for _ in range(50)]


def failing(rank: int, bad: int) -> int:
    if rank == bad:
        raise ValueError(f"rank {bad} does not like this")
    return rank


def failing_alone(rank: int) -> None:
    """One rank raises while the other waits for it."""
    failing(rank, 1)
    dist.barrier()


def hanging(rank: int, seconds: float) -> None:
    if rank == 1:
        time.sleep(seconds)


def dying(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def dying_later(rank: int) -> None:
    """One rank dies while its process group is ended."""
    if rank == 1:
        mock.patch.object(dist, "destroy_process_group", side_effect=lambda: os._exit(4)).start()


def warning(rank: int) -> None:
    warnings.warn("mind the gap", stacklevel=1)


def leaving_early(rank: int) -> None:
    """One rank is done at once; the other still uses the connection to it."""
    if rank == 1:
        time.sleep(0.3)
        dist.isend(torch.ones(3), 0)


def waiting_for_one_that_is_done(rank: int) -> None:
    failing(rank, 1)
    if rank == 2:
        dist.recv(torch.ones(3), 0)


def ending_the_group(rank: int) -> int:
    dist.barrier()
    dist.destroy_process_group()
    return rank


def process_id(rank: int) -> int:
    return os.getpid()


def surroundings(rank: int) -> tuple[Any, ...]:
    found = torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two ranks of their own, for tests that break them."""
    own = Pool(2)
    own.run(2, process_id)
    yield own
    own.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_meet_and_results_come_by_rank(world_size: int) -> None:
    total = float(sum(10 * rank for rank in range(world_size)))
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert run(world_size, summed, 10) == expected


def test_tensors_travel_by_value() -> None:
    for rank, tensors in enumerate(run(2, much, torch.ones(3))):
        assert all(torch.equal(tensor, torch.full((3,), 1.0 + rank)) for tensor in tensors)


def test_the_same_processes_serve_all_calls() -> None:
    assert run(4, process_id) == run(4, process_id)


def test_every_call_starts_from_the_same_surroundings() -> None:
    assert run(2, surroundings) == run(2, surroundings) == [(torch.float32, 1, 0)] * 2


def test_an_exception_is_raised_with_the_traceback_of_its_rank() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 in failing:(.|\n)*does not like this"):
        run(2, failing, 1)


def test_exceptions_that_are_expected_are_results() -> None:
    first, second = run(2, failing, 1, expect_errors=True)
    assert first == 0
    assert isinstance(second, ValueError)
    assert str(second) == "rank 1 does not like this"


def test_a_warning_is_an_error() -> None:
    with pytest.raises(RankError, match="mind the gap"):
        run(1, warning)


def test_the_first_exception_is_shown_when_others_wait_for_that_rank(pool: Pool) -> None:
    for _ in range(10):  # whichever answer arrives first
        with pytest.raises(RankError, match=r"rank 1 of 2(.|\n)*does not like this"):
            pool.run(2, failing_alone)
    assert pool.run(2, summed, 1) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_rank_that_is_done_stays_until_the_others_are() -> None:
    assert run(2, leaving_early) == [None, None]


def test_nobody_stays_once_a_rank_has_failed() -> None:
    _, first, consequence = run(3, waiting_for_one_that_is_done, expect_errors=True)
    assert isinstance(first, ValueError)
    assert isinstance(consequence, RuntimeError)


def test_a_function_may_end_its_group() -> None:
    assert run(2, ending_the_group) == run(2, ending_the_group) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_shown_and_the_next_call_works(pool: Pool) -> None:
    with pytest.raises(RankTimeoutError, match=r"rank\(s\) \[1\] of 2 did not (.|\n)*in hanging"):
        pool.run(2, hanging, 60, limit=8)
    assert pool.run(2, summed, 1) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_rank_that_dies_is_named_and_the_next_call_works(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 has ended with 3"):
        pool.run(2, dying)
    assert pool.run(2, summed, 1) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_rank_that_dies_when_it_leaves_is_named_too(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 has ended with 4"):
        pool.run(2, dying_later)
    assert pool.run(2, summed, 1) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_ranks_that_have_been_started_are_ready_for_calls_and_signals() -> None:
    own = Pool(2)
    own.start()
    try:
        assert [own._stacks(rank).exists() for rank in range(2)] == [True, True]
    finally:
        own.close()


def test_no_process_is_left_when_a_pool_is_closed(pool: Pool) -> None:
    ids = pool.run(2, process_id)
    pool.close()
    for one in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(one, 0)
