"""Statistics are taken and solutions renewed at exactly the steps that the schedule names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kronfac
from kronfac.step.schedule import spread_offsets
from tests import oracles
from tests.training import (
    applied,
    assert_close,
    batch,
    counts,
    factors,
    frozen_kfac,
    kfac,
    layers,
    mlp,
    step,
)

pytestmark = pytest.mark.usefixtures("double_precision")


class Record:
    """The steps at which each thing happened."""

    def __init__(
        self,
        steps: int,
        before_step: Callable[[kronfac.KFAC, int], None] = lambda *_: None,
        **options: Any,
    ) -> None:
        model = mlp()
        self.optimizer = frozen_kfac(model, **options)
        self.factor_steps: list[int] = []
        self.refreshes: dict[str, list[int]] = {name: [] for name in layers(self.optimizer)}
        for t in range(steps):
            before_step(self.optimizer, t)
            taken = self.optimizer.stats()["factor_updates"]
            step(model, self.optimizer, batch(t))
            if self.optimizer.stats()["factor_updates"] > taken:
                self.factor_steps.append(t)
            for name, state in layers(self.optimizer).items():
                if state.solved_at == t:
                    self.refreshes[name].append(t)

    @property
    def refresh_steps(self) -> list[int]:
        first, *others = self.refreshes.values()
        assert all(other == first for other in others)
        return first


# --- intervals -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3])
def test_factor_steps_come_every_so_many_steps(every: int) -> None:
    record = Record(8, factor_every=every, refresh_every=4)
    assert record.factor_steps == list(range(0, 8, every))


@pytest.mark.parametrize("every", [1, 3, 4])
def test_refreshes_come_every_so_many_steps(every: int) -> None:
    assert Record(9, refresh_every=every).refresh_steps == list(range(0, 9, every))


def test_a_long_first_interval_also_refreshes_at_powers_of_two() -> None:
    record = Record(45, factor_every=10, refresh_every=20)
    assert record.refresh_steps == [0, 1, 2, 4, 8, 16, 20, 40]


def test_early_refreshes_take_statistics_and_leave_the_grid_alone() -> None:
    record = Record(45, factor_every=10, refresh_every=20)
    assert record.factor_steps == [0, 1, 2, 4, 8, 10, 16, 20, 30, 40]


def test_the_grid_stays_where_early_refreshes_fall_on_it() -> None:
    record = Record(14, factor_every=2, refresh_every=10)
    assert record.factor_steps == [0, 1, 2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(("every", "early"), [(9, False), (10, True)])
def test_early_refreshes_belong_to_intervals_of_ten_and_more(every: int, early: bool) -> None:
    expected = [0, 1, 2, 4, 8] if early else [0]
    assert Record(9, refresh_every=every).refresh_steps == expected


def test_early_refreshes_can_be_turned_off() -> None:
    record = Record(25, factor_every=10, refresh_every=20, early_refresh=False)
    assert record.refresh_steps == [0, 20]
    assert record.factor_steps == [0, 10, 20]


def test_a_refresh_uses_the_statistics_of_its_own_step() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, damping=0.1, solver="eigen")
    before, after = applied(model, optimizer, batch())
    A, G = factors(optimizer, "A")["4"], factors(optimizer, "G")["4"]
    V = torch.cat([before["4.weight"], before["4.bias"][:, None]], dim=1)
    P = torch.cat([after["4.weight"], after["4.bias"][:, None]], dim=1)
    assert_close(P, oracles.eigen_step(A, G, V, 0.1))


# --- callables and changes -------------------------------------------------------------------


def test_intervals_may_be_callables_of_the_step() -> None:
    record = Record(12, factor_every=lambda t: 1 if t < 4 else 3, refresh_every=9)
    assert record.factor_steps == [0, 1, 2, 3, 6, 9]


def test_a_callable_gives_the_value_and_not_a_factor_on_the_last_one() -> None:
    seen: list[int] = []

    def damping(t: int) -> float:
        seen.append(t)
        return 0.5**t

    record = Record(4, damping=damping, solver="eigen")
    assert sorted(set(seen)) == [0, 1, 2, 3, 4]  # stats() asks for the coming step
    assert record.optimizer.damping is damping


def test_a_callable_decay_weighs_each_update() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, decay=lambda t: {1: 0.5, 2: 0.25}.get(t, 1.0))
    for number in range(3):
        step(model, optimizer, batch(number))
    assert counts(optimizer, "A")["0"] == (8 * 0.5 + 8) * 0.25 + 8


@pytest.mark.filterwarnings("ignore:refresh_every=1 is less than factor_every=3")
@pytest.mark.parametrize("name", ["factor_every", "refresh_every"])
def test_intervals_may_be_set_in_the_middle(name: str) -> None:
    def change(optimizer: kronfac.KFAC, t: int) -> None:
        if t == 4:
            setattr(optimizer, name, 1)

    record = Record(7, change, **{"factor_every": 1, "refresh_every": 1, name: 3})
    steps = record.factor_steps if name == "factor_every" else record.refresh_steps
    assert steps == [0, 3, 4, 5, 6]


def test_an_interval_set_after_backward_counts_from_the_next_step() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, factor_every=5, refresh_every=5)
    step(model, optimizer, batch(0))
    torch.nn.functional.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
    optimizer.factor_every = 1
    optimizer.step()
    assert optimizer.stats()["factor_updates"] == 1
    step(model, optimizer, batch(2))
    assert optimizer.stats()["factor_updates"] == 2


@pytest.mark.parametrize("name", ["damping", "factor_every", "refresh_every", "decay"])
def test_hyperparameters_read_back_as_they_were_given(name: str) -> None:
    optimizer = kfac(mlp())
    setattr(optimizer, name, 1)
    assert getattr(optimizer, name) == 1


def test_decay_may_be_set_in_the_middle() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, decay=1.0)
    step(model, optimizer, batch(0))
    optimizer.decay = 0.0
    step(model, optimizer, batch(1))
    assert counts(optimizer, "A")["0"] == 8


# --- damping ---------------------------------------------------------------------------------


def preconditioned_after_change(solver: str, refresh_every: int) -> tuple[Any, Any]:
    """Gradients of a run that raises its damping at step 1, and of one that always had it."""
    changed, constant = mlp(), mlp()
    options: dict[str, Any] = {"solver": solver, "refresh_every": refresh_every}
    optimizer = frozen_kfac(changed, damping=0.01, **options)
    reference = frozen_kfac(constant, damping=1.0, **options)
    step(changed, optimizer, batch(0))
    step(constant, reference, batch(0))
    optimizer.damping = 1.0
    _, after = applied(changed, optimizer, batch(1))
    _, expected = applied(constant, reference, batch(1))
    return after, expected


def test_damping_acts_at_once_in_eigen_form() -> None:
    after, expected = preconditioned_after_change("eigen", refresh_every=5)
    assert_close(after, expected)


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
def test_damping_waits_for_the_next_refresh_in_inverse_form(solver: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, solver=solver, damping=0.01, refresh_every=5)
    step(model, optimizer, batch(0))
    _, before = applied(model, optimizer, batch(1))
    optimizer.damping = 1.0
    _, after = applied(model, optimizer, batch(1))
    assert_close(after, before)


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
def test_damping_acts_at_the_next_refresh_in_inverse_form(solver: str) -> None:
    after, expected = preconditioned_after_change(solver, refresh_every=1)
    assert_close(after, expected)


# --- stagger ---------------------------------------------------------------------------------


def test_staggered_layers_all_refresh_at_the_start() -> None:
    record = Record(1, refresh_every=6, stagger=True)
    assert set(map(tuple, record.refreshes.values())) == {(0,)}


def test_staggered_layers_refresh_once_per_interval_at_their_own_offset() -> None:
    record = Record(20, refresh_every=6, stagger=True)
    for name, state in layers(record.optimizer).items():
        grid = [state.offset + 6 * k for k in range(4)]
        assert record.refreshes[name] == [0, *(t for t in grid if 0 < t < 20)]


def test_staggered_layers_do_not_all_share_an_offset() -> None:
    offsets = {state.offset for state in layers(frozen_kfac(mlp(), stagger=True, refresh_every=6))
               .values()}  # fmt: skip
    assert len(offsets) > 1


def test_a_staggered_layer_due_at_an_early_refresh_keeps_its_grid() -> None:
    record = Record(30, refresh_every=12, stagger=True)
    for name, state in layers(record.optimizer).items():
        grid = [state.offset + 12 * k for k in range(3)]
        expected = {0, 1, 2, 4, 8} | {t for t in grid if 0 < t < 30}
        assert record.refreshes[name] == sorted(expected)


def test_offsets_lie_inside_the_interval() -> None:
    assert all(0 <= offset < 10 for offset in spread_offsets([5, 1, 1, 90, 3], 10))


def test_equal_costs_are_spread_evenly() -> None:
    assert spread_offsets([1, 1, 1, 1], 8) == [0, 2, 4, 6]


def test_the_dearest_layer_comes_first() -> None:
    assert spread_offsets([1, 9], 10) == [9, 0]


# --- statistics ------------------------------------------------------------------------------


def test_two_batches_at_half_decay() -> None:
    model, one, two = mlp(), mlp(), mlp()
    optimizer = frozen_kfac(model, decay=0.5)
    singles = [frozen_kfac(one), frozen_kfac(two)]
    for number, (net, single) in enumerate(zip((one, two), singles, strict=True)):
        step(model, optimizer, batch(number))
        step(net, single, batch(number))
    for side in ("A", "G"):
        first, second = (factors(single, side) for single in singles)
        expected = {name: (0.5 * first[name] + second[name]) / 1.5 for name in first}
        assert_close(factors(optimizer, side), expected)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_ends_of_decay(decay: float) -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = frozen_kfac(model, decay=decay), frozen_kfac(twin, decay=1.0)
    for number in range(3):
        step(model, optimizer, batch(number))
        if decay == 1.0 or number == 2:
            step(twin, reference, batch(number))
    assert_close(factors(optimizer, "G"), factors(reference, "G"))
