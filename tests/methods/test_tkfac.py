"""TKFAC: its trace, K-FAC where rows have constant norms, and a slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.layers.rows import DenseRows
from kronfac.methods.tkfac import TKFACBlock
from kronfac.protocol.block import Given
from tests.distributed.equivalence import double_precision
from tests.methods.test_protocol import assert_equal
from tests.references.nets import assert_trains_alike, batches, layers_of, net, sample_losses, see
from tests.references.tkfac import SlowTKFAC, trace_sums
from tests.training import parameters

GAMMA, LR = 0.1, 0.1
PLAIN: dict[str, Any] = {"damping": GAMMA, "rescale": None, "factor_every": 1, "refresh_every": 2}
SOLVERS = ["eigen", "cholesky", "newton-schulz"]


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, lr: float = LR, **options: Any) -> Any:
    return kronfac.TKFAC(model, SGD(model.parameters(), lr=lr), **{**PLAIN, **options})


def take(optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    sample_losses(optimizer.model(x)).mean().backward()
    optimizer.step()


def make_block(shape: tuple[int, ...], **options: Any) -> TKFACBlock:
    given = {"solver": "eigen", "max_dim": 100, "output_factor": True, "per_sample": False}
    return TKFACBlock(shape, torch.float64, **{**given, **options})


def rows(*batch: int) -> tuple[DenseRows, DenseRows]:
    return DenseRows(torch.randn(*batch, 9, 2, 4)), DenseRows(torch.randn(*batch, 9, 2, 3))


def solve(block: TKFACBlock, means: dict[str, Tensor], **given: Any) -> dict[str, Tensor]:
    solution = block.refresh(Given(means, GAMMA, **given))
    assert solution is not None
    return solution


# --- the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("kind", ["linear", "conv", "sequence"])
def test_it_equals_the_slow_reference(kind: str, solver: str) -> None:
    optimizer = make(net(kind), solver=solver)
    other = net(kind)
    rules = [SlowTKFAC(solver, GAMMA) for _ in layers_of(other)]
    assert_trains_alike(optimizer, other, rules, batches(kind, 6), LR)


# --- the trace ---------------------------------------------------------------------------------


def test_the_trace_is_that_of_the_fisher() -> None:
    model, (x,) = net("linear"), batches("linear", 1)
    seen = [see(model, layer, x) for layer in layers_of(model)]
    optimizer = make(model)
    take(optimizer, x)
    for one, state in zip(seen, optimizer.layers, strict=True):
        solution = state.solution
        assert_equal(solution["A.values"].sum(), torch.ones(()))  # tr Φ
        assert_equal(solution["G.values"].sum(), one.F.trace())  # δ tr Ψ
        assert_equal(state.block.mean_curvature(solution).squeeze(), one.F.diagonal().mean())


def test_positions_are_taken_as_uncorrelated() -> None:
    """The trace of a convolution is the sum over its positions."""
    model, (x,) = net("conv"), batches("conv", 1)
    layer = layers_of(model)[0]
    delta, _, _ = trace_sums(see(model, layer, x))
    optimizer = make(model)
    take(optimizer, x)
    assert_equal(optimizer.layers[0].solution["G.values"].sum(), delta / len(x))


class Rescaled(nn.Module):
    """A layer whose inputs have one norm, and whose output gradients have one too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(nn.functional.normalize(x[:, :4], dim=-1))
        return (out * nn.functional.normalize(x[:, 4:], dim=-1)).sum(-1)


@pytest.mark.parametrize("solver", ["eigen", "newton-schulz"])
def test_rows_of_constant_norms_make_it_kfac(solver: str) -> None:
    """The factored damping is K-FAC's only where π is 1 after scaling: for a square layer."""
    found = []
    for method in (kronfac.TKFAC, kronfac.KFAC):
        torch.manual_seed(0)
        model = Rescaled()
        model.linear = nn.Linear(4, 4, bias=False) if solver != "eigen" else model.linear
        optimizer = method(model, SGD(model.parameters(), lr=LR), solver=solver, **PLAIN)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(9, 4 + model.linear.out_features)).mean().backward()
            optimizer.step()
        found.append(parameters(model))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


def test_rows_of_other_norms_do_not() -> None:
    found = []
    for method in (kronfac.TKFAC, kronfac.KFAC):
        model = net("linear")
        take(method(model, SGD(model.parameters(), lr=LR), **PLAIN), batches("linear", 1)[0])
        found.append(model[0].weight.detach())
    assert not torch.allclose(*found, rtol=1e-3)


# --- the block ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)], ids=["plain", "grouped"])
@pytest.mark.parametrize("max_dim", [10, 3, 1])
def test_statistics_are_weighted_rows(batch: tuple[int, ...], max_dim: int) -> None:
    block = make_block((*batch, 3, 4), max_dim=max_dim)
    inputs, outputs = rows(*batch)
    a, g = inputs.dense(), outputs.dense()
    expected = {
        "A": torch.einsum("...nsi,...nsj,...nso,...nso->...ij", a, a, g, g),
        "G": torch.einsum("...nsi,...nsi,...nso,...nsp->...op", a, a, g, g),
    }
    for side, found in block.observe_pair(inputs, outputs).items():
        dense = block.forms[side] == "dense"
        whole = expected[side]
        assert_equal(found, whole if dense else whole.diagonal(0, -2, -1))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("max_dim", [10, 3, 1])
@pytest.mark.parametrize("relative", [False, True])
def test_the_step_is_the_dense_formula(solver: str, max_dim: int, relative: bool) -> None:
    block = make_block((3, 4), solver=solver, max_dim=max_dim)
    means = block.observe_pair(*rows())
    delta, V = as_matrix(means["A"]).trace(), torch.randn(3, 4)
    assert_equal(as_matrix(means["G"]).trace(), delta)
    gamma = GAMMA * delta / 12 if relative else torch.tensor(GAMMA)
    Phi, Psi = as_matrix(means["A"]) / delta, as_matrix(means["G"]) / delta
    if solver == "eigen":
        F = delta * torch.kron(Psi, Phi) + gamma * torch.eye(12)
        expected = torch.linalg.solve(F, V.flatten()).reshape(3, 4)
    else:
        left, right = (
            delta.sqrt() * one + gamma.sqrt() * torch.eye(len(one)) for one in (Psi, Phi)
        )
        expected = torch.linalg.solve(left, V) @ torch.linalg.inv(right)
    found = block.precondition(solve(block, means, relative=relative), V, gamma[None, None])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def as_matrix(mean: Tensor) -> Tensor:
    return mean if mean.dim() == 2 else mean.diag()


def test_dividing_by_the_trace_afterwards_is_the_same_form() -> None:
    """`(1/δ) (Ψ + √(γ/δ))⁻¹ V (Φ + √(γ/δ))⁻¹`: one δ, not two."""
    block = make_block((3, 4), solver="cholesky")
    means, V = block.observe_pair(*rows()), torch.randn(3, 4)
    delta = means["A"].trace()
    shift = (GAMMA / delta).sqrt()
    left = torch.linalg.inv(means["G"] / delta + shift * torch.eye(3))
    right = torch.linalg.inv(means["A"] / delta + shift * torch.eye(4))
    assert_equal(block.precondition(solve(block, means), V, GAMMA), left @ V @ right / delta)


@pytest.mark.parametrize("of", [1, 3])
def test_shares_of_an_inverse_add_up(of: int) -> None:
    block = make_block((3, 4), solver="cholesky")
    given = Given(block.observe_pair(*rows()), GAMMA)
    whole = block.solve("A", given)
    parts = [block.solve_share("A", given, index, of) for index in range(of)]
    assert whole is not None
    assert_equal(sum(one["A.inverse"] for one in parts if one is not None), whole["A.inverse"])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("relative", [False, True])
def test_a_layer_without_curvature(solver: str, relative: bool) -> None:
    block = make_block((3, 4), solver=solver)
    solution = solve(block, {"A": torch.zeros(4, 4), "G": torch.zeros(3, 3)}, relative=relative)
    V = torch.randn(3, 4)
    found = block.precondition(solution, V, 1.0 if relative else GAMMA)
    assert_equal(found, V if relative else V / GAMMA)


def test_norms_and_embeddings_have_the_blocks_of_kfac() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    labels = [state.block.label for state in make(model).layers]
    assert labels == ["eigen, A diag", "unit-wise", "eigen, trace"]


def test_damping_may_adapt_itself() -> None:
    model, (x,) = net("conv"), batches("conv", 1)
    optimizer = make(model, lr=1.0, damping=kronfac.LevenbergMarquardt(1.0, every=1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sample_losses(model(x)).mean()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharing": "mean"}, "sharing='mean' is not supported"),
        ({"solver": "lu"}, "solver='lu' is not supported"),
        ({"max_dim": 0}, "max_dim=0 must be a whole number"),
        ({"fisher": "forward"}, "observes no output gradients, which TKFAC needs"),
        (
            {"solver": "cholesky", "damping": kronfac.LevenbergMarquardt(1.0)},
            "needs the undamped curvature of every layer",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(net("linear"), **options)
