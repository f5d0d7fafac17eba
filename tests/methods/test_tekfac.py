"""TEKFAC: EKFAC where the bases agree, nearer to the Fisher than TKFAC, and a slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.methods.ekfac.block import EKFACBlock
from kronfac.methods.tekfac import TEKFACBlock
from kronfac.protocol.block import Given
from tests.distributed.equivalence import double_precision
from tests.methods.test_protocol import assert_equal
from tests.methods.test_tkfac import Rescaled
from tests.references.nets import assert_trains_alike, batches, layers_of, net, sample_losses, see
from tests.references.tekfac import SlowTEKFAC
from tests.training import parameters

GAMMA, LR = 0.1, 0.1
PLAIN: dict[str, Any] = {"damping": GAMMA, "rescale": None, "factor_every": 1, "refresh_every": 2}
both_moments = pytest.mark.parametrize("moments", ["sample", "gradient"])


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, lr: float = LR, **options: Any) -> Any:
    return kronfac.TEKFAC(model, SGD(model.parameters(), lr=lr), **{**PLAIN, **options})


def take(optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    sample_losses(optimizer.model(x)).mean().backward()
    optimizer.step()


@both_moments
@pytest.mark.parametrize("kind", ["linear", "conv", "sequence"])
def test_it_equals_the_slow_reference(kind: str, moments: str) -> None:
    optimizer = make(net(kind), moments=moments)
    other = net(kind)
    rules = [SlowTEKFAC(moments, GAMMA) for _ in layers_of(other)]
    assert_trains_alike(optimizer, other, rules, batches(kind, 6), LR)


# --- EKFAC -------------------------------------------------------------------------------------


@both_moments
def test_with_the_factors_of_kfac_it_is_ekfac(moments: str) -> None:
    """Φ := A, Ψ := G and δ := 1, which asks for tr A = tr G = 1."""
    options: dict[str, Any] = {"moments": moments, "decay": 0.9, "max_dim": 10, "per_sample": False}
    a, g, V = torch.randn(9, 4), torch.randn(9, 3), torch.randn(3, 4)
    means = {"A": a.T @ a / a.square().sum(), "G": g.T @ g / g.square().sum()}
    found = []
    for kind in (EKFACBlock, TEKFACBlock):
        block = kind((3, 4), torch.float64, **options)
        basis = block.refresh(Given(means, GAMMA))
        assert basis is not None
        seen = Given({"S": torch.rand(3, 4, generator=torch.Generator())}, GAMMA, previous=basis)
        solution = block.refresh(seen, ["S"])
        assert solution is not None
        found.append([block.precondition(one, V, GAMMA) for one in (basis, {**basis, **solution})])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@both_moments
def test_rows_of_constant_norms_make_it_ekfac(moments: str) -> None:
    found = []
    for method in (kronfac.TEKFAC, kronfac.EKFAC):
        torch.manual_seed(0)
        model = Rescaled()
        optimizer = method(model, SGD(model.parameters(), lr=LR), moments=moments, **PLAIN)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(9, 7)).mean().backward()
            optimizer.step()
        found.append(parameters(model))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


# --- the Fisher --------------------------------------------------------------------------------


def test_it_is_nearer_to_the_fisher_than_tkfac_and_has_its_trace() -> None:
    model, (x,) = net("linear"), batches("linear", 1)
    fishers = [see(model, layer, x).F for layer in layers_of(model)]
    optimizer = make(model, lr=0.0, refresh_every=9, decay=0.0)
    take(optimizer, x)
    take(optimizer, x)
    for fisher, state in zip(fishers, optimizer.layers, strict=True):
        solution = state.solution
        basis = torch.kron(solution["G.vectors"], solution["A.vectors"])
        values = torch.outer(solution["G.values"], solution["A.values"]).flatten()
        tkfac, tekfac = (basis * one @ basis.T for one in (values, solution["S"].flatten()))
        assert (fisher - tekfac).norm() < (fisher - tkfac).norm()
        for one in (tkfac, tekfac):
            assert_equal(one.trace(), fisher.trace())


def test_moments_of_gradients_have_the_trace_of_the_fisher() -> None:
    model, (x,) = net("linear"), batches("linear", 1)
    fishers = [see(model, layer, x).F for layer in layers_of(model)]
    optimizer = make(model, lr=0.0, moments="gradient")
    for _ in range(4):
        take(optimizer, x)
    for fisher, state in zip(fishers, optimizer.layers, strict=True):
        assert_equal(state.solution["S"].sum(), fisher.trace())


# --- cadences and options ----------------------------------------------------------------------


def changes(optimizer: Any, batch: Tensor) -> set[str]:
    """What of a layer's statistics and solution is another after a step."""
    (state, *_) = optimizer.layers

    def now() -> dict[str, Tensor]:
        running = {f"E[{name}]": one.mean() for name, one in state.running.items()}
        known = {**running, **(state.solution or {})}
        return {name: value.clone() for name, value in known.items() if value is not None}

    before = now()
    take(optimizer, batch)
    return {name for name, value in now().items() if not torch.equal(value, before.get(name, V0))}


V0 = torch.zeros(())


@both_moments
def test_factors_basis_and_moments_have_their_own_cadences(moments: str) -> None:
    optimizer = make(net("linear"), factor_every=2, refresh_every=4, moments=moments)
    data = batches("linear", 9)
    steps = [changes(optimizer, x) for x in data]
    for number, changed in list(enumerate(steps))[1:]:
        assert ("E[A]" in changed) == (number % 2 == 0)
        assert ("A.vectors" in changed) == (number % 4 == 0)
        assert ("S" in changed) == (number % 2 == 0 or moments == "gradient")


def test_embeddings_and_ungrouped_rows_are_those_of_ekfac() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    kinds = [type(state.block).__name__ for state in make(model).layers]
    assert kinds == ["EKFACBlock", "UnitWiseBlock", "TEKFACBlock"]


def test_options_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="observes no output gradients, which TEKFAC needs"):
        make(net("linear"), fisher="forward")
    with pytest.raises(ValueError, match="moments='both' is not supported"):
        make(net("linear"), moments="both")
