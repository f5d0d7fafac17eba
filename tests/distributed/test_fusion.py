"""Fusion: nothing is lost or reordered, and the end is the earliest there is."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronfac.distributed.comm.fusion import Arrival, finish_time, fuse
from kronfac.placement.costs import Link
from tests.counting import calls
from tests.distributed.shapes import resnet50

SECONDS = st.floats(0, 0.1)
LINKS = st.builds(Link, latency=st.sampled_from([0.0, 1e-4, 1e-2]), seconds_per_byte=SECONDS)


@st.composite
def sequences(draw: st.DrawFn, largest: int = 8) -> list[Arrival]:
    steps = draw(st.lists(SECONDS, max_size=largest))
    ready = itertools.accumulate(steps)
    sizes = st.integers(1, 100)
    return [Arrival(f"s{index}", at, draw(sizes)) for index, at in enumerate(ready)]


def divisions(keys: Sequence[str]) -> Iterator[list[list[str]]]:
    """All ways to cut a sequence into groups of neighbours."""
    for cuts in itertools.product([False, True], repeat=max(0, len(keys) - 1)):
        groups = [list(keys[:1])]
        for key, cut in zip(keys[1:], cuts, strict=True):
            if cut:
                groups.append([])
            groups[-1].append(key)
        yield groups if keys else []


def one_ahead(arrivals: Sequence[Arrival], link: Link) -> list[list[str]]:
    """SPD-KFAC's rule as published."""
    groups: list[list[str]] = []
    sizes = [arrival.bytes for arrival in arrivals]
    through, current = 0.0, list[str]()
    for index, arrival in enumerate(arrivals):
        current.append(arrival.key)
        start = max(through, arrival.ready)
        if index + 1 < len(arrivals):
            ready = arrivals[index + 1].ready
            end = start + link.reduce(sizes[index], 2)
            if ready < end and (start > ready or ready - start < link.latency):
                sizes[index + 1] += sizes[index]
                continue
        through = start + link.reduce(sizes[index], 2)
        groups.append(current)
        current = []
    return groups


@settings(deadline=None)
@given(sequences(), LINKS)
def test_no_division_ends_sooner(arrivals: list[Arrival], link: Link) -> None:
    def seconds(size: int) -> float:
        return link.reduce(size, 2)

    keys = [arrival.key for arrival in arrivals]
    groups = fuse(arrivals, seconds, link.latency)
    assert [key for group in groups for key in group] == keys
    assert all(groups)
    end = finish_time(groups, arrivals, seconds)
    slack = 1e-5 * link.latency + 1e-12
    others = [finish_time(other, arrivals, seconds) for other in divisions(keys)]
    assert end == pytest.approx(min(others), abs=slack)
    assert end <= finish_time([[key] for key in keys], arrivals, seconds) + slack
    assert end <= finish_time(one_ahead(arrivals, link), arrivals, seconds) + slack


def test_looking_one_ahead_can_end_later() -> None:
    """Why the published rule is not used: each wait is short, but the network idles through all."""
    link = Link(latency=0.01, seconds_per_byte=0.01)
    sizes = (4, 3, 1, 4, 1)
    arrivals = [Arrival(f"s{index}", 0.009 * index, size) for index, size in enumerate(sizes)]

    def end(groups: list[list[str]]) -> float:
        return finish_time(groups, arrivals, lambda size: link.reduce(size, 2))

    assert [len(group) for group in one_ahead(arrivals, link)] == [5]
    fused = fuse(arrivals, lambda size: link.reduce(size, 2), link.latency)
    assert [len(group) for group in fused] == [1, 4]
    assert end(fused) == pytest.approx(0.15)
    assert end(one_ahead(arrivals, link)) == pytest.approx(0.176)
    assert end([[arrival.key] for arrival in arrivals]) == pytest.approx(0.18)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1.001, 3)), max_size=12))
def test_without_start_up_nothing_waits(pairs: list[tuple[int, float]]) -> None:
    """If each is through before the next is ready, joining any two only makes them wait."""
    arrivals, ready = [], 0.0
    for index, (size, slowness) in enumerate(pairs):
        arrivals.append(Arrival(f"s{index}", ready, size))
        ready += size * slowness
    groups = fuse(arrivals, float, 0.0)
    assert groups == [[arrival.key] for arrival in arrivals]


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.floats(1e-6, 1))
def test_what_is_ready_leaves_at_once(sizes: list[int], latency: float) -> None:
    arrivals = [Arrival(f"s{index}", 0.0, size) for index, size in enumerate(sizes)]
    groups = fuse(arrivals, lambda size: latency + 1e-3 * size, latency)
    assert groups == [[arrival.key for arrival in arrivals]]


def test_a_slow_start_up_joins_and_a_quick_one_does_not() -> None:
    arrivals = [Arrival(f"s{index}", 0.01 * index, 1000) for index in range(20)]
    counts = [
        len(fuse(arrivals, lambda size, latency=latency: latency + 1e-6 * size, latency))
        for latency in (0.0, 0.02, 10.0)
    ]
    assert counts[0] == 20
    assert 1 < counts[1] < 20
    assert counts[2] == 1


def test_nothing_to_fuse() -> None:
    assert fuse([], float) == []
    assert finish_time([], [], float) == 0


def test_order_is_required() -> None:
    with pytest.raises(ValueError, match="order in which they are ready"):
        fuse([Arrival("a", 1.0, 1), Arrival("b", 0.5, 1)], float)


def test_hundreds_are_quick() -> None:
    units = [statistic for layer in resnet50() for statistic in layer.statistics] * 4
    arrivals = [Arrival(f"{i}", 1e-3 * i, unit.bytes) for i, unit in enumerate(units[:400])]
    link = Link(1e-3, 1e-9)
    number, groups = calls(fuse, arrivals, lambda size: link.all_reduce(size, 64), link.latency)
    assert number < 5 * len(arrivals) ** 2
    assert math.isfinite(finish_time(groups, arrivals, lambda size: link.all_reduce(size, 64)))
