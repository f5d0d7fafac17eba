"""Two products a step: against a slow fit, the exact form, and Cholesky's damping of each factor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import kronfac
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.separable import SeparableBlock, separable
from kronfac.protocol.block import Block, Given

COMMON = {"max_dim": 8192, "output_factor": True, "per_sample": False}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(width: int, seed: int, decades: float = 3.0) -> Tensor:
    """A second moment whose eigenvalues fall by some decades."""
    basis = torch.linalg.qr(random(width, width, seed=seed))[0]
    return basis * torch.logspace(0, -decades, width).double() @ basis.T


def solved(block: Block) -> dict[str, Tensor]:
    means = {"A": moments(block.shape[-1], 1), "G": moments(block.shape[-2], 2)}
    found = block.refresh(Given(means, 1.0))
    assert found is not None
    return found


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def test_the_fit_is_that_of_least_squares() -> None:
    out, into, damping = torch.rand(4).double(), torch.rand(6).double(), torch.tensor([[0.3]])
    target = -(out[:, None] * into + 0.3).log().flatten()
    rows, columns = torch.eye(4).double(), torch.eye(6).double()
    design = torch.cat([rows.repeat_interleave(6, 0), columns.repeat(4, 1)], 1)
    fit = torch.linalg.lstsq(design, target[:, None], driver="gelsd").solution[:, 0]
    left, right = separable(out, into, damping.double())
    expected = (design @ fit).exp().reshape(4, 6)
    torch.testing.assert_close(left[:, None] * right, expected)


def test_it_is_the_fit_in_the_eigenbasis() -> None:
    block = SeparableBlock((5, 7), torch.float64, **COMMON)
    solution, gradient = solved(block), random(5, 7)
    (values_in, basis_in), (values_out, basis_out) = map(
        torch.linalg.eigh, (moments(7, 1), moments(5, 2))
    )
    left, right = separable(values_out, values_in, torch.tensor([[0.1]], dtype=torch.float64))
    turned = basis_out.T @ gradient @ basis_in * left[:, None] * right
    expected = basis_out @ turned @ basis_in.T
    for damping in (0.1, torch.tensor([[0.1]], dtype=torch.float64)):
        for applied in (solution, block.prepare(solution, damping)):
            torch.testing.assert_close(block.precondition(applied, gradient, damping), expected)


def test_without_damping_it_is_exact() -> None:
    block, exact = (
        SeparableBlock((5, 7), torch.float64, **COMMON),
        KFACBlock((5, 7), torch.float64, solver="eigen", **COMMON),
    )
    gradient = random(5, 7)
    found = block.precondition(solved(block), gradient, 1e-13)
    expected = exact.precondition(solved(exact), gradient, 1e-13)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_it_is_nearer_to_the_exact_direction_than_damping_each_factor() -> None:
    shape = (40, 60)
    separated = SeparableBlock(shape, torch.float64, **COMMON)
    exact = KFACBlock(shape, torch.float64, solver="eigen", **COMMON)
    cholesky = KFACBlock(shape, torch.float64, solver="cholesky", **COMMON)
    # A gradient is large where curvature is.
    means = {"A": moments(60, 1), "G": moments(40, 2)}
    roots = [torch.linalg.cholesky(mean) for mean in means.values()]
    gradient = roots[1] @ random(40, 60) @ roots[0].T
    solution = solved(exact)
    damping = 0.1 * exact.mean_curvature(solution)
    expected = exact.precondition(solution, gradient, damping)
    near = cosine(separated.precondition(solution, gradient, damping), expected)
    factored = cholesky.refresh(Given(means, 0.1, relative="mean"))
    assert factored is not None
    far = cosine(cholesky.precondition(factored, gradient, 0.0), expected)
    assert near > 0.9
    assert near > far + 0.01


def test_a_step_takes_two_products() -> None:
    block = SeparableBlock((5, 7), torch.float64, **COMMON)
    solution = solved(block)
    prepared = block.prepare(solution, 0.1)
    with FlopCounterMode(display=False) as counter:
        block.precondition(prepared, random(5, 7), 0.1)
    exact = KFACBlock((5, 7), torch.float64, solver="eigen", **COMMON)
    assert counter.get_total_flops() == block.cost.precondition_flops
    assert 2 * block.cost.precondition_flops == exact.cost.precondition_flops
    stored = sum(value.numel() for value in (*solution.values(), *prepared.values()))
    assert 8 * stored == block.cost.solution_bytes


def trained(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[kronfac.KFAC, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 2)).to(dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, **options)
    for seed in range(2):
        train(model, optimizer, seed)
    return optimizer, model


def train(model: nn.Module, optimizer: kronfac.KFAC, seed: int) -> None:
    optimizer.zero_grad()
    model(random(8, 6, seed=seed)).square().mean().backward()
    optimizer.step()


def test_inverses_are_prepared_once_until_a_refresh_or_a_change_of_damping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, model = trained(factor_every=2, refresh_every=4, early_refresh=False)
    calls = []
    prepare = SeparableBlock.prepare
    monkeypatch.setattr(
        SeparableBlock, "prepare", lambda self, *a: calls.append(1) or prepare(self, *a)
    )
    for seed in (2, 3):
        train(model, optimizer, seed)
    assert not calls
    train(model, optimizer, 4)  # a refresh
    assert len(calls) == 4
    optimizer.damping = kronfac.Relative(0.5)
    train(model, optimizer, 5)
    assert len(calls) == 8


def test_what_is_prepared_is_neither_saved_nor_sent() -> None:
    optimizer, _ = trained()
    names = {name for entry in optimizer.state_dict()["state"].values() for name in entry}
    assert any("vectors" in name for name in names)
    assert not any("inverse" in name for name in names)


def test_auto_is_separable_where_orthogonal_steps_hide_the_form() -> None:
    def label(**options: Any) -> str:
        return trained(**options)[0].layers[0].block.label

    assert label() == label(rescale="orthogonal") == "separable"
    for options in ({"rescale": None}, {"damping": 1e-3}, {"power": 0.5}, {"solver": "eigen"}):
        assert label(**options) == "eigen"
    assert (
        label(damping=kronfac.Relative(lambda step: 0.1)) == "eigen"
    )  # it would change every step


def test_no_curvature_passes_the_gradient() -> None:
    block = SeparableBlock((5, 7), torch.float64, **COMMON)
    means = {"A": torch.zeros(7, 7).double(), "G": moments(5, 2)}
    found = block.refresh(Given(means, 0.1, relative="mean"))
    assert found is not None
    gradient = random(5, 7)
    torch.testing.assert_close(block.precondition(found, gradient, 1.0), gradient)


def test_layers_with_one_dense_side_keep_the_exact_form() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 20))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, solver="separable", max_dim=8)
    labels = [state.block.label for state in optimizer.layers]
    assert labels[0].startswith("eigen")
    assert labels[1] == "separable"
    assert labels[3].startswith("eigen")
