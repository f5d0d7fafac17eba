"""Each shape is its formula; warm-up comes before any; momentum follows the learning rate."""

import copy
import math
from typing import Any

import pytest
import torch

import kronfac
from kronfac.runs.errors import UserError
from kronfac.train.optim import schedules
from tests.training import batch, loss_of, mlp


def test_constant_never_changes() -> None:
    shape = schedules.build("constant", total=10)
    assert [shape(e) for e in (0.0, 5.0, 20.0)] == [1.0, 1.0, 1.0]


def test_linear_is_a_straight_line_to_zero_at_the_end() -> None:
    shape = schedules.build("linear", total=8)
    assert [shape(e) for e in (0.0, 2.0, 8.0, 9.0)] == [1.0, 0.75, 0.0, 0.0]


def test_cosine_is_half_a_wave() -> None:
    shape = schedules.build("cosine", total=8)
    assert shape(0.0) == 1.0
    assert shape(2.0) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert shape(8.0) == pytest.approx(0.0)


# e_start, e_end and power of the six configurations of Osawa et al., batch 4,096 to 131,072.
OSAWA = [(1, 53, 11), (1, 53.5, 8), (1, 53.5, 8), (1.5, 49.5, 3.5), (2, 64.5, 2.9), (1, 95.0, 3.0)]


@pytest.mark.parametrize(("start", "end", "power"), OSAWA)
def test_polynomial_is_the_formula_of_osawa(start: float, end: float, power: float) -> None:
    shape = schedules.build("polynomial", total=60, start=start, end=end, power=power)
    assert shape(0.0) == shape(start) == 1.0
    assert shape(end) == shape(end + 10) == 0.0
    for epoch in (start + 0.1, 20.0, 40.0):
        expected = (1 - (epoch - start) / (end - start)) ** power
        assert shape(epoch) == pytest.approx(expected)


def test_polynomial_of_power_one_is_linear() -> None:
    line = schedules.build("linear", total=8, warmup=1)
    power = schedules.build("polynomial", total=8, warmup=1, power=1)
    assert [power(e / 7) for e in range(60)] == [line(e / 7) for e in range(60)]


def test_steps_go_down_at_milestones() -> None:
    shape = schedules.build("steps", total=100, milestones=[35, 75, 90], gamma=0.5)
    factors = [shape(e) for e in (0.0, 34.99, 35.0, 75.0, 90.0)]
    assert factors == [1.0, 1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("kind", schedules.NAMES)
def test_warm_up_rises_linearly_before_any_shape(kind: str) -> None:
    shape = schedules.build(kind, total=10, warmup=2, warmup_from=0.25)
    assert [shape(e) for e in (0.0, 1.0, 2.0)] == [0.25, 0.625, 1.0]
    assert all(0.0 <= shape(e / 3) <= 1.0 for e in range(40))


def test_shapes_with_a_start_begin_to_fall_when_warm_up_is_over() -> None:
    shape = schedules.build("linear", total=10, warmup=2)
    assert [shape(e) for e in (2.0, 6.0, 10.0)] == [1.0, 0.5, 0.0]


def test_milestones_count_from_the_beginning_of_training() -> None:
    shape = schedules.build("steps", total=55, warmup=5, milestones=[25, 35])
    assert [shape(e) for e in (5.0, 24.0, 25.0, 35.0)] == pytest.approx([1.0, 1.0, 0.1, 0.01])


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("cosin", {}, "shape='cosin' is unknown; did you mean 'cosine'"),
    ("wave", {}, "constant, cosine, linear, polynomial, steps"),
    ("cosine", {"milestones": [3]}, "milestones"),
    ("polynomial", {"power": 0}, "power=0"),
    ("polynomial", {"start": 5, "end": 5}, "start=5"),
    ("linear", {"warmup": 10}, "start=10"),
    ("linear", {"warmup": 1, "warmup_from": 2.0}, "warmup_from=2.0"),
    ("steps", {"milestones": [-1]}, "milestones"),
    ("steps", {"milestones": [1], "gamma": 2}, "gamma=2"),
]


@pytest.mark.parametrize(("kind", "options", "named"), BAD)
def test_what_is_wrong_is_named(kind: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        schedules.build(kind, total=10, **options)


# --- momentum tied to the learning rate ---------------------------------------------------------


def test_momentum_of_each_group_follows_its_own_learning_rate() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [
        {"params": first.parameters(), "lr": 0.1, "momentum": 0.9},
        {"params": second.parameters(), "lr": 0.4, "momentum": 0.5},
    ]
    optimizer = torch.optim.SGD(groups)
    tied = schedules.TiedMomentum(optimizer)
    for group, rate in zip(optimizer.param_groups, (0.05, 0.1), strict=True):
        group["lr"] = rate
    tied.update()
    assert [g["momentum"] for g in optimizer.param_groups] == pytest.approx([0.45, 0.125])


def test_momentum_of_k_fac_follows_the_learning_rate() -> None:
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = kronfac.KFAC(model, base, momentum=0.8)
    tied = schedules.TiedMomentum(optimizer)
    base.param_groups[0]["lr"] = 0.05
    tied.update()
    assert optimizer.momentum == pytest.approx(0.2)
    assert base.param_groups[0]["momentum"] == 0


def test_momentum_of_a_base_under_k_fac_follows_the_learning_rate() -> None:
    model = mlp()
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8))
    tied = schedules.TiedMomentum(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    tied.update()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.4)
    assert optimizer.momentum == 0


def test_what_momentum_was_at_first_is_in_checkpoints() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    optimizer.param_groups[0]["initial_lr"] = 0.2
    tied = schedules.TiedMomentum(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    tied.update()
    other = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = schedules.TiedMomentum(other)
    again.update()
    assert other.param_groups[0]["momentum"] == pytest.approx(0.4)


def test_an_optimizer_without_momentum_is_refused() -> None:
    with pytest.raises(UserError, match="has none"):
        schedules.TiedMomentum(torch.optim.SGD(mlp().parameters(), lr=0.1))


def test_a_changed_momentum_of_k_fac_acts_at_the_next_step() -> None:
    """``buf ← μ·buf + V`` with the μ of each step, in front of a preconditioner that is the identity."""
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    # So large a damping leaves the direction as it is, and graft its length.
    optimizer = kronfac.KFAC(model, base, momentum=0.9, damping=1e8, rescale="graft")
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for number, momentum in enumerate((0.9, 0.5, 0.0)):
        optimizer.momentum = momentum
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        buffers = [momentum * b + g for b, g in zip(buffers, gradients, strict=True)]
        optimizer.step()
        for parameter, buffer in zip(model.parameters(), buffers, strict=True):
            torch.testing.assert_close(parameter.grad, buffer, rtol=1e-3, atol=1e-6)


def test_momentum_cannot_be_switched_on_later() -> None:
    model = mlp()
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="cannot be set later"):
        optimizer.momentum = 0.5
