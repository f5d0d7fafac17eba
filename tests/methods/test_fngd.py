"""FNGD: weights that make a sum of per-sample gradients the natural gradient, and their mean."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import double_precision
from tests.references import empirical_ngd, fngd
from tests.references.per_sample import assert_follows, batch, descend, flat, layers, net

GAMMA = 0.1


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, base: Any = None, **options: Any) -> Any:
    chosen = {"damping": GAMMA, "rescale": None, "factor_every": 1, "refresh_every": 1, **options}
    return kronfac.FNGD(model, base or SGD(model.parameters(), lr=0.0), **chosen)


def gradient(layer: Any) -> Tensor:
    return flat(layer, lambda p: p.grad.clone())


def assert_equal(actual: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-11)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv"])
def test_steps_are_those_of_the_reference(kind: str, every: int) -> None:
    slow = fngd.FNGD(GAMMA, every)
    options = {"factor_every": every, "refresh_every": every}
    assert_follows(partial(make, **options), slow.step, kind, steps=5)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_refreshes_are_steps_of_the_natural_gradient(kind: str) -> None:
    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        empirical_ngd.step(model, x, y, GAMMA)

    assert_follows(make, reference, kind)


def test_weighted_sum_is_the_natural_gradient() -> None:
    U = torch.randn(5, 8)
    assert_equal(U.T @ fngd.weights(U, GAMMA), empirical_ngd.direction(U, GAMMA))


def test_much_damping_is_plain_descent() -> None:
    model, shape = net("linear")
    x, y = batch(shape, 0)
    descend(SGDLike(model), x, y)
    expected = [gradient(layer) for layer in layers(model)]
    model, _ = net("linear")
    descend(make(model, damping=1e8), x, y)
    for layer, V in zip(layers(model), expected, strict=True):
        assert_equal(1e8 * gradient(layer), V, rtol=1e-6)


class SGDLike(SGD):
    """A plain optimizer for the same loop."""

    needs_observe = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model


def test_samples_without_a_gradient_weigh_the_gradient_by_the_damping() -> None:
    """``c = 1/(Nγ)`` where K is zero; relative damping leaves the gradient as it is."""
    for damping, factor in ((GAMMA, 1 / GAMMA), (kronfac.Relative(0.1), 1.0)):
        model = nn.Sequential(nn.Linear(3, 2, bias=False))
        optimizer = make(model, damping=damping)
        model(torch.zeros(4, 3)).sum().backward()
        model[0].weight.grad.fill_(2.0)
        optimizer.step()
        assert_equal(model[0].weight.grad, torch.full((2, 3), 2 * factor))


def test_what_it_keeps_does_not_grow_with_the_batch() -> None:
    model, shape = net("linear")
    optimizer = make(model)
    descend(optimizer, *batch(shape, 0))
    state = optimizer.layers[0]
    numbers = {name: value.numel() for name, value in state.solution.items()}
    assert numbers == {"scale": 1, "correction": 25, "mean": 1, "at": 1, "fresh": 1}


@pytest.mark.parametrize("fisher", ["mc", "exact", "forward"])
def test_other_gradients_than_the_loss_s_are_refused(fisher: str) -> None:
    with pytest.raises(ValueError, match=f"FNGD .* fisher='{fisher}' does not observe"):
        make(net("linear")[0], fisher=fisher)
