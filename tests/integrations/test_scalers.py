"""A gradient scaler that nobody names, as trainers use theirs, leaves no trace."""

import pytest
import torch
from torch import nn

import kronfac
from tests.training import assert_same, batch, factors, kfac, loss_of, mlp, parameters

STEPS = 4


def scaled_steps(
    model: nn.Module,
    optimizer: kronfac.KFAC,
    scaler: torch.amp.GradScaler,
    numbers: range = range(STEPS),
    clip: float | None = None,
) -> None:
    for number in numbers:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(number))).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def plain_steps(
    model: nn.Module,
    optimizer: kronfac.KFAC,
    numbers: range = range(STEPS),
    clip: float | None = None,
) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_it_is_found_at_the_first_step(sharing: str, clip: float | None) -> None:
    model, twin = mlp(), mlp()
    optimizer, expected = kfac(model, sharing=sharing), kfac(twin, sharing=sharing)
    scaler = torch.amp.GradScaler("cpu")
    scaled_steps(model, optimizer, scaler, clip=clip)
    plain_steps(twin, expected, clip=clip)
    assert optimizer.grad_scaler is scaler
    assert_same(factors(optimizer, "G"), factors(expected, "G"))
    assert_same(parameters(model), parameters(twin))


def test_another_scaler_takes_its_place() -> None:
    model, twin = mlp(), mlp()
    optimizer, expected = kfac(model), kfac(twin)
    scaled_steps(model, optimizer, torch.amp.GradScaler("cpu", init_scale=64.0), range(2))
    scaled_steps(model, optimizer, torch.amp.GradScaler("cpu", init_scale=4096.0), range(2, STEPS))
    plain_steps(twin, expected)
    assert_same(parameters(model), parameters(twin))


def test_it_is_found_when_its_first_step_overflows() -> None:
    model, twin = mlp(), mlp()
    optimizer, expected = kfac(model), kfac(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    optimizer.zero_grad()
    scaler.scale(100 * loss_of(model, batch(9))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.stats()["steps"] == 0
    assert optimizer.grad_scaler is scaler
    scaled_steps(model, optimizer, scaler, range(1))
    plain_steps(twin, expected, range(1))
    # What the skipped forward has put into A stays there (see the limits in the quick start).
    assert_same(factors(optimizer, "G"), factors(expected, "G"))


def test_nobody_else_who_asks_is_taken_for_a_scaler() -> None:
    optimizer = kfac(mlp())
    assert not optimizer._step_supports_amp_scaling
    assert not getattr(optimizer, "_step_supports_amp_scaling", True)
    assert optimizer.grad_scaler is None
