"""Numbers that are not finite, decompositions that fail, layers that are dead."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronfac
from kronfac.step.pipeline import MAX_FAILURES
from tests.training import (
    applied,
    assert_close,
    assert_same,
    batch,
    cnn,
    factors,
    frozen_kfac,
    gradients,
    images,
    kfac,
    loss_of,
    mlp,
    parameters,
    step,
)

SOLVERS = ["eigen", "separable", "cholesky", "newton-schulz"]
RESCALES = [None, "auto", "kl-clip", "trust-region", "graft", "unit", "orthogonal"]
BAD = [float("nan"), float("inf"), -float("inf")]


pytestmark = pytest.mark.usefixtures("double_precision")


def all_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


# --- batches that are not finite -------------------------------------------------------------


def poisoned(value: float) -> tuple[Tensor, Tensor]:
    x, y = batch(1)
    x[2, 1] = value
    return x, y


def repaired_step(model: nn.Module, optimizer: kronfac.KFAC) -> None:
    """Step as users do who set bad gradients to zero: the base optimizer's part is finite."""
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(0, 0, 0)
    optimizer.step()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_bad_micro_batch_is_dropped_from_the_statistics(sharing: str) -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, sharing=sharing)
    reference = frozen_kfac(twin, sharing=sharing, loss_average=16)
    (loss_of(model, batch(0)) / 2).backward()
    (loss_of(model, poisoned(float("nan"))) / 2).backward()
    repaired_step(model, optimizer)
    (loss_of(twin, batch(0)) / 2).backward()
    reference.step()
    # N is 16 for the good half too, of which 8 samples are counted.
    assert_close(factors(optimizer, "A"), factors(reference, "A"))
    expected = {name: factor * 2 for name, factor in factors(reference, "G").items()}
    assert_close(factors(optimizer, "G"), expected)


@pytest.mark.parametrize("value", BAD)
def test_bad_inputs_are_dropped_and_counted(value: float) -> None:
    model = nn.Linear(4, 3)
    optimizer = frozen_kfac(model, fisher="forward")
    loss_of(model, poisoned(value)).backward()
    repaired_step(model, optimizer)
    assert optimizer.stats()["dropped"] == {"": 1}


@pytest.mark.parametrize("value", BAD)
def test_bad_output_gradients_are_dropped_and_counted(value: float) -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    (loss_of(model, batch()) * value).backward()
    repaired_step(model, optimizer)
    assert optimizer.stats()["dropped"] == {"0": 1, "2": 1, "4": 1}


def test_good_contributions_are_not_counted_as_dropped() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    step(model, optimizer, batch())
    assert optimizer.stats()["dropped"] == {"0": 0, "2": 0, "4": 0}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("value", BAD)
def test_the_batch_after_a_bad_first_one_proceeds(value: float, solver: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, solver=solver)
    loss_of(model, poisoned(value)).backward()
    repaired_step(model, optimizer)
    before, after = applied(model, optimizer, batch(2))
    assert all(bool(torch.isfinite(g).all()) for g in after.values())
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_bad_batch_leaves_the_last_solution_in_force() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin, refresh_every=2)
    for net, used in ((model, optimizer), (twin, reference)):
        step(net, used, batch(0))
    optimizer.zero_grad()
    loss_of(model, poisoned(float("nan"))).backward()
    reference.zero_grad()
    loss_of(twin, batch(3)).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        parameter.grad.copy_(other.grad)  # as a user who repairs gradients would
    optimizer.step()
    reference.step()
    assert_close(gradients(model), gradients(twin))


@pytest.mark.parametrize("fisher", ["mc", "forward"])
def test_a_bad_loss_does_not_reach_statistics_that_do_not_use_it(fisher: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher=fisher)
    x, y = batch()
    outputs = model(x)
    if fisher == "mc":
        optimizer.observe(outputs)
    (F.cross_entropy(outputs, y) * float("nan")).backward()
    repaired_step(model, optimizer)
    assert optimizer.stats()["dropped"] == {"0": 0, "2": 0, "4": 0}


def test_parameters_stay_finite_when_the_user_skips_bad_steps() -> None:
    model = mlp()
    optimizer = kfac(model, momentum=0.9)
    for data in (batch(0), poisoned(float("inf")), batch(2), poisoned(float("nan")), batch(3)):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()
    assert all_finite(model)
    assert optimizer.stats()["steps"] == 3


def test_a_bad_batch_between_good_ones_leaves_the_averages_of_the_good_ones() -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, decay=1.0)
    reference = frozen_kfac(twin, decay=1.0)
    for data in (batch(0), poisoned(float("nan")), batch(2)):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        repaired_step(model, optimizer)
    for data in (batch(0), batch(2)):
        step(twin, reference, data)
    assert_close(factors(optimizer, "A"), factors(reference, "A"))
    assert_close(factors(optimizer, "G"), factors(reference, "G"))


# --- decompositions that fail ----------------------------------------------------------------


@pytest.fixture(params=["eigen", "cholesky"])
def solver(request: pytest.FixtureRequest) -> Any:
    return request.param


def break_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = ("eigen_batch", "cholesky_inverse_batch")
    for name in ("eigen", "cholesky_inverse", "newton_schulz_inverse", *batched):
        monkeypatch.setattr(f"kronfac.methods.kfac.block.{name}", lambda *_: None)


def test_without_a_first_solution_the_gradient_stays_raw(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_solvers(monkeypatch)
    model = mlp()
    optimizer = frozen_kfac(model, solver=solver)
    before, after = applied(model, optimizer, batch())
    assert_same(before, after)
    assert optimizer.stats()["without_solution"] == ["0", "2", "4"]


def test_a_failure_keeps_the_last_good_solution(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, solver=solver)
    reference = frozen_kfac(twin, solver=solver, refresh_every=2)
    step(model, optimizer, batch(0))
    step(twin, reference, batch(0))
    break_solvers(monkeypatch)
    step(model, optimizer, batch(1))
    step(twin, reference, batch(1))
    assert_same(gradients(model), gradients(twin))


def test_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    break_solvers(monkeypatch)
    model = mlp()
    optimizer = frozen_kfac(model)
    for number in range(3):
        step(model, optimizer, batch(number))
    assert optimizer.stats()["failures"] == {"0": 3, "2": 3, "4": 3}


def test_too_many_failures_in_a_row_stop_training_by_name(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_solvers(monkeypatch)
    model = mlp()
    optimizer = frozen_kfac(model, solver=solver)
    for number in range(MAX_FAILURES - 1):
        step(model, optimizer, batch(number))
    with pytest.raises(RuntimeError, match=r"layer '0' could not be solved 5 times in a row"):
        step(model, optimizer, batch(9))


def test_a_success_between_failures_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    for number in range(2 * MAX_FAILURES):
        with monkeypatch.context() as patch:
            if number != MAX_FAILURES - 1:
                break_solvers(patch)
            if number < 2 * MAX_FAILURES - 1:
                step(model, optimizer, batch(number))
    assert optimizer.stats()["failures"]["0"] == 2 * MAX_FAILURES - 2


def test_a_layer_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronfac.methods.kfac import block as method

    for name in ("eigen", "eigen_batch"):
        working = getattr(method, name)
        monkeypatch.setattr(
            method, name, lambda m, working=working: None if m.shape[-1] == 3 else working(m)
        )
    model = mlp()
    optimizer = frozen_kfac(model)
    step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == ["4"]


# --- dead layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("solver_name", SOLVERS)
def test_zero_inputs_give_finite_updates(solver_name: str, rescale: str | None) -> None:
    model = mlp(bias=False)
    optimizer = kfac(model, solver=solver_name, rescale=rescale)
    for _ in range(2):
        step(model, optimizer, (torch.zeros(8, 4), batch()[1]))
    assert all_finite(model)


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("solver_name", SOLVERS)
def test_zero_gradients_give_finite_updates(solver_name: str, rescale: str | None) -> None:
    model = mlp()
    optimizer = kfac(model, solver=solver_name, rescale=rescale)
    for number in range(2):
        optimizer.zero_grad()
        (0 * loss_of(model, batch(number))).backward()
        optimizer.step()
    assert all_finite(model)


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("solver_name", SOLVERS)
def test_dead_units_in_front_of_a_layer_give_finite_updates(
    solver_name: str, rescale: str | None
) -> None:
    model = cnn()
    with torch.no_grad():
        model[0].bias.fill_(-100)
    optimizer = kfac(model, solver=solver_name, rescale=rescale)
    for number in range(2):
        step(model, optimizer, images(number))
    assert all_finite(model)


@pytest.mark.parametrize("rescale", RESCALES)
def test_a_layer_with_zero_gradient_is_not_moved(rescale: str | None) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dead = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + 0 * self.dead(x)

    model = Beside()
    optimizer = kfac(model, rescale=rescale)
    before = parameters(model)
    step(model, optimizer, batch())
    assert_same(parameters(model)["dead.weight"], before["dead.weight"])


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("solver_name", SOLVERS)
def test_factors_of_low_rank_give_finite_updates(solver_name: str, samples: int) -> None:
    model = mlp()
    optimizer = kfac(model, solver=solver_name, damping=1e-8)
    step(model, optimizer, batch(samples=samples))
    assert all_finite(model)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("rescale", RESCALES)
def test_single_precision_survives_extreme_scales(rescale: str | None, scale: float) -> None:
    model = mlp(dtype=torch.float32)
    optimizer: kronfac.KFAC = kfac(model, rescale=rescale)
    x, y = batch()
    step(model, optimizer, (x.float() * scale, y))
    assert all_finite(model)
