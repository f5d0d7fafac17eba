"""The planner: what it predicts is what the published costs say, and it picks the least."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronfac.placement.costs import Compute, LayerUnit, Link, PartUnit, StatisticUnit
from kronfac.placement.grid import divisors
from kronfac.placement.place import makespan, place
from kronfac.placement.scheme import SCHEMES, Hybrid
from kronfac.planner.choose import candidates, choose
from kronfac.planner.predict import Prediction, predict
from tests.counting import calls
from tests.distributed.shapes import models, resnet50

PHASES = ["reduce", "refresh", "share", "precondition", "spread"]
TRAFFIC = ["reduce", "share", "spread"]
INSTANT = Compute(math.inf, math.inf, 0.0)
PURE = Compute(overhead=0.0)
#: One byte per second and no latency: seconds are bytes.
BYTES = Link(latency=0.0, seconds_per_byte=1.0)
SCHEME: st.SearchStrategy[str | Hybrid] = st.one_of(
    st.sampled_from([name for name in SCHEMES if name != "auto"]), st.floats(0.01, 1).map(Hybrid)
)


def alike(
    count: int, factor: int = 1000, solution: int = 1000, gradient: int = 10
) -> list[LayerUnit]:
    """Layers of one size, with one part each."""
    return [
        LayerUnit(
            f"l{index}",
            (StatisticUnit(f"l{index}/A", factor),),
            (PartUnit("A", (f"l{index}/A",), 10**6, solution),),
            10**4,
            gradient,
        )
        for index in range(count)
    ]


def predicted(
    layers: list[LayerUnit], size: int, scheme: str | Hybrid, link: Link = BYTES
) -> Prediction:
    placement = place(layers, size, scheme, link=link, compute=PURE, split=False)
    return predict(layers, placement, link, PURE, 1)


# Predictions


@settings(max_examples=150, deadline=None)
@given(models(), st.integers(1, 16), SCHEME, st.integers(1, 100), st.floats(0, 1))
def test_nothing_is_negative(
    layers: list[LayerUnit], size: int, scheme: str | Hybrid, every: int, hidden: float
) -> None:
    placement = place(layers, size, scheme, refresh_every=every)
    prediction = predict(layers, placement, Link(), Compute(), every, hidden)
    assert prediction.scheme == str(scheme)
    assert list(prediction.seconds) == PHASES
    assert list(prediction.bytes) == TRAFFIC
    assert all(value >= 0 for value in prediction.seconds.values())
    assert all(isinstance(value, int) and value >= 0 for value in prediction.bytes.values())
    assert prediction.total == pytest.approx(sum(prediction.seconds.values()))
    for phase in TRAFFIC:
        if prediction.bytes[phase] == 0:
            assert prediction.seconds[phase] == 0
    if size == 1:
        assert prediction.bytes == dict.fromkeys(TRAFFIC, 0)
        loads = makespan(layers, placement)
        assert prediction.seconds["refresh"] == pytest.approx(loads[0] / every)


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(2, 12))
def test_what_each_scheme_never_sends(layers: list[LayerUnit], size: int) -> None:
    for scheme, silent in {
        "replicated": {"share", "spread"},
        "comm-opt": {"spread"},
        "spd": {"spread"},
        "mem-opt": {"share"},
        "local": {"reduce", "share"},
        "layer-parallel": {"share"},
    }.items():
        prediction = predict(layers, place(layers, size, scheme), Link(), Compute(), 1)
        assert all(prediction.bytes[phase] == 0 for phase in silent)
        if layers:
            assert all(prediction.bytes[phase] > 0 for phase in {"spread", "reduce"} - silent)


def test_traffic_of_layers_that_are_alike() -> None:
    """Eight layers over four ranks: two each, so every rank sends and receives alike."""
    layers = alike(8, factor=1000, solution=300, gradient=10)
    factors, solutions, gradients = 8 * 4000, 8 * 1200, 8 * 40
    expected = {
        "replicated": (2 * factors * 3 // 4, 0, 0),
        "comm-opt": (factors * 3 // 4, 3 * solutions // 4, 0),
        "mem-opt": (factors * 3 // 4, 0, 3 * gradients // 4),
        "local": (0, 0, 3 * gradients // 4),
        Hybrid(0.5): (factors * 3 // 4, solutions // 4, gradients // 2),
    }
    for scheme, traffic in expected.items():
        prediction = predicted(layers, 4, scheme)
        assert tuple(prediction.bytes.values()) == traffic
        seconds = tuple(prediction.seconds[phase] for phase in TRAFFIC)
        assert seconds == pytest.approx(traffic)


def of_sizes(*factors: int) -> list[LayerUnit]:
    """Layers whose statistics have these many bytes."""
    return [alike(index + 1, factor=size // 4)[index] for index, size in enumerate(factors)]


def test_a_rank_that_keeps_much_receives_much() -> None:
    """One layer for each of four ranks: 3·5200 is less than all of them together."""
    prediction = predicted(of_sizes(4000, 4000, 4000, 5200), 4, "mem-opt")
    assert prediction.bytes["reduce"] == 17200 - 4000
    assert prediction.seconds["reduce"] == 3 * 5200


def test_what_one_rank_keeps_is_added_up_on_the_way() -> None:
    prediction = predicted(alike(1), 4, "mem-opt")
    assert prediction.bytes["reduce"] == prediction.seconds["reduce"] == 4000
    assert prediction.bytes["spread"] == 3 * 40  # a copy for each of the others


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 50).map(lambda n: 400 * n), min_size=1, max_size=6),
    st.integers(2, 8),
    st.floats(0, 1e4),
)
def test_sums_for_single_ranks_take_the_quicker_way(
    sizes: list[int], ranks: int, latency: float
) -> None:
    layers, link = of_sizes(*sizes), Link(latency, 1.0)
    placement = place(layers, ranks, "mem-opt", link=link, compute=PURE)
    kept = [0] * ranks
    for layer, size in zip(layers, sizes, strict=True):
        kept[placement.workers(layer.name)[0]] += size
    exchange = latency + max((ranks - 1) * max(kept), sum(kept) - min(kept))
    along = latency * sum(1 for size in kept if size) + sum(kept)
    quicker = predict(layers, placement, link, PURE, 1)
    assert quicker.seconds["reduce"] == pytest.approx(min(exchange, along))
    passed_on = predict(layers, placement, link, PURE, 1, direct=False)
    assert passed_on.seconds["reduce"] == pytest.approx(along)


def test_what_is_passed_on_is_sent_once_by_each_rank() -> None:
    layers = alike(8, factor=1000, solution=300, gradient=10)
    factors, solutions, gradients = 8 * 4000, 8 * 1200, 8 * 40
    for scheme, traffic in {
        "replicated": (2 * factors * 3 // 4, 0, 0),
        "comm-opt": (factors, solutions, 0),
        "mem-opt": (factors, 0, gradients),
        Hybrid(0.5): (factors, solutions // 2, gradients),
    }.items():
        placement = place(layers, 4, scheme, link=BYTES, compute=PURE, split=False)
        prediction = predict(layers, placement, BYTES, PURE, 1, direct=False)
        assert tuple(prediction.bytes.values()) == traffic
        assert tuple(prediction.seconds[phase] for phase in TRAFFIC) == pytest.approx(traffic)


def test_a_split_part_travels_to_its_solvers_and_is_added() -> None:
    part = PartUnit("A", ("l/A",), 3 * 10**12, 40, shared_flops=10**12)
    layer = LayerUnit("l", (StatisticUnit("l/A", 25),), (part,), 1, 1)
    link = Link(0.0, 1e-3)
    whole, divided = (
        predict([layer], place([layer], 4, "comm-opt", link=link, split=split), link, PURE, 1)
        for split in (False, True)
    )
    assert divided.seconds["refresh"] < whole.seconds["refresh"]
    assert divided.bytes["share"] == 160 * 2 * 3 // 4
    assert whole.bytes["share"] == 160 * 3
    assert divided.bytes["reduce"] == 100 * 2 * 3 // 4  # several ranks need the sum: all get it
    assert whole.bytes["reduce"] == 100
    assert divided.total < whole.total


def test_latency_counts_once_for_an_exchange() -> None:
    layers = alike(8)
    link = Link(latency=1.0, seconds_per_byte=0.0)
    for scheme, total in {"replicated": 1, "comm-opt": 2, "mem-opt": 2, Hybrid(0.5): 3}.items():
        prediction = predicted(layers, 4, scheme, link)
        assert sum(prediction.seconds[phase] for phase in TRAFFIC) == total


def test_refreshes_are_averaged_and_hidden() -> None:
    layers = resnet50()
    link = Link(1e-3, 1e-9)
    placement = place(layers, 8, Hybrid(0.5))
    often = predict(layers, placement, link, Compute(), 1)
    rarely = predict(layers, placement, link, Compute(), 100)
    for phase in ("reduce", "refresh", "share"):
        assert rarely.seconds[phase] == pytest.approx(often.seconds[phase] / 100)
    for phase in ("precondition", "spread"):
        assert rarely.seconds[phase] == often.seconds[phase] > 0
    partly = predict(layers, placement, link, Compute(), 1, hidden=0.01)
    assert partly.seconds["reduce"] == pytest.approx(often.seconds["reduce"] - 0.01)
    assert predict(layers, placement, link, Compute(), 1, hidden=1e9).seconds["reduce"] == 0
    assert partly.bytes == often.bytes == rarely.bytes


def test_memory_falls_with_fewer_workers() -> None:
    layers = resnet50()
    schemes = ["comm-opt", Hybrid(0.5), Hybrid(0.25), "mem-opt"]
    memory = [predicted(layers, 8, scheme).memory for scheme in schemes]
    assert memory == sorted(memory, reverse=True)
    everything = sum(layer.solution_bytes for layer in layers)
    assert memory[0] > everything
    assert memory[-1] < everything / 2


# Choice


def names(predictions: list[Prediction]) -> list[str]:
    return [prediction.scheme for prediction in predictions]


@settings(max_examples=30, deadline=None)
@given(
    models(largest=6),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.builds(Link, st.floats(0, 1e-2), st.floats(0, 1e-6)),
    st.integers(1, 100),
)
def test_the_least_total_is_chosen(
    layers: list[LayerUnit], size: int, link: Link, every: int
) -> None:
    placement, predictions = choose(layers, size, link, Compute(), every)
    totals = [prediction.total for prediction in predictions]
    assert totals == sorted(totals)
    assert placement.scheme == predictions[0].scheme
    assert predict(layers, placement, link, Compute(), every) == predictions[0]
    expected = ["replicated", "comm-opt", "spd", "mem-opt"]
    expected += [str(Hybrid(w / size)) for w in divisors(size) if 1 < w < size]
    assert sorted(names(predictions)) == sorted(expected)
    again, _ = choose(layers, size, link, Compute(), every)
    assert again == placement


def test_one_rank_has_nothing_to_send() -> None:
    placement, predictions = choose(resnet50(), 1, Link(1.0, math.inf), Compute(), 1)
    assert placement.scheme == "replicated"
    assert len({prediction.total for prediction in predictions}) == 1
    assert all(prediction.bytes == dict.fromkeys(TRAFFIC, 0) for prediction in predictions)


def test_slow_network_and_rare_refreshes_send_nothing_at_other_steps() -> None:
    placement, predictions = choose(resnet50(), 8, Link(1e-3, 1e-7), Compute(), 1000)
    assert placement.scheme in ("replicated", "comm-opt", "spd")
    assert predictions[0].bytes["spread"] == 0


def test_slow_network_and_large_factors_send_gradients() -> None:
    layers = alike(16, factor=10**6, solution=2 * 10**6, gradient=10)
    placement, _ = choose(layers, 8, Link(1e-3, 1e-6), Compute(), 1)
    assert placement.scheme == "mem-opt"


def test_instant_solving_is_never_shared() -> None:
    placement, predictions = choose(resnet50(), 8, Link(1e-3, 1e-8), INSTANT, 100)
    assert placement.scheme in ("replicated", "spd")
    assert predictions[0].bytes["share"] == predictions[0].bytes["spread"] == 0


def test_slow_solving_is_shared_out() -> None:
    placement, predictions = choose(resnet50(), 8, Link(0.0, 1e-12), Compute(), 10)
    assert placement.scheme != "replicated"
    alone = next(p for p in predictions if p.scheme == "replicated")
    assert predictions[0].total < alone.total / 3


@pytest.mark.parametrize("size", [1, 2, 7, 8, 12, 48, 720, 1024, 4096, 5000])
def test_candidates(size: int) -> None:
    tried = candidates(size)
    assert tried[:4] == ["replicated", "comm-opt", "spd", "mem-opt"]
    assert "local" not in tried
    assert "layer-parallel" not in tried
    grids = [place([], size, scheme).grid.workers for scheme in tried[4:]]
    assert len(grids) <= 8
    assert grids == sorted(set(grids))
    between = [number for number in divisors(size) if 1 < number < size]
    assert set(grids) <= set(between)
    if len(between) <= 8:
        assert grids == between


@pytest.mark.parametrize("size", [1024, 4096])
def test_thousands_of_ranks_are_quick(size: int) -> None:
    number, found = calls(choose, resnet50(), size, Link(), Compute(), 100)
    assert number < 3 * 10**6
    placement, predictions = found
    assert placement.grid.size == size
    assert all(math.isfinite(prediction.total) for prediction in predictions)
