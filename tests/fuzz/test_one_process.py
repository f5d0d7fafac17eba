"""Random nets and options in one process: against a dense oracle, and what must hold for every run.

A failure prints the run. ``make_case(seed)`` makes it again, and ``FUZZ_WITHOUT=inplace,tied`` takes
features out of all nets (see ``tests/fuzz/nets.py``).
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from tests.fuzz.cases import Case, make_case
from tests.fuzz.oracle import Oracle
from tests.fuzz.training import assert_same_bits, difference, take_step, train, values
from tests.training import hooks, saved_and_loaded

#: Advice on settings that were drawn by chance is not looked at; a layer that is missed raises.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STEPS, HALF = 6, 3
SEEDS = 500
PLAIN = (bool, int, float, str)


def runs(quick: int, start: int = 0) -> Any:
    """A few seeds, and hundreds more behind the marker ``slow``."""
    few = range(start, start + quick)
    seeds = [
        pytest.param(seed, id=str(seed), marks=[] if seed in few else [pytest.mark.slow])
        for seed in range(SEEDS)
    ]
    return pytest.mark.parametrize("case", seeds, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The run of a seed, which a failure shows."""
    made = make_case(request.param)
    print(made)
    return made


@runs(quick=40)
def test_every_step_is_that_of_the_dense_oracle(case: Case) -> None:
    net, _ = case.make()
    optimizer = case.optimizer(net)
    oracle = Oracle(case) if case.has_oracle else None
    for step in range(STEPS):
        take_step(net, optimizer, case, step)
        assert all(bool(value.isfinite().all()) for value in values(net).values()), f"step {step}"
        if oracle is not None:
            oracle.step()
            error, name = difference(values(net), values(oracle.net))
            assert error < 1e-7, f"step {step}: {name!r} differs by {error:.1e}"


@runs(quick=10, start=100)
def test_a_loaded_state_resumes_bit_for_bit(case: Case) -> None:
    net, _ = case.make()
    optimizer = case.optimizer(net)
    train(net, optimizer, case, range(HALF))
    saved = saved_and_loaded((net.state_dict(), optimizer.state_dict()))
    train(net, optimizer, case, range(HALF, STEPS))

    other, _ = case.make()
    resumed = case.optimizer(other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, case, range(HALF, STEPS))
    assert_same_bits(other, net)


@runs(quick=10, start=200)
def test_a_copy_of_model_and_optimizer_goes_on_equally(case: Case) -> None:
    net, _ = case.make()
    optimizer = case.optimizer(net)
    train(net, optimizer, case, range(HALF))
    other, copied = copy.deepcopy((net, optimizer))
    train(net, optimizer, case, range(HALF, STEPS))
    train(other, copied, case, range(HALF, STEPS))
    assert_same_bits(other, net)


@runs(quick=10, start=310)
def test_a_detached_optimizer_is_its_base(case: Case) -> None:
    net, _ = case.make()
    optimizer = case.optimizer(net)
    train(net, optimizer, case, range(HALF))
    optimizer.detach()
    assert hooks(net) == 0

    other = copy.deepcopy(net)
    base = case.make_base(other)
    base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    for step in range(HALF, STEPS):
        backward_only = optimizer if not case.sampled else optimizer.base
        take_step(net, backward_only, case, step)
        take_step(other, base, case, step)
    assert_same_bits(other, net)


@runs(quick=20)
def test_the_summary_accounts_for_every_parameter_once(case: Case) -> None:
    net, _ = case.make()
    optimizer = case.optimizer(net)
    train(net, optimizer, case, range(1))
    text = str(optimizer)
    found = re.findall(r"([\d,]+) parameters(?: preconditioned|\):)", text)
    assert sum(int(number.replace(",", "")) for number in found) == sum(
        p.numel() for p in net.parameters()
    ), text


@runs(quick=5, start=400)
def test_stats_are_plain_numbers(case: Case) -> None:
    net, _ = case.make()
    optimizer = case.optimizer(net)
    train(net, optimizer, case, range(2))
    waiting: list[Any] = [optimizer.stats()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        else:
            assert type(value) in PLAIN, repr(value)


def test_a_seed_makes_the_same_run_again() -> None:
    """A seed is a reproducer."""
    left, right = make_case(7), make_case(7)
    assert str(left) == str(right)
    assert_same_bits(left.make()[0], right.make()[0])
    for one, other in zip(left.batch(3), right.batch(3), strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.targets, other.targets)
