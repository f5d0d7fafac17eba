"""The thread that makes batches ahead of time."""

import threading

import pytest
import torch

from kronfac.train.data.prefetch import prefetch


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kronfac-data"]


def test_items_come_in_order():
    assert list(prefetch(lambda number: number**2, range(50))) == [n**2 for n in range(50)]
    assert list(prefetch(str, [])) == []
    assert data_threads() == []


def test_few_items_are_made_ahead():
    made = []
    items = prefetch(made.append, range(100))
    next(items)
    items.close()
    assert len(made) <= 4


@pytest.mark.parametrize("used", [1, 3, 5])
def test_the_thread_ends_when_no_more_items_are_wanted(used):
    items = prefetch(str, range(6))
    for _ in range(used):
        next(items)
    items.close()
    assert data_threads() == []


def test_what_goes_wrong_in_the_thread_is_raised_after_the_good_items():
    items = prefetch(lambda number: 1 // number, [2, 1, 0, 5])
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert data_threads() == []


def test_only_the_data_thread_computes_alone():
    before = torch.get_num_threads()
    inside = list(prefetch(lambda _: torch.get_num_threads(), [0]))
    assert inside == [1]
    assert torch.get_num_threads() == before
    seen = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [before]
