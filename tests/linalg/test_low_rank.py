"""A few rows for many: interpolation keeps the kernel, and sampling keeps sums on average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronfac.linalg.low_rank import interpolation, systematic_sample

DOUBLE = torch.float64


def rows(count: int = 7, width: int = 9, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(count, width, generator=generator, dtype=DOUBLE)
    if rank is None:
        return found
    return found[:, :rank] @ torch.randn(rank, width, generator=generator, dtype=DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_kernel_is_what_rows_explain_and_a_residual(rank: int) -> None:
    U = rows()
    chosen, weights, residual = interpolation(U @ U.T, rank)
    U_chosen = U[chosen]
    assert len(set(chosen.tolist())) == rank
    assert_equal(weights[chosen], torch.eye(rank, dtype=DOUBLE))
    assert_equal(weights @ (U_chosen @ U_chosen.T) @ weights.T + residual, U @ U.T)
    missed = U - weights @ U_chosen
    assert_equal(missed @ U_chosen.T, torch.zeros(7, rank, dtype=DOUBLE))
    assert_equal(missed @ missed.T, residual)


def test_the_first_row_is_the_longest() -> None:
    U = rows()
    chosen, _, _ = interpolation(U @ U.T, 2)
    assert int(chosen[0]) == int(U.norm(dim=1).argmax())


@pytest.mark.parametrize("rank", [3, 5])
def test_rows_that_span_all_leave_nothing(rank: int) -> None:
    """With more than are needed, those that add nothing are harmless."""
    U = rows(rank=3)
    chosen, weights, residual = interpolation(U @ U.T, rank)
    assert len(set(chosen.tolist())) == rank
    assert_equal(weights @ U[chosen], U)
    assert_equal(residual, torch.zeros(7, 7, dtype=DOUBLE))


def test_nothing_at_all_is_interpolated_from_nothing() -> None:
    chosen, weights, residual = interpolation(torch.zeros(4, 4), 2)
    assert len(set(chosen.tolist())) == 2
    assert bool(torch.isfinite(weights).all())
    assert not residual.any()


def test_groups_are_interpolated_side_by_side() -> None:
    several = torch.stack([rows(), rows().flip(0) * 2, rows(rank=2)])
    together = interpolation(several @ several.mT, 3)
    for number, U in enumerate(several):
        for found, expected in zip(together, interpolation(U @ U.T, 3), strict=True):
            assert_equal(found[number].to(DOUBLE), expected.to(DOUBLE))


SIZES = torch.tensor([0.2, 5.0, 1.0, 0.0, 1.3, 0.7, 9.0], dtype=DOUBLE)
STARTS = (torch.arange(1000, dtype=DOUBLE) + 0.5) / 1000


@pytest.mark.parametrize("count", [1, 3, 6])
def test_each_is_drawn_as_often_as_its_chance_says(count: int) -> None:
    drawn, sums = torch.zeros(7, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)
    told = torch.zeros(7, dtype=DOUBLE)
    for start in STARTS:
        chosen, chances = systematic_sample(SIZES, count, start)
        assert len(set(chosen.tolist())) == count
        drawn[chosen] += 1 / len(STARTS)
        told[chosen] = chances
        sums += (SIZES[chosen] / chances).sum() / len(STARTS)
    seen = told > 0
    torch.testing.assert_close(drawn[seen], told[seen], rtol=0, atol=2 / len(STARTS))
    torch.testing.assert_close(sums, SIZES.sum(), rtol=5e-3, atol=0)


def test_chances_are_in_proportion_up_to_one() -> None:
    told = torch.zeros(7, dtype=DOUBLE)
    for start in STARTS[::3]:
        chosen, chances = systematic_sample(SIZES, 3, start)
        told[chosen] = chances
    assert told[[1, 6]].tolist() == [
        1.0,
        1.0,
    ]  # 5 and 9 of 17.2 are sure, the others share one place
    others = [0, 2, 4, 5]
    assert_equal(told[others], SIZES[others] / SIZES[others].sum())


def test_zeros_can_be_drawn_if_there_is_nothing_else() -> None:
    chosen, chances = systematic_sample(torch.zeros(5), 3, torch.tensor(0.3, dtype=DOUBLE))
    assert len(set(chosen.tolist())) == 3
    torch.testing.assert_close(chances, torch.full((3,), 0.6))
