"""Statistics that stay in use as long as they change little: the rule of SP-NGD."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD

import kronfac
from kronfac.adaptive.interval import AdaptiveInterval
from tests.test_syncs import CountWaits
from tests.training import (
    assert_same,
    batch,
    factors,
    kfac,
    layers,
    mlp,
    parameters,
    saved_and_loaded,
    step,
)

STEPS = 40
STALE = kronfac.StaleInterval(0.3)
#: Small changes at first, large ones in the middle, none at the end.
NUMBERS = [*[0] * 12, *range(12, 24), *[24] * (STEPS - 24)]


def build(rule: Any = STALE, **options: Any) -> tuple[nn.Sequential, kronfac.KFAC]:
    model = mlp().double()
    chosen = {"factor_every": rule, "refresh_every": rule, "decay": 0.0} | options
    return model, kfac(model, SGD(model.parameters(), lr=0.05), **chosen)


def go(model: nn.Module, optimizer: kronfac.KFAC, numbers: list[int]) -> list[int]:
    """Train on batches; return the steps at which solutions were renewed."""
    renewed = []
    for number in numbers:
        now = optimizer.stats()["steps"]
        x, y = batch(number)
        step(model, optimizer, (x.double(), y))
        if all(state.solved_at == now for state in layers(optimizer).values()):
            renewed.append(now)
    return renewed


# --- the rule -----------------------------------------------------------------------------------


def hand_written(statistics: dict[int, list[Tensor]], alpha: float) -> tuple[list[int], int]:
    """The rule on what statistics would be at every step: steps of refreshes, and the last interval."""

    def similar(new: list[Tensor], old: list[Tensor]) -> bool:
        distances = [((x - y).norm() / y.norm()).item() for x, y in zip(new, old, strict=True)]
        return sum(distance < alpha for distance in distances) >= len(distances) / 2

    time, interval, before, refreshes = 0, 1, 1, [0]
    while time + interval < len(statistics):
        time += interval
        old = [statistics[t] for t in reversed(refreshes[-2:])]
        refreshes.append(time)
        longer = interval
        if not similar(statistics[time], old[0]):
            longer = max(1, interval // 2)
        elif len(old) == 2 and similar(statistics[time], old[1]):
            longer = interval + before
        interval, before = longer, interval
    return refreshes, interval


def test_refreshes_come_when_the_rule_says() -> None:
    """Parameters stand still, so that statistics of every step are known beforehand."""
    seen: dict[int, list[Tensor]] = {}
    model, fresh = build(1)
    fresh.param_groups[0]["lr"] = 0.0
    for time, number in enumerate(NUMBERS):
        go(model, fresh, [number])
        seen[time] = [*factors(fresh, "A").values(), *factors(fresh, "G").values()]
    model, optimizer = build()
    optimizer.param_groups[0]["lr"] = 0.0
    refreshes, interval = hand_written(seen, STALE.tolerance)
    assert go(model, optimizer, NUMBERS) == refreshes
    assert optimizer.stats()["refresh_every"] == interval
    assert optimizer.stats()["refresh_lengthened"] > 0
    assert optimizer.stats()["refresh_shortened"] > 0


def test_statistics_that_do_not_change_let_the_interval_grow_like_fibonacci() -> None:
    model, optimizer = build(kronfac.StaleInterval())
    optimizer.param_groups[0]["lr"] = 0.0
    assert go(model, optimizer, [0] * 50) == [0, 1, 2, 4, 7, 12, 20, 33]


def test_the_interval_stays_below_its_maximum() -> None:
    model, optimizer = build(kronfac.StaleInterval(maximum=4))
    optimizer.param_groups[0]["lr"] = 0.0
    assert go(model, optimizer, [0] * 20) == [0, 1, 2, 4, 7, 11, 15, 19]


def test_every_verdict_follows_the_rule() -> None:
    draw = random.Random(0)
    interval = AdaptiveInterval(kronfac.StaleInterval(maximum=10**9, share=0.75))
    now, before = 1, 1
    for time in range(200):
        recent, older = draw.randrange(9), draw.randrange(9)
        interval.judge((recent, 8, older, 8), time)
        longer = max(1, now // 2) if recent < 6 else now + before if older >= 6 else now
        now, before = longer, now
        assert (interval.current, interval.before, interval.last) == (now, before, time)


def test_what_cannot_be_compared_changes_nothing() -> None:
    interval = AdaptiveInterval(kronfac.StaleInterval(initial=3))
    assert interval.judge((0, 0, 0, 0), 0) == "kept"
    assert interval.judge((4, 4, 0, 0), 3) == "kept"
    assert interval.current == 3


@pytest.mark.parametrize("rule", [kronfac.StaleInterval(maximum=1), kronfac.StaleInterval(1e-9)])
def test_an_interval_of_one_is_fresh(rule: kronfac.StaleInterval) -> None:
    model, optimizer = build(rule)
    other, fresh = build(1)
    go(model, optimizer, list(range(8)))
    go(other, fresh, list(range(8)))
    assert_same(parameters(model), parameters(other))


def test_all_statistics_may_have_to_agree() -> None:
    """With an output that always changes, its statistics hold the interval back only if all count."""
    grown = []
    for share in (0.5, 1.0):
        model, optimizer = build(kronfac.StaleInterval(0.05, share=share))
        optimizer.param_groups[0]["lr"] = 0.0
        for number in range(20):
            x, _ = batch(0)
            labels = torch.randint(3, (len(x),), generator=torch.Generator().manual_seed(number))
            step(model, optimizer, (x.double(), labels))
        grown.append(optimizer.stats()["refresh_every"])
    assert grown[0] > 1
    assert grown[1] == 1


# --- beside other options -----------------------------------------------------------------------


def test_a_refresh_takes_new_statistics_whatever_the_other_interval() -> None:
    model, optimizer = build(factor_every=1000, early_refresh=False)
    renewed = go(model, optimizer, list(range(10)))
    assert optimizer.stats()["factor_updates"] == len(renewed) == 10


def test_statistics_may_be_taken_between_refreshes_too() -> None:
    model, optimizer = build(kronfac.StaleInterval(), factor_every=1, decay=0.9)
    optimizer.param_groups[0]["lr"] = 0.0
    renewed = go(model, optimizer, [0] * 10)
    assert optimizer.stats()["factor_updates"] == 10 > len(renewed)


def test_early_refreshes_do_not_move_the_interval() -> None:
    model, optimizer = build(kronfac.StaleInterval(initial=10, maximum=10))
    optimizer.param_groups[0]["lr"] = 0.0
    assert go(model, optimizer, [0] * 21) == [0, 1, 2, 4, 8, 10, 20]


def test_rules_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="stagger"):
        build(stagger=True)
    with pytest.raises(ValueError, match="same rule as"):
        build(refresh_every=10)
    _, optimizer = build(10, stagger=True)
    with pytest.raises(ValueError, match="stagger"):
        optimizer.refresh_every = STALE
    _, optimizer = build()
    with pytest.raises(ValueError, match="same rule as"):
        optimizer.refresh_every = 10


@pytest.mark.parametrize(
    "options",
    [{"tolerance": 0.0}, {"initial": 0}, {"maximum": 1.5}, {"share": 0.0}, {"share": 1.1}],
)
def test_bad_values_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kronfac.StaleInterval(**options)


def test_the_first_interval_must_not_exceed_the_maximum() -> None:
    with pytest.raises(ValueError, match="initial=200"):
        kronfac.StaleInterval(initial=200)


def test_intervals_can_be_set_later() -> None:
    model, optimizer = build(3)
    go(model, optimizer, [0])
    optimizer.refresh_every = STALE
    optimizer.factor_every = STALE
    assert (optimizer.factor_every, optimizer.refresh_every) == (STALE, STALE)
    assert go(model, optimizer, [1, 2]) == [1, 2]
    optimizer.factor_every = 5
    optimizer.refresh_every = 5
    assert all(not state.history for state in layers(optimizer).values())


# --- memory and saving --------------------------------------------------------------------------


def test_earlier_statistics_are_kept_only_if_they_are_compared() -> None:
    model, optimizer = build(1)
    go(model, optimizer, [0, 1])
    plain = sum(state.held_bytes for state in layers(optimizer).values())
    assert all(not state.history for state in layers(optimizer).values())
    model, optimizer = build()
    go(model, optimizer, [0, 1])
    held = [old for s in layers(optimizer).values() for pair in s.history.values() for old in pair]
    extra = sum(one.numel() * one.element_size() for one in held)
    assert sum(state.held_bytes for state in layers(optimizer).values()) == plain + extra
    assert len(held) == 2 * 2 * 3


@pytest.mark.parametrize("way", ["file", "copy", "distributed checkpoint"])
@pytest.mark.parametrize("until", [1, 2, 9, 15])
def test_a_saved_state_continues_bit_for_bit(way: str, until: int) -> None:
    model, optimizer = build()
    go(model, optimizer, NUMBERS[:until])
    other, resumed = build()
    if way == "copy":
        other, resumed = copy.deepcopy((model, optimizer))
    elif way == "file":
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    else:
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(
            other, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        )
    assert go(other, resumed, NUMBERS[until:]) == go(model, optimizer, NUMBERS[until:])
    assert_same(parameters(other), parameters(model))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_a_state_without_an_interval_starts_anew() -> None:
    model, optimizer = build(5)
    go(model, optimizer, [0, 1])
    other, resumed = build(kronfac.StaleInterval())
    resumed.load_state_dict(optimizer.state_dict())
    assert go(other, resumed, [2, 3]) == [2, 3]


def test_nothing_is_read_back_between_refreshes() -> None:
    model, optimizer = build(kronfac.StaleInterval(initial=8), factor_every=2, early_refresh=False)
    go(model, optimizer, [0])
    for number in range(1, 8):
        x, y = batch(number)
        with CountWaits() as counter:
            step(model, optimizer, (x.double(), y))
        assert not counter.waits, number
