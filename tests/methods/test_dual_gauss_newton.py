"""DualGaussNewton: dual and primal are one step, and every iterate of the dual descends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.methods.dual_gauss_newton import conjugate_gradients
from tests import oracles
from tests.distributed.equivalence import double_precision
from tests.references import dual_gauss_newton
from tests.references.per_sample import (
    assert_follows,
    batch,
    descend,
    flat,
    layers,
    net,
    sample_gradients,
)

GAMMA = 0.1


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, base: Any = None, **options: Any) -> Any:
    chosen = {"damping": GAMMA, "rescale": None, **options}
    return kronfac.DualGaussNewton(model, base or SGD(model.parameters(), lr=0.0), **chosen)


def gradient(layer: Any) -> Tensor:
    return flat(layer, lambda p: p.grad.clone())


def assert_equal(actual: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-11)


# --- the step --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv", "grouped"])
def test_steps_are_those_of_the_dual(kind: str) -> None:
    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        dual_gauss_newton.step(model, x, y, GAMMA)

    assert_follows(make, reference, kind, steps=3)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_enough_iterations_are_the_exact_step(kind: str) -> None:
    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        dual_gauss_newton.step(model, x, y, GAMMA)

    assert_follows(partial(make, iterations=60), reference, kind, steps=3)


def test_dual_and_primal_are_one() -> None:
    model, shape = net("linear")
    x, y = batch(shape, 0)
    outputs, H, g = dual_gauss_newton.at_outputs(model, x, y)
    for layer in layers(model):
        J = sample_gradients(layer, outputs.flatten())
        dual = dual_gauss_newton.dual(J, H, g, GAMMA, 6)
        assert_equal(dual, dual_gauss_newton.primal(J, H, g, GAMMA, 6))


def test_little_room_is_plain_descent() -> None:
    J, H, g = torch.randn(6, 9), torch.eye(6), torch.randn(6)
    assert_equal(1e9 * dual_gauss_newton.dual(J, H, g, 1e9, 3), J.T @ g / 3, rtol=1e-6)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_curvature_is_the_generalized_gauss_newton_matrix(likelihood: Any) -> None:
    model, shape = net("linear")
    optimizer = make(model)
    x, _ = batch(shape, 0)
    outputs = model(x)
    ggn = oracles.dense_ggn_block(model[0], outputs, likelihood)
    optimizer.observe(outputs, likelihood)
    outputs.square().mean().backward()
    optimizer.step()
    state, V = optimizer.layers[0], torch.randn(5, 5)
    product = state.block.multiply(state.solution, V)
    assert_equal(product.flatten(), ggn @ V.flatten())


# --- conjugate gradients ---------------------------------------------------------------------


def test_each_iteration_is_a_better_descent_direction() -> None:
    model, shape = net("linear")
    x, y = batch(shape, 0)
    outputs, H, g = dual_gauss_newton.at_outputs(model, x, y)
    J = sample_gradients(model[0], outputs.flatten())
    exact, V = dual_gauss_newton.primal(J, H, g, GAMMA, 6), J.T @ g / 6
    curvature = J.T @ H @ J / 6 + GAMMA * torch.eye(J.shape[1])
    errors = []
    for iterations in (1, 2, 3, 5, 8):
        twin, _ = net("linear")
        descend(make(twin, iterations=iterations), x, y)
        found = gradient(twin[0])
        assert found @ V > 0
        errors.append(float((found - exact) @ curvature @ (found - exact)))
    assert errors == sorted(errors, reverse=True)


def test_conjugate_gradients_stay_where_they_have_arrived() -> None:
    A = torch.randn(4, 4)
    matrix, right = A @ A.T, torch.randn(4)
    expected = torch.linalg.solve(matrix + 0.1 * torch.eye(4), right)
    assert_equal(conjugate_gradients(matrix, 0.1, right, 50), expected)
    assert not conjugate_gradients(matrix, 0.1, torch.zeros(4), 5).any()


# --- options ---------------------------------------------------------------------------------


def test_it_observes_the_exact_curvature_by_default() -> None:
    model, shape = net("linear")
    optimizer = make(model)
    assert optimizer.needs_observe
    x, y = batch(shape, 0)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="fisher='exact' has observed nothing"):
        optimizer.step()


@pytest.mark.parametrize("fisher", ["empirical", "forward"])
def test_gradients_of_the_loss_are_not_enough(fisher: str) -> None:
    with pytest.raises(
        ValueError, match=f"which fisher='{fisher}' does not observe; choose 'exact'"
    ):
        make(net("linear")[0], fisher=fisher)


def test_iterations_are_checked() -> None:
    with pytest.raises(ValueError, match="iterations=0 must be a whole number"):
        make(net("linear")[0], iterations=0)


def test_outputs_whose_rows_would_not_fit_are_refused_before_all_are_kept() -> None:
    """One backward pass an output: the third of four does not fit any more."""
    model = nn.Linear(3, 4, bias=False)
    optimizer = make(model, max_bytes=2 * 8 * 5 * (3 + 4), keep="rows")
    outputs = model(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"would keep 105 numbers of a batch, 840 bytes"):
        optimizer.observe(outputs)
