"""mL-BFGS: classical L-BFGS without its averages, the secant equation, and what is never sent."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.methods.mlbfgs import damped_share
from tests.distributed.equivalence import double_precision
from tests.distributed.ranks import run
from tests.references import mlbfgs
from tests.references.per_sample import RATE, assert_follows, batch, descend, net

#: As little damping as there can be.
NONE = 1e-300
CLASSICAL: dict[str, Any] = {"beta": 0.0, "bounds": (0.0, math.inf), "damping": NONE}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, base: Any = None, **options: Any) -> Any:
    chosen = {"damping": 0.01, "rescale": None, "factor_every": 1, "refresh_every": 1, **options}
    return kronfac.MLBFGS(model, base or SGD(model.parameters(), lr=RATE), **chosen)


def assert_equal(actual: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-11)


# --- the steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped", "sequence"])
@pytest.mark.parametrize(("beta", "every", "history"), [(0.9, 1, 4), (0.9, 3, 2), (0.5, 2, 1)])
def test_steps_are_those_of_the_reference(kind: str, beta: float, every: int, history: int) -> None:
    bounds = (0.01, 1.5)
    slow = mlbfgs.MLBFGS(history, beta, every, 0.99, bounds)
    options = {"factor_every": every, "refresh_every": every, "beta": beta, "history": history}
    assert_follows(partial(make, bounds=bounds, **options), slow.step, kind, steps=8)


class Quadratic(nn.Module):
    """``½ wᵀAw - bᵀw`` of one layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)
        root = torch.randn(6, 6)
        self.A, self.b = root @ root.T / 6 + torch.eye(6), torch.randn(6)

    def forward(self) -> Tensor:
        w = self.linear.weight.flatten()
        return w @ self.A @ w / 2 - self.b @ w


def classical(model: Quadratic, steps: int, history: int) -> None:
    """L-BFGS as textbooks have it, without a line search."""
    w, pairs = model.linear.weight.detach().flatten().clone(), []
    last: tuple[Tensor, Tensor] | None = None
    for _ in range(steps):
        g = model.A @ w - model.b
        if last is not None and (w - last[0]) @ (g - last[1]) > 0:
            pairs = [*pairs, (w - last[0], g - last[1])][-history:]
        last = w, g
        w = w - RATE * mlbfgs.two_loops(pairs, g)
    model.linear.weight.data = w.view(2, 3)


@pytest.mark.filterwarnings("ignore:nothing was captured")
@pytest.mark.parametrize("history", [2, 10])
def test_without_averages_it_is_classical(history: int) -> None:
    torch.manual_seed(0)
    fast = Quadratic()
    torch.manual_seed(0)
    slow = Quadratic()
    optimizer = make(fast, history=history, on_missing="ignore", **CLASSICAL)
    for _ in range(9):
        optimizer.zero_grad()
        fast().backward()
        optimizer.step()
    classical(slow, 9, history)
    assert_equal(fast.linear.weight, slow.linear.weight)


def trained(steps: int = 6, **options: Any) -> Any:
    model, shape = net("linear")
    optimizer = make(model, **options)
    for number in range(steps):
        descend(optimizer, *batch(shape, number))
    return optimizer


def test_the_newest_pair_keeps_the_secant_equation() -> None:
    for state in trained().layers:
        solution = state.solution
        assert int((solution["inverse"] > 0).sum()) == 5
        product = state.block.precondition(solution, solution["Y"][-1], 0.0)
        assert_equal(product, solution["S"][-1])


def test_equal_pairs_are_the_identity() -> None:
    """All of ``ŷ`` is s where the bounds leave no room."""
    for state in trained(bounds=(1.0, 1.0)).layers:
        V = torch.randn(state.block.shape)
        assert_equal(state.solution["S"], state.solution["Y"])
        assert_equal(state.block.precondition(state.solution, V, 0.0), V)


def test_the_inverse_is_positive_and_symmetric() -> None:
    state = trained().layers[0]
    identity = torch.eye(25).view(25, 5, 5)
    H = torch.stack([state.block.precondition(state.solution, e, 0.0).flatten() for e in identity])
    assert_equal(H, H.T)
    assert float(torch.linalg.eigvalsh(H).min()) > 0


def test_without_a_pair_the_gradient_stays() -> None:
    model, shape = net("linear")
    optimizer = make(model, refresh_every=9, factor_every=9)
    x, y = batch(shape, 0)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        before = model[0].weight.grad.clone()
        optimizer.step()
        assert torch.equal(model[0].weight.grad, before)


def test_pairs_that_say_nothing_are_left_out() -> None:
    """A weight that does not move has no curvature."""
    model, shape = net("linear")
    optimizer = make(model, SGD(model.parameters(), lr=0.0))
    for number in range(3):
        descend(optimizer, *batch(shape, number))
    for state in optimizer.layers:
        assert not state.solution["inverse"].any()
        assert not state.solution["S"].any()


@pytest.mark.parametrize(
    ("curvature", "share"), [(0.5, 0.9), (-1.0, 0.5), (-9.0, 0.1), (3.0, 0.5), (1.2, 0.9)]
)
def test_the_share_keeps_the_curvature_in_bounds(curvature: float, share: float) -> None:
    found = damped_share(torch.tensor(curvature), 0.9, 0.0, 2.0)
    assert float(found) == pytest.approx(share)
    assert 0.0 <= 1 + float(found) * (curvature - 1) <= 2.0


# --- kinds of layers, ranks, options ---------------------------------------------------------


def test_every_kind_of_layer_is_preconditioned() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert make(model).left_out() == {}


def bytes_on_rank(rank: int, scheme: str) -> dict[str, int]:
    with double_precision():
        model, shape = net("linear")
        wrapped = DistributedDataParallel(model)
        optimizer = make(wrapped, SGD(model.parameters(), lr=RATE), distribute=scheme)
        for number in range(4):
            x, y = batch(shape, number)
            descend(optimizer, x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3])
        found: dict[str, int] = optimizer.stats()["bytes"]
        return found


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_no_statistic_is_sent(scheme: str) -> None:
    for found in run(2, bytes_on_rank, scheme):
        assert found["reduce"] == 0
        # one number of each of two layers at four refreshes, where others work on it too
        assert found["share"] == (8 * 2 * 4 if scheme == "comm-opt" else 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": 0}, "history=0 must be a whole number"),
        ({"beta": 1.0}, r"beta=1.0 must be a number in \[0, 1\)"),
        ({"bounds": (0.5, 0.9)}, "must be two numbers around 1"),
        ({"bounds": 3}, "must be two numbers around 1"),
        ({"damping": kronfac.Relative(0.1)}, "a share of the mean curvature"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(net("linear")[0], **options)
