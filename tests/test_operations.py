"""What a GPU is asked to do: kernels, products and waits are counted, and times are not.

Ordinary and factor steps run on the meta device at the real shapes; refreshes, which read the device, on
small models.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import kronfac
from tests.operations import Operations
from tests.shapes import MODELS, SMALL, loss_of, on_meta
from tests.training import batch, step


class Run:
    """One of the models with K-FAC at its defaults, as if it had been refreshed."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model, self.data = on_meta(name)
        base = SGD(self.model.parameters(), lr=0.1)
        options = {"momentum": 0.9, "nesterov": True, "factor_every": 2, **options}
        self.optimizer = kronfac.KFAC(
            self.model, base, refresh_every=10**9, early_refresh=False, **options
        )
        loss_of(self.model, self.data).backward()
        pretend_solved(self.optimizer)
        self.optimizer.step()

    def ordinary(self) -> Operations:
        """A step of the optimizer alone, at which no statistics are taken."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.data).backward()
        with Operations() as counted:
            self.optimizer.step()
        return counted

    def factor(self) -> tuple[Operations, Operations]:
        """Forward and backward of a step that takes statistics, and the step itself."""
        self.optimizer.zero_grad()
        with Operations() as observed:
            loss_of(self.model, self.data).backward()
        with Operations() as counted:
            self.optimizer.step()
        return observed, counted


def pretend_solved(optimizer: kronfac.KFAC) -> None:
    """Give layers solutions without a refresh, which has to read numbers that are not there."""
    for state in optimizer._preconditioner.layers.values():
        state.allocate()
        state.solved_at = state.last_refresh = 0
        for running in state.running.values():
            running.forget()


class Counts:
    """Everything that is counted of one model: nothing changes from run to run."""

    def __init__(self, name: str) -> None:
        model, data = on_meta(name)
        with Operations() as self.passes:
            loss_of(model, data).backward()
        with Operations() as self.sgd:
            SGD(model.parameters(), lr=0.1).step()
        run = Run(name)
        self.layers = list(run.optimizer._preconditioner.layers.values())
        self.ordinary = run.ordinary()
        self.observed, self.factor = run.factor()


counts = functools.cache(Counts)
NAMES = [pytest.param(n, marks=[pytest.mark.slow] * (n == "ViT-B")) for n in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_an_ordinary_step_has_at_most_four_times_the_kernels_of_sgd(name: str) -> None:
    found = counts(name)
    assert found.ordinary.kernels.total() <= 4 * found.sgd.kernels.total()
    assert not found.ordinary.waits


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_has_at_most_twenty_products(name: str) -> None:
    found = counts(name)
    shapes = {state.layer.weight.shape for state in found.layers if not state.layer.unit_wise}
    assert found.ordinary.products.total() <= 20 * len(shapes)


#: Kernels that statistics add to a step, over those of forward and backward. What is left are mostly
#: output gradients: one kernel for each convolution and batch norm, three for each layer norm.
ADDED = {"ResNet-50": 0.6, "ViT-B": 0.59, "Llama": 0.26}


@pytest.mark.parametrize("name", NAMES)
def test_statistics_add_a_bounded_share_of_kernels(name: str) -> None:
    found = counts(name)
    observing = found.observed.kernels.total() - found.passes.kernels.total()
    folding = found.factor.kernels.total() - found.ordinary.kernels.total()
    assert observing + folding <= ADDED[name] * found.passes.kernels.total()


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_step_waits_for_nothing(name: str) -> None:
    found = counts(name)
    assert not found.observed.waits
    assert not found.factor.waits


def test_large_batches_are_divided() -> None:
    """Memory is bounded: 40 matrices of 16 MB are worked on in batches of 16."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(40)))
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), early_refresh=False)
    pretend_solved(optimizer)
    for _ in range(2):  # the first one prepares the inverses
        model(torch.zeros(2, 2048, device="meta")).sum().backward()
        with Operations() as counted:
            optimizer.step()
    assert max(shape[0] for shape in counted.products) == 2**26 // 2048**2 == 16
    assert counted.products.total() <= 20 * 3


OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"max_grad_norm": 1.0},
    "KL clip": {"rescale": "kl-clip"},
    "graft": {"rescale": "graft"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_lengths_take_a_few_more_kernels(name: str) -> None:
    counted = Run(SMALL, **OPTIONS[name]).ordinary()
    assert counted.kernels.total() <= Run(SMALL).ordinary().kernels.total() + 20
    assert not counted.waits


def test_views_and_allocations_are_no_kernels() -> None:
    x = torch.ones(2, 3)
    with Operations() as counted:
        x.t().reshape(3, 2)[0].add_(torch.empty(2))
        x @ x.t()
        x.sum().item()
    assert counted.kernels == {"add_": 1, "sum": 1}
    assert counted.products == {(2, 2): 1}
    assert counted.waits == {"_local_scalar_dense": 1}


def deep(depth: int) -> nn.Module:
    """Linear layers of two shapes, and norms."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def refresh(depth: int, **options: Any) -> Operations:
    """A step that takes statistics and solves all layers again."""
    model = deep(depth)
    base = SGD(model.parameters(), lr=0.1)
    options = {"momentum": 0.9, "nesterov": True, **options}
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=1, **options)
    step(model, optimizer, batch())
    optimizer.zero_grad()
    loss_of(model, batch(1)).backward()
    with Operations() as counted:
        optimizer.step()
    return counted


@pytest.mark.parametrize("solver", ["eigen", "separable", "cholesky"])
@pytest.mark.parametrize("depth", [2, 9])
def test_a_refresh_waits_twice_whatever_the_number_of_layers(depth: int, solver: str) -> None:
    counted = refresh(depth, solver=solver)
    assert counted.waits == {"tolist": 2}
    assert counted.kernels["_linalg_eigh"] == (0 if solver == "cholesky" else 3)  # A, and two G
    assert counted.kernels["linalg_cholesky_ex"] == (4 if solver == "cholesky" else 0)


def test_clipping_and_a_rate_of_zero_wait_for_nothing() -> None:
    model = deep(2)
    options: dict[str, Any] = {"max_grad_norm": 0.1, "refresh_every": 8, "factor_every": 2}
    base = SGD(model.parameters(), lr=0.0)
    optimizer = kronfac.KFAC(model, base, early_refresh=False, **options)
    for number in range(3):
        optimizer.zero_grad()
        with Operations() as counted:
            loss_of(model, batch(number)).backward()
            optimizer.step()
        assert bool(counted.waits) == (number == 0)
