"""Placement: the identities that the published schemes state."""

import itertools
import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronfac.placement.balance import longest_first
from kronfac.placement.costs import Compute, LayerUnit, Link, PartUnit, StatisticUnit
from kronfac.placement.grid import divisors
from kronfac.placement.place import (
    Assignment,
    Grid,
    Placement,
    Task,
    makespan,
    nearest_divisor,
    place,
    solve_seconds,
)
from kronfac.placement.scheme import SCHEMES, Hybrid
from tests.counting import calls
from tests.distributed.shapes import deeper, models, resnet50, resnet50_shapes

FREE = Link(latency=0.0, seconds_per_byte=0.0)
SLOW = Link(latency=0.0, seconds_per_byte=math.inf)
PURE = Compute(overhead=0.0)
NAMED = [name for name in SCHEMES if name != "auto"]
ALL: st.SearchStrategy[str | Hybrid] = st.one_of(
    st.sampled_from(NAMED), st.floats(0.01, 1).map(Hybrid)
)


def test_the_shapes_are_those_of_resnet50() -> None:
    shapes = resnet50_shapes()
    assert len(shapes) == len({shape.name for shape in shapes}) == 54
    triangles = [
        sum(width * (width + 1) // 2 for width in widths) / 1e6
        for widths in zip(*((shape.input, shape.output) for shape in shapes), strict=True)
    ]
    assert triangles == pytest.approx([62.35, 14.62], abs=0.005)
    assert sum(s.input * s.output for s in shapes) / 1e6 == pytest.approx(25.50, abs=0.005)
    assert sum(s.input**3 for s in shapes) / 1e9 == pytest.approx(408.2, abs=0.05)
    assert sum(s.output**3 for s in shapes) / 1e9 == pytest.approx(44.6, abs=0.05)


# The grid


def test_the_grid_that_kaisa_prints() -> None:
    grid = Grid(8, 2)
    assert [grid.column(index) for index in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [grid.row(index) for index in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("size", [1, 2, 6, 7, 12, 16, 36])
def test_rows_and_columns_of_every_grid(size: int) -> None:
    for workers in divisors(size):
        grid = Grid(size, workers)
        columns = [grid.column(index) for index in range(grid.columns)]
        rows = [grid.row(index) for index in range(grid.workers)]
        assert sorted(rank for column in columns for rank in column) == list(range(size))
        assert sorted(rank for row in rows for rank in row) == list(range(size))
        assert all(len(column) == workers for column in columns)
        for column, row in itertools.product(columns, rows):
            assert len(set(column) & set(row)) == 1
        for rank, column in itertools.product(range(size), range(grid.columns)):
            assert rank in columns[grid.column_of(rank)]
            assert rank in rows[grid.row_of(rank)]
            shared = set(columns[column]) & set(rows[grid.row_of(rank)])
            assert {grid.root(rank, column)} == shared


def test_a_grid_is_even_and_has_bounds() -> None:
    for size, workers in [(8, 3), (8, 0), (0, 1), (4, 8)]:
        with pytest.raises(ValueError, match="cannot hold"):
            Grid(size, workers)
    with pytest.raises(IndexError, match="no column 4 among 4"):
        Grid(8, 2).column(4)
    with pytest.raises(IndexError, match="no row -1 among 2"):
        Grid(8, 2).row(-1)


@pytest.mark.parametrize(
    ("size", "fraction", "workers"),
    [
        (8, 0.5, 4),
        (8, 0.25, 2),
        (8, 1.0, 8),
        (8, 1 / 8, 1),
        (8, 0.01, 1),
        (8, 0.375, 4),
        (12, 0.5, 6),
        (12, 0.42, 6),
        (12, 0.4, 4),
        (7, 0.5, 1),
        (7, 0.6, 7),
        (7, 4 / 7, 7),
        (1, 0.3, 1),
        (6, 2.5 / 6, 3),
    ],
)
def test_nearest_divisor(size: int, fraction: float, workers: int) -> None:
    assert nearest_divisor(size, fraction) == workers


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_divisors(size: int) -> None:
    assert divisors(size) == [number for number in range(1, size + 1) if size % number == 0]
    assert all(nearest_divisor(size, number / size) == number for number in divisors(size))


# Longest first


def best_possible(weights: Sequence[float], bins: int) -> float:
    """The smallest largest load over all assignments."""
    loads = []
    for choice in itertools.product(range(bins), repeat=len(weights)):
        filled = [0.0] * bins
        for index, weight in zip(choice, weights, strict=True):
            filled[index] += weight
        loads.append(max(filled))
    return min(loads)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=7), st.integers(1, 3))
def test_longest_first_is_within_its_bound(weights: list[int], bins: int) -> None:
    chosen = longest_first(weights, bins)
    loads = [
        sum(weight for weight, index in zip(weights, chosen, strict=True) if index == bin_)
        for bin_ in range(bins)
    ]
    assert max(loads) <= (4 / 3 - 1 / (3 * bins)) * best_possible(weights, bins) + 1e-9


@settings(max_examples=30, deadline=None)
@given(models(largest=3), st.integers(1, 3))
def test_comm_opt_is_within_the_bound(layers: list[LayerUnit], size: int) -> None:
    loads = makespan(layers, place(layers, size, "comm-opt", split=False))
    weights = [solve_seconds(part, Compute()) for layer in layers for part in layer.parts]
    best = best_possible(weights, size)
    assert max(loads) <= (4 / 3 - 1 / (3 * size)) * best * (1 + 1e-9)


def test_ties_go_by_order() -> None:
    assert longest_first([1, 1, 1, 1, 1], 3) == [0, 1, 2, 0, 1]
    assert longest_first([1, 3, 3, 2], 2) == [1, 0, 1, 0]


# Whole placements


def solvers_of(layers: Sequence[LayerUnit], placement: Placement) -> list[tuple[int, ...]]:
    return [placement.solvers(layer.name, part.name) for layer in layers for part in layer.parts]


@settings(max_examples=200, deadline=None)
@given(models(ties=True), st.integers(1, 24), ALL, st.booleans(), st.booleans(), st.integers(1, 50))
def test_every_part_has_its_place(
    layers: list[LayerUnit],
    size: int,
    scheme: str | Hybrid,
    balanced: bool,
    split: bool,
    refresh_every: int,
) -> None:
    options = {"balanced": balanced, "split": split, "refresh_every": refresh_every}
    placement = place(layers, size, scheme, **options)
    assert placement == place(layers, size, scheme, **options)
    assert placement.scheme == str(scheme)
    assert placement.grid.size == size
    assert list(placement.assignments) == [layer.name for layer in layers]
    for layer in layers:
        assignment, workers = placement.assignments[layer.name], placement.workers(layer.name)
        assert [rank for rank in range(size) if placement.is_worker(layer.name, rank)] == [*workers]
        assert list(assignment.tasks) == [part.name for part in layer.parts]
        for part in layer.parts:
            task = assignment.tasks[part.name]
            solvers = placement.solvers(layer.name, part.name)
            assert set(solvers) <= set(workers)
            assert list(solvers) == sorted(set(solvers))
            if task.rank is not None:
                assert solvers == (task.rank,)
            elif task.split:
                assert split
                assert balanced
                assert part.shared_flops is not None
                assert len(solvers) > 1
            else:
                assert scheme in ("replicated", "spd")
                assert solvers == workers
    plain = json.loads(json.dumps(placement.to_json()))
    assert Placement.from_json(plain) == placement
    assert Placement.from_json(plain).to_json() == placement.to_json()


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 12), ALL)
def test_who_needs_and_who_keeps(layers: list[LayerUnit], size: int, scheme: str | Hybrid) -> None:
    placement = place(layers, size, scheme, link=Link(0, 1e-8))
    for index, layer in enumerate(layers):
        for statistic in layer.statistics:
            needed = placement.needs(layer, statistic.key)
            users = {
                rank
                for part in layer.parts
                if statistic.key in part.statistics
                for rank in placement.solvers(layer.name, part.name)
            }
            assert users == set(range(size) if needed is None else needed)
            keeper = placement.keeper(layer, statistic.key, index)
            assert keeper in (users or range(size))
            if len(users) > 1:
                other = placement.keeper(layer, statistic.key, index + 1)
                assert other != keeper


def test_needs_in_words() -> None:
    parts = (
        PartUnit("A", ("l/a", "l/both"), 1, 1),
        PartUnit("G", ("l/g", "l/both"), 1, 1, shared_flops=0),
    )
    statistics = tuple(StatisticUnit(f"l/{name}", 1) for name in ("a", "g", "both", "none"))
    layer = LayerUnit("l", statistics, parts, 1, 1)

    def needs(workers: int, a: Task, g: Task) -> list[tuple[int, ...] | None]:
        placement = Placement("any", Grid(4, workers), {"l": Assignment(0, {"A": a, "G": g})})
        return [placement.needs(layer, statistic.key) for statistic in statistics]

    assert needs(1, Task(0), Task(0)) == [(0,), (0,), (0,), ()]
    assert needs(4, Task(3), Task(1)) == [(3,), (1,), (1, 3), ()]
    assert needs(4, Task(), Task(1)) == [None, (1,), None, ()]
    assert needs(2, Task(), Task(2)) == [(0, 2), (2,), (0, 2), ()]
    assert needs(4, Task(2), Task(split=True)) == [(2,), None, None, ()]
    assert needs(4, Task(2), Task(split=True, ranks=(0, 1))) == [(2,), (0, 1), (0, 1, 2), ()]


@pytest.mark.parametrize("size", [1, 4, 8, 64])
def test_what_each_scheme_is(size: int) -> None:
    layers = resnet50()
    everyone = tuple(range(size))
    replicated = place(layers, size, "replicated")
    assert set(solvers_of(layers, replicated)) == {everyone}
    comm_opt = place(layers, size, "comm-opt", split=False)
    assert all(comm_opt.workers(layer.name) == everyone for layer in layers)
    assert all(len(ranks) == 1 for ranks in solvers_of(layers, comm_opt))
    used = set(solvers_of(layers, comm_opt))
    assert len(used) == size
    for scheme in ("mem-opt", "local", "layer-parallel"):
        alone = place(layers, size, scheme)
        for layer in layers:
            workers = alone.workers(layer.name)
            assert len(workers) == 1
            assert all(alone.solvers(layer.name, part.name) == workers for part in layer.parts)
        busy = {alone.workers(layer.name) for layer in layers}
        assert len(busy) == min(size, len(layers))


@pytest.mark.parametrize("size", [2, 6, 8])
def test_the_ends_of_hybrid(size: int) -> None:
    layers = resnet50()
    for fraction, scheme in [(1.0, "comm-opt"), (1 / size, "mem-opt")]:
        hybrid = place(layers, size, Hybrid(fraction))
        assert hybrid.assignments == place(layers, size, scheme).assignments


def test_hybrid_balances_columns_and_ranks() -> None:
    layers = resnet50()
    placement = place(layers, 8, Hybrid(0.25), compute=PURE)
    assert {placement.assignments[layer.name].column for layer in layers} == {0, 1, 2, 3}
    loads = makespan(layers, placement, PURE)
    assert max(loads) < 1.35 * sum(loads) / len(loads)


def test_without_balance_ranks_take_turns() -> None:
    layers = deeper(5)
    comm_opt = place(layers, 4, "comm-opt", balanced=False)
    assert solvers_of(layers, comm_opt) == [(index % 4,) for index in range(10)]
    mem_opt = place(layers, 4, "mem-opt", balanced=False)
    assert [mem_opt.assignments[layer.name].column for layer in layers] == [0, 1, 2, 3, 0]
    hybrid = place(layers, 4, Hybrid(0.5), balanced=False)
    assert [hybrid.workers(layer.name) for layer in layers] == [(0, 2), (1, 3)] * 2 + [(0, 2)]
    assert solvers_of(layers, hybrid) == [(0,), (2,), (1,), (3,)] * 2 + [(0,), (2,)]


def test_balance_beats_turns() -> None:
    layers = resnet50()
    for scheme in ("comm-opt", "mem-opt", Hybrid(0.5)):
        turns = makespan(layers, place(layers, 8, scheme, balanced=False))
        assert max(makespan(layers, place(layers, 8, scheme, split=False))) < max(turns)


@settings(max_examples=50, deadline=None)
@given(models(ties=True), st.integers(1, 8), st.booleans())
def test_tied_layers_have_one_owner(layers: list[LayerUnit], size: int, balanced: bool) -> None:
    placement = place(layers, size, "layer-parallel", balanced=balanced)
    owners: dict[str, set[int]] = {}
    for layer in layers:
        owners.setdefault(layer.tied_to, set()).add(placement.assignments[layer.name].column)
    assert all(len(ranks) == 1 for ranks in owners.values())


def test_rare_refreshes_weigh_preconditioning() -> None:
    """Two layers are dear to solve, two to precondition: what counts depends on how often."""

    def layer(name: str, solve: int, precondition: int) -> LayerUnit:
        return LayerUnit(name, (), (PartUnit("A", (), solve, 1),), precondition, 1)

    big = 10**12
    layers = [layer("s0", big, 1), layer("s1", big, 1), layer("p0", 1, big), layer("p1", 1, big)]
    often = place(layers, 2, "mem-opt", refresh_every=1)
    rarely = place(layers, 2, "mem-opt", refresh_every=10**9)
    for placement, names in [(often, ("s0", "s1")), (rarely, ("p0", "p1"))]:
        assert len({placement.assignments[name].column for name in names}) == 2


# SPD-KFAC


@settings(deadline=None)
@given(models(), st.integers(1, 8))
def test_a_free_network_sends_everything(layers: list[LayerUnit], size: int) -> None:
    placement = place(layers, size, "spd", link=FREE, split=False)
    assert all(len(ranks) == 1 for ranks in solvers_of(layers, placement))
    assert (
        placement.assignments == place(layers, size, "comm-opt", link=FREE, split=False).assignments
    )


@settings(deadline=None)
@given(models(), st.integers(2, 8))
def test_a_useless_network_sends_nothing(layers: list[LayerUnit], size: int) -> None:
    placement = place(layers, size, "spd", link=SLOW)
    assert placement.assignments == place(layers, size, "replicated").assignments


def test_between_them_cheap_parts_are_solved_everywhere() -> None:
    layers = resnet50()
    link, compute = Link(1e-3, 1e-9), Compute()
    placement = place(layers, 8, "spd", link=link, compute=compute)
    everywhere = set()
    for layer in layers:
        for part in layer.parts:
            cheap = compute.solve(part.flops) < link.broadcast(4 * part.solution_elements, 8)
            assert (placement.assignments[layer.name].tasks[part.name] == Task()) == cheap
            everywhere.add(cheap)
    assert everywhere == {True, False}


# Splitting


@pytest.mark.parametrize("size", [8, 16, 54, 64, 108, 256])
def test_splitting_breaks_the_bound_of_the_widest_factor(size: int) -> None:
    layers = resnet50(widest_eigen=0)
    widest = PURE.solve(4608**3)
    whole = max(makespan(layers, place(layers, size, "comm-opt", compute=PURE, split=False), PURE))
    divided = max(makespan(layers, place(layers, size, "comm-opt", compute=PURE), PURE))
    assert whole >= widest
    assert divided < 0.75 * widest
    assert divided >= widest / 3


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 16), st.sampled_from(["comm-opt", "spd", Hybrid(0.5)]))
def test_splitting_never_lengthens(
    layers: list[LayerUnit], size: int, scheme: str | Hybrid
) -> None:
    whole = place(layers, size, scheme, split=False)
    divided = place(layers, size, scheme)
    assert max(makespan(layers, divided)) <= max(makespan(layers, whole)) + 1e-12


def test_splitting_has_to_pay_for_its_traffic() -> None:
    layers = resnet50(widest_eigen=0)
    for link, splits in [(FREE, True), (Link(0, 1e-6), False)]:
        placement = place(layers, 16, "comm-opt", link=link)
        tasks = [
            task
            for assignment in placement.assignments.values()
            for task in assignment.tasks.values()
        ]
        assert any(task.split for task in tasks) == splits


def test_one_large_part_is_shared_by_all() -> None:
    part = PartUnit("A", ("l/A",), 3 * 10**12, 4, shared_flops=0)
    layer = LayerUnit("l", (StatisticUnit("l/A", 3),), (part,), 1, 1)
    placement = place([layer], 4, "comm-opt", link=FREE, compute=PURE)
    assert placement.assignments["l"].tasks["A"].split
    assert placement.solvers("l", "A") == (0, 1, 2, 3)
    assert makespan([layer], placement, PURE) == [pytest.approx(PURE.solve(part.flops) / 4)] * 4


def test_makespan_counts_every_solver() -> None:
    layers = deeper(3, widest_eigen=0)
    names = [layer.name for layer in layers]
    placement = Placement(
        "any",
        Grid(4, 2),
        {
            names[0]: Assignment(0, {"A": Task(), "G": Task(2)}),
            names[1]: Assignment(1, {"A": Task(split=True), "G": Task(split=True, ranks=(1, 3))}),
            names[2]: Assignment(1, {"A": Task(1), "G": Task(1)}),
        },
    )
    seconds = [[PURE.solve(part.flops) for part in layer.parts] for layer in layers]
    both = sum(solve_seconds(part, PURE, 2) for part in layers[1].parts)
    expected = [seconds[0][0], both + sum(seconds[2]), sum(seconds[0]), both]
    assert makespan(layers, placement, PURE) == pytest.approx(expected)


# The rest


@pytest.mark.parametrize("scheme", ["auto", "unknown", ""])
def test_other_schemes_cannot_be_placed(scheme: str) -> None:
    with pytest.raises(ValueError, match="Nothing can be placed by"):
        place(resnet50(), 4, scheme)


@pytest.mark.parametrize("count", [54, 160])
def test_placing_over_thousands_is_quick(count: int) -> None:
    for widest in (0, 2048):
        layers = deeper(count, widest)
        for scheme in [*NAMED, Hybrid(0.5), Hybrid(2**-6)]:
            placing, placement = calls(place, layers, 4096, scheme)
            timing, _ = calls(makespan, layers, placement)
            assert placing + timing < 10**6
