"""`optimizer.observe(...)`: statistics of the model's own distribution, and how not to call it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronfac
from tests.training import (
    assert_close,
    assert_same,
    batch,
    counts,
    factors,
    frozen_kfac,
    gradients,
    layers,
    mlp,
)

pytestmark = pytest.mark.usefixtures("double_precision")


def observed_step(
    model: nn.Module, optimizer: kronfac.KFAC, data: tuple[Tensor, Tensor], **how: Any
) -> None:
    optimizer.zero_grad()
    outputs = model(data[0])
    optimizer.observe(outputs, **how)
    F.cross_entropy(outputs.flatten(0, -2), data[1].flatten()).backward()
    optimizer.step()


def observed_factors(data: tuple[Tensor, Tensor], fisher: str, **how: Any) -> dict[str, Tensor]:
    model = mlp()
    optimizer = frozen_kfac(model, fisher=fisher)
    observed_step(model, optimizer, data, **how)
    return factors(optimizer, "G")


# --- what it observes ------------------------------------------------------------------------


def test_observing_touches_no_gradient() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="exact")
    optimizer.observe(model(batch()[0]))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_the_losss_own_backward_adds_nothing(fisher: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher=fisher)
    outputs = model(batch()[0])
    optimizer.observe(outputs)
    before = {n: s.pending.sums["G"].clone() for n, s in layers(optimizer).items()}
    (1000 * F.cross_entropy(outputs, batch()[1])).backward()
    assert_same({n: s.pending.sums["G"] for n, s in layers(optimizer).items()}, before)


def test_gradients_are_those_of_the_loss() -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, fisher="mc")
    outputs = model(batch()[0])
    optimizer.observe(outputs)
    F.cross_entropy(outputs, batch()[1]).backward()
    F.cross_entropy(twin(batch()[0]), batch()[1]).backward()
    assert_same(gradients(model), gradients(twin))


def test_labels_play_no_part() -> None:
    x, y = batch()
    assert_same(observed_factors((x, y), "exact"), observed_factors((x, (y + 1) % 3), "exact"))


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_many_samples_approach_the_exact_fisher(likelihood: str) -> None:
    exact = observed_factors(batch(), "exact", likelihood=likelihood)
    sampled = observed_factors(batch(), "mc", likelihood=likelihood, samples=300)
    for name, factor in exact.items():
        assert (sampled[name] - factor).norm() < 0.25 * factor.norm()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_accumulated_micro_batches_equal_one_batch(sharing: str) -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, fisher="exact", sharing=sharing)
    reference = frozen_kfac(twin, fisher="exact", sharing=sharing)
    x, y = batch()
    for inputs, labels in zip(x.split(4), y.split(4), strict=True):
        outputs = model(inputs)
        optimizer.observe(outputs)
        (F.cross_entropy(outputs, labels) / 2).backward()
    optimizer.step()
    observed_step(twin, reference, (x, y))
    assert_close(factors(optimizer, "G"), factors(reference, "G"))


def test_masked_terms_count_nothing() -> None:
    x, y = batch(shape=(2, 4))
    targets = torch.stack([y, y], dim=1)
    mask = torch.ones(8, 2)
    mask[:, 1] = 0
    masked = observed_factors((x, targets), "exact", mask=mask)
    alone = observed_factors((x[:, :1], targets[:, :1]), "exact")
    assert_close(masked, alone)


def test_ignored_targets_are_a_mask() -> None:
    x, y = batch(shape=(2, 4))
    targets = torch.stack([y, torch.full_like(y, -100)], dim=1)
    ignored = observed_factors((x, targets), "exact", mask=targets, ignore_index=-100)
    masked = observed_factors((x, targets), "exact", mask=targets != -100)
    assert_same(ignored, masked)


def test_nothing_is_observed_between_factor_steps() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc", factor_every=5, refresh_every=5)
    for number in range(3):
        observed_step(model, optimizer, batch(number))
    assert counts(optimizer, "G") == {"0": 8, "2": 8, "4": 8}


# --- random numbers --------------------------------------------------------------------------


def test_sampling_leaves_the_global_random_numbers_alone() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc")
    before = torch.get_rng_state()
    observed_step(model, optimizer, batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_decides_the_samples() -> None:
    assert_same(observed_factors(batch(), "mc"), observed_factors(batch(), "mc"))


def test_every_call_draws_anew() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc", decay=0.0)
    observed_step(model, optimizer, batch())
    first = factors(optimizer, "G")["4"].clone()
    observed_step(model, optimizer, batch())
    assert not torch.equal(factors(optimizer, "G")["4"], first)


def test_a_generator_of_the_user_is_used() -> None:
    first, second = (
        observed_factors(batch(), "mc", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    again = observed_factors(batch(), "mc", generator=torch.Generator().manual_seed(1))
    assert_same(first, again)
    assert not torch.equal(first["4"], second["4"])


# --- misuse ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_a_step_without_observing_says_what_to_call(fisher: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher=fisher)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match=rf"fisher='{fisher}'.*optimizer\.observe\(outputs"):
        optimizer.step()


@pytest.mark.parametrize("fisher", ["empirical", "forward"])
def test_observing_for_another_fisher_is_refused(fisher: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher=fisher)
    with pytest.raises(ValueError, match=f"fisher='{fisher}' needs no call"):
        optimizer.observe(model(batch()[0]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"likelihood": "poisson"}, "likelihood='poisson' is not supported; choose one of"),
        ({"samples": 0}, "samples=0 must be a whole number of at least 1"),
        ({"samples": 1.5}, "samples=1.5 must be a whole number"),
        ({"mask": torch.ones(8, 3)}, r"mask has shape \(8, 3\).*\(8,\)"),
        ({"ignore_index": -100}, "ignore_index needs the targets"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(how: dict[str, Any], message: str) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc")
    with pytest.raises(ValueError, match=message):
        optimizer.observe(model(batch()[0]), **how)


def test_a_loss_instead_of_outputs_is_refused() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc")
    with pytest.raises(ValueError, match=r"outputs have shape \(\); give \[N, \.\.\., C\]"):
        optimizer.observe(model(batch()[0]).sum())


def test_observing_before_a_forward_is_refused() -> None:
    optimizer = frozen_kfac(mlp(), fisher="mc")
    with pytest.raises(RuntimeError, match="found no forward pass"):
        optimizer.observe(torch.zeros(8, 3))


def test_observing_twice_is_refused() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc")
    outputs = model(batch()[0])
    optimizer.observe(outputs)
    with pytest.raises(RuntimeError, match="once after each forward"):
        optimizer.observe(outputs)
