"""Shampoo: its equation, its identities, and that its statistics never travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.protocol.block import Given
from tests.distributed.equivalence import double_precision
from tests.distributed.ranks import run
from tests.methods.gradient_only import EPSILON, PLAIN, WIDTHS, block_of, bytes_sent, check_equal
from tests.references.shampoo import Shampoo as Reference


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    with double_precision():
        yield


def solution_of(block: Any, V: Tensor, damping: float, relative: bool = False) -> Any:
    means = block.observe_gradient(V)
    return block.refresh(Given(means, damping, relative=relative))


# --- the equation ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
@pytest.mark.parametrize(
    ("options", "power", "decay"),
    [
        ({"decay": 0.9}, 0.25, 0.9),
        ({"power": 0.5, "decay": 0.5}, 0.5, 0.5),
        ({"accumulate": "sum"}, 0.25, None),
    ],
    ids=["average", "square roots", "sum"],
)
def test_it_equals_the_paper(
    kind: str, options: dict[str, Any], power: float, decay: float | None
) -> None:
    check_equal(
        kind,
        lambda model: kronfac.Shampoo(model, SGD(model.parameters(), lr=0.1), **PLAIN, **options),
        lambda model: Reference(model, 0.1, EPSILON, power, decay),
    )


def test_of_one_gradient_it_is_the_nearest_orthogonal_matrix() -> None:
    block, V = block_of("Shampoo", nn.Linear(6, 4, bias=False)), torch.randn(4, 6)
    left, _, right = torch.linalg.svd(V, full_matrices=False)
    found = block.precondition(solution_of(block, V, 1e-14), V, 0.0)
    torch.testing.assert_close(found, left @ right, rtol=1e-6, atol=1e-6)


def test_relative_damping_does_not_know_the_scale_of_gradients() -> None:
    block, V = block_of("Shampoo", nn.Linear(6, 4)), torch.randn(4, 7)
    steps = [
        block.precondition(solution_of(block, c * V, 0.1, relative=True), c * V, 0.0)
        for c in (1.0, 1e-6, 1e6)
    ]
    torch.testing.assert_close(steps[1], steps[0])
    torch.testing.assert_close(steps[2], steps[0])


def test_relative_damping_is_a_share_of_each_side() -> None:
    block, V = block_of("Shampoo", nn.Linear(6, 4)), torch.randn(4, 7)
    root = solution_of(block, V, 0.1, relative=True)["L.root"]
    left = V @ V.T
    damped = left + 0.1 * left.trace() / 4 * torch.eye(4)
    torch.testing.assert_close(torch.linalg.matrix_power(root, -4), damped)


# --- sides that are not dense ----------------------------------------------------------------


def test_a_wide_side_keeps_its_diagonal() -> None:
    block, V = block_of("Shampoo", nn.Linear(6, 4, bias=False), max_dim=4), torch.randn(4, 6)
    values, vectors = torch.linalg.eigh(V @ V.T)
    left = vectors @ ((values + EPSILON) ** -0.25).diag() @ vectors.T
    right = (V.square().sum(0) + EPSILON) ** -0.25
    found = block.precondition(solution_of(block, V, EPSILON), V, 0.0)
    torch.testing.assert_close(found, left @ V * right)
    assert "R diag" in block.label


def test_tokens_are_a_diagonal_and_new_ones_pass_their_gradient() -> None:
    block = block_of("Shampoo", nn.Embedding(5, 3))
    V, new = torch.randn(3, 5), torch.randn(3, 5)
    V[:, 2] = 0
    solution = solution_of(block, V, EPSILON)
    step = block.precondition(solution, new, 0.0)
    expected = solution["L.root"] @ new * (V.square().sum(0) + EPSILON) ** -0.25
    expected[:, 2] = new[:, 2]
    torch.testing.assert_close(step, expected)


def test_norms_are_left_to_the_base_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = kronfac.Shampoo(model, SGD(model.parameters(), lr=0.1))
    assert "no two sides" in optimizer.left_out()["1.weight"][1]


# --- what may go wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-15, 1e15])
def test_steps_of_extreme_gradients_are_finite(size: float, relative: bool) -> None:
    block = block_of("Shampoo", nn.Linear(6, 4).float())
    V = (size * torch.randn(4, 7)).float()
    step = block.precondition(solution_of(block, V, 1e-4, relative), V, 0.0)
    assert torch.isfinite(step).all()


def test_without_gradients_nothing_is_relative() -> None:
    block, V = block_of("Shampoo", nn.Linear(6, 4)), torch.randn(4, 7)
    solution = solution_of(block, torch.zeros(4, 7), 0.1, relative=True)
    torch.testing.assert_close(block.precondition(solution, V, 0.0), V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 0.0}, "power=0.0 must be a number in"),
        ({"power": "1/4"}, "power='1/4' must be a number in"),
        ({"accumulate": "mean"}, "accumulate='mean' is not supported"),
        ({"max_dim": 0}, "max_dim=0 must be a whole number"),
        ({"rescale": "quadratic"}, "units of squared gradients"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        kronfac.Shampoo(model, SGD(model.parameters(), lr=0.1), **options)


# --- what travels ----------------------------------------------------------------------------


def test_nothing_travels_if_every_rank_solves_for_itself() -> None:
    for found in run(2, bytes_sent, "Shampoo", "replicated"):
        assert found == {"reduce": 0, "share": 0, "spread": 0, "rescale": 0}


def test_only_triangles_of_roots_travel_if_work_is_shared() -> None:
    triangles = sum(d * (d + 1) // 2 for d in WIDTHS)
    refreshes = 2
    for found in run(2, bytes_sent, "Shampoo", "comm-opt"):
        assert found["reduce"] == found["spread"] == 0
        assert found["share"] == refreshes * triangles * 4
