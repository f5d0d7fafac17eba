"""Mixed precision: gradient scalers leave no trace, and statistics stay in single precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.training import (
    assert_close,
    assert_same,
    batch,
    cnn,
    counts,
    factors,
    images,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    step,
    train,
)

Data = tuple[Tensor, Tensor]


def scaled_step(
    model: nn.Module,
    optimizer: kronfac.KFAC,
    scaler: torch.amp.GradScaler,
    data: Data,
    loss: Callable[[nn.Module, Data], Tensor] = loss_of,
) -> None:
    optimizer.zero_grad()
    scaler.scale(loss(model, data)).backward()
    scaler.step(optimizer)
    scaler.update()


def overflowing() -> torch.amp.GradScaler:
    """Its first factor is too large for single precision, its second is not."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)


def large_loss(model: nn.Module, data: Data) -> Tensor:
    """A loss whose gradient overflows under `overflowing`."""
    return 100 * loss_of(model, data)


# --- gradient scalers ------------------------------------------------------------------------


@pytest.mark.parametrize("rescale", [None, "kl-clip", "graft", "unit"])
def test_a_scaler_changes_nothing(rescale: str | None) -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = kfac(model, rescale=rescale, grad_scaler=scaler)
    for number in range(3):
        scaled_step(model, optimizer, scaler, batch(number))
    train(twin, kfac(twin, rescale=rescale), range(3))
    assert_same(parameters(model), parameters(twin))


def test_a_disabled_scaler_changes_nothing() -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaled_step(model, kfac(model, grad_scaler=scaler), scaler, batch())
    step(twin, kfac(twin), batch())
    assert_same(parameters(model), parameters(twin))


def test_the_scaler_may_be_given_later() -> None:
    model, twin = mlp(), mlp()
    optimizer = kfac(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer.grad_scaler = scaler
    scaled_step(model, optimizer, scaler, batch())
    step(twin, kfac(twin), batch())
    assert_same(parameters(model), parameters(twin))


def test_unscaling_by_hand_before_clipping_changes_nothing() -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, kfac_twin = kfac(model, grad_scaler=scaler), kfac(twin)
    scaler.scale(loss_of(model, batch())).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    loss_of(twin, batch()).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    kfac_twin.step()
    assert_close(parameters(model), parameters(twin))


def test_a_fused_base_does_not_hide_the_scale_from_us() -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    base = SGD(model.parameters(), lr=0.1, fused=True)
    scaled_step(model, kfac(model, base, grad_scaler=scaler), scaler, batch())
    step(twin, kfac(twin, SGD(twin.parameters(), lr=0.1, fused=True)), batch())
    assert_same(parameters(model), parameters(twin))


def large_step(model: nn.Module, optimizer: kronfac.KFAC, data: Data) -> None:
    optimizer.zero_grad()
    large_loss(model, data).backward()
    optimizer.step()


def test_the_overflowing_loss_does_overflow() -> None:
    model = mlp()
    overflowing().scale(large_loss(model, batch())).backward()
    assert not all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_overflow_on_the_first_step_skips_it() -> None:
    model = mlp()
    scaler = overflowing()
    optimizer = kfac(model, grad_scaler=scaler)
    before = parameters(model)
    scaled_step(model, optimizer, scaler, batch(), large_loss)
    assert optimizer.stats()["steps"] == 0
    assert_same(parameters(model), before)


def test_an_overflow_on_the_first_step_leaves_nothing_behind() -> None:
    model, twin = mlp(), mlp()
    scaler = overflowing()
    optimizer, reference = kfac(model, grad_scaler=scaler), kfac(twin)
    scaled_step(model, optimizer, scaler, batch(9), large_loss)  # overflows
    scaled_step(model, optimizer, scaler, batch(), large_loss)
    large_step(twin, reference, batch())
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_a_run_with_an_overflow_ends_as_the_run_without_a_scaler(decay: float) -> None:
    model, twin = mlp(), mlp()
    scaler = overflowing()
    optimizer = kfac(model, grad_scaler=scaler, decay=decay)
    reference = kfac(twin, decay=decay)
    loss_of(twin, batch(0))  # the inputs of a forward count even if its gradient is not used
    for number in (0, 0, 1, 2):  # the first overflows
        scaled_step(model, optimizer, scaler, batch(number), large_loss)
    for number in (0, 1, 2):
        large_step(twin, reference, batch(number))
    assert_same(parameters(model), parameters(twin))


def test_the_models_own_zero_grad_after_an_overflow_leaves_nothing_behind() -> None:
    model, twin = mlp(), mlp()
    scaler = overflowing()
    optimizer, reference = kfac(model, grad_scaler=scaler), kfac(twin)
    scaled_step(model, optimizer, scaler, batch(9), large_loss)  # overflows
    model.zero_grad()
    scaler.scale(large_loss(model, batch())).backward()
    scaler.step(optimizer)
    large_step(twin, reference, batch())
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_single_precision_under_autocast(sharing: str) -> None:
    model = cnn()
    optimizer = kfac(model, sharing=sharing)
    x, y = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    found: list[Any] = []
    for state in layers(optimizer).values():
        found += [running.sum.dtype for running in state.running.values()]
        found += [value.dtype for value in state.solution.values()]
    assert set(found) == {torch.float32}


def test_products_of_rows_are_not_rounded_by_autocast() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_same(factors(optimizer, "A")["0"], factors(reference, "A")["0"])


def test_a_backward_inside_autocast_changes_nothing() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    for net, inside in ((model, True), (twin, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, batch())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            loss.backward()
    optimizer.step()
    reference.step()
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


def test_a_half_precision_model_has_single_precision_factors() -> None:
    model = mlp(dtype=torch.bfloat16)
    optimizer = kfac(model)
    x, y = batch()
    step(model, optimizer, (x.bfloat16(), y))
    assert {factor.dtype for factor in factors(optimizer, "G").values()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_double_precision_model_has_double_precision_factors() -> None:
    model = mlp(dtype=torch.float64)
    optimizer = kfac(model)
    x, y = batch()
    step(model, optimizer, (x.double(), y))
    assert {factor.dtype for factor in factors(optimizer, "G").values()} == {torch.float64}


def test_counts_are_exact_far_beyond_single_precision() -> None:
    model = mlp()
    optimizer = kfac(model, decay=1.0)
    step(model, optimizer, batch())
    state = layers(optimizer)["0"].running["A"]
    state.count.fill_(2.0**25)
    step(model, optimizer, batch(1, samples=1))
    assert counts(optimizer, "A")["0"] == 2**25 + 1
