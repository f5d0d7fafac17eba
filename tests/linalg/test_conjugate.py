"""Conjugate gradients on systems whose solution is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronfac.linalg.conjugate import conjugate_gradients


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive(size: int, rank: int, shift: float = 0.1) -> Tensor:
    x = normal(size, rank)
    return x @ x.T + shift * torch.eye(size, dtype=torch.float64)


def solved(B: Tensor, right: Tensor, iterations: int) -> Tensor:
    return conjugate_gradients(lambda x: B @ x, right, right, iterations)


def test_no_iteration_is_the_start() -> None:
    right = normal(4, 1)
    assert torch.equal(solved(positive(4, 4), right, 0), right)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_iteration_more_than_the_rank_is_enough(rank: int) -> None:
    B, right = positive(12, rank), normal(12, 1)
    exact = torch.linalg.solve(B, right)
    torch.testing.assert_close(solved(B, right, rank + 1), exact, rtol=1e-9, atol=1e-11)
    if rank:
        assert (solved(B, right, rank - 1) - exact).norm() > 1e-3 * exact.norm()


def test_what_has_converged_stays() -> None:
    B, right = positive(6, 2), normal(6, 1)
    assert torch.equal(solved(B, right, 50), solved(B, right, 60))


def test_each_system_is_solved_on_its_own() -> None:
    """One that converges at once, one that takes longer, and one without a right-hand side."""
    B = torch.stack([torch.eye(6, dtype=torch.float64) * 2, positive(6, 6), positive(6, 6)])
    right = normal(3, 6, 1)
    right[2] = 0
    found = solved(B, right, 20)
    torch.testing.assert_close(found, torch.linalg.solve(B, right), rtol=1e-9, atol=1e-11)
    assert not found[2].any()


def test_a_system_that_overflows_keeps_its_start() -> None:
    B = torch.stack([torch.full((2, 2), float("inf")), torch.eye(2)])
    right = torch.ones(2, 2, 1)
    assert torch.equal(solved(B, right, 3), right)


def test_rounding_does_not_grow() -> None:
    """Matrices that differ by rounding give solutions that do, times the condition number."""
    values = torch.cat([torch.tensor([1e4, 1e3]), torch.linspace(100, 10, 28)]).double()
    turn = torch.linalg.qr(normal(30, 30)).Q
    B, right = turn @ torch.diag(values) @ turn.T, normal(30, 1)
    noise = torch.finfo(B.dtype).eps * normal(30, 30)
    other = B * (1 + noise + noise.T)
    for iterations in (5, 10, 15, 25):
        found = solved(B, right, iterations)
        error = (found - solved(other, right, iterations)).norm() / found.norm()
        assert error < 20 * 1e3 * torch.finfo(B.dtype).eps
