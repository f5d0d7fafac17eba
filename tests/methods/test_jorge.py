"""Jorge: its series, where it departs from the paper and why, and that nothing travels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac
from kronfac.protocol.block import Given
from tests.distributed.equivalence import double_precision
from tests.distributed.ranks import run
from tests.methods.gradient_only import EPSILON, PLAIN, WIDTHS, block_of, bytes_sent, check_equal
from tests.references.jorge import Jorge as Reference
from tests.references.jorge import update

each_series = pytest.mark.parametrize("series", ["symmetric", "paper"])


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    with double_precision():
        yield


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values**exponent).diag() @ vectors.T


def follow(block: Any, gradients: list[Tensor], damping: float, relative: bool = False) -> Any:
    """The roots after some gradients."""
    solution = None
    for V in gradients:
        given = Given({"V": V}, damping, previous=solution, relative=relative)
        solution = block.refresh(given)
    return solution


def stream(steps: int, d_out: int = 32, d_in: int = 10, condition: float = 100.0) -> list[Tensor]:
    """Gradients whose rows have variances that differ, in a basis of their own."""
    basis = torch.linalg.qr(torch.randn(d_out, d_out))[0]
    scales = condition ** -torch.linspace(0, 0.5, d_out)
    return [basis @ (scales[:, None] * torch.randn(d_out, d_in)) for _ in range(steps)]


# --- the series ------------------------------------------------------------------------------


@each_series
def test_the_error_is_of_third_order_where_everything_commutes(series: str) -> None:
    """The target is ``(β₂L + (1-β₂)M)^(-1/4)``; half the ``c`` leaves an eighth of the error."""
    basis = torch.linalg.qr(torch.randn(6, 6))[0]
    L = basis @ torch.rand(6).add(0.5).diag() @ basis.T
    M = basis @ torch.rand(6).add(0.5).diag() @ basis.T
    errors = []
    for c in (0.02, 0.01, 0.005):
        beta = 1 / (1 + c)
        block = block_of("Jorge", nn.Linear(6, 6, bias=False), series=series, beta2=beta)
        exact = power(beta * L + (1 - beta) * M, -0.25)
        errors.append((block.update("L", power(L, -0.25), M) - exact).norm())
    assert errors[0] < 1e-5
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(8, rel=0.1)


@each_series
def test_the_first_step_is_shampoos_to_third_order(series: str) -> None:
    """From ``L = εI``, with ``V Vᵀ + εI`` in the average, L is ``εI + (1-β₂)V Vᵀ``."""
    V, errors = torch.randn(4, 6) / 4, []
    for c in (0.02, 0.01):
        beta = 1 / (1 + c)
        options = {"series": series, "beta2": beta}
        block = block_of("Jorge", nn.Linear(6, 4, bias=False), **options)
        step = block.precondition(follow(block, [V], damping=1.0), V, 0.0)
        left = power(torch.eye(4) + (1 - beta) * V @ V.T, -0.25)
        right = power(torch.eye(6) + (1 - beta) * V.T @ V, -0.25)
        errors.append((step - left @ V @ right).norm())
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.1)


@each_series
def test_the_weight_of_the_old_root_follows_the_gradient(series: str) -> None:
    """By itself β₂ is ``‖X‖/(1+‖X‖)``, for which ``cX`` has norm 1."""
    root, V = power(torch.eye(4) + torch.ones(4, 4), -0.25), torch.randn(4, 6)
    block = block_of("Jorge", nn.Linear(6, 4, bias=False), series=series, beta2=0.0)
    found = block.update("L", root, V @ V.T)
    torch.testing.assert_close(found, update(root, V @ V.T, series))


@each_series
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_it_equals_the_reference(kind: str, series: str) -> None:
    make = functools.partial(kronfac.Jorge, series=series, **PLAIN)
    check_equal(
        kind,
        lambda model: make(model, SGD(model.parameters(), lr=0.01)),
        lambda model: Reference(model, 0.01, EPSILON, series, 0.5),
    )


def test_the_roots_of_a_diagonal_are_exact() -> None:
    block = block_of("Jorge", nn.Linear(6, 4, bias=False), max_dim=5, beta2=0.9)
    V = torch.randn(4, 6)
    moment = V.square().sum(0) + 1.0
    c = min(1 / float(moment.norm()), 1 / 9)
    exact = ((1.0 + c * moment) / (1 + c)) ** -0.25
    torch.testing.assert_close(follow(block, [V], damping=1.0)["R.root"], exact)


def test_tokens_are_a_diagonal() -> None:
    assert block_of("Jorge", nn.Embedding(5, 3)).solution_shapes["R.root"] == (5,)


# --- where it departs from the paper ---------------------------------------------------------


def test_symmetric_roots_stay_positive_where_half_the_sum_with_the_transpose_does_not() -> None:
    gradients, halved = stream(400), None
    block = block_of("Jorge", nn.Linear(10, 32, bias=False))
    found = follow(block, gradients, 1e-4, relative=True)["L.root"]
    for V in gradients:
        moment = V @ V.T
        epsilon = 1e-4 * moment.trace() / len(moment)
        halved = epsilon**-0.25 * torch.eye(len(moment)) if halved is None else halved
        halved = update(halved, moment + epsilon * torch.eye(len(moment)), "paper", 0.5)
        halved = (halved + halved.T) / 2
    torch.testing.assert_close(found, found.T, rtol=0, atol=0)
    assert torch.linalg.eigvalsh(found)[0] > 0
    assert halved is not None
    assert torch.linalg.eigvalsh(halved)[0] < 0


def test_the_symmetric_series_is_nearer_to_the_root() -> None:
    errors = {}
    for series in ("symmetric", "paper"):
        torch.manual_seed(1)
        block = block_of("Jorge", nn.Linear(10, 32, bias=False), series=series, beta2=0.98)
        root, average = torch.eye(32), torch.eye(32)
        for V in stream(200):
            moment = V @ V.T + 0.1 * torch.eye(32)
            X = torch.linalg.matrix_power(root, 4) @ moment
            beta = max(0.98, float(X.norm() / (1 + X.norm())))
            average = beta * average + (1 - beta) * moment
            root = block.update("L", root, moment)
        exact = power(average, -0.25)
        errors[series] = (root - exact).norm() / exact.norm()
    assert errors["symmetric"] < 0.5 * errors["paper"]


def test_directions_without_gradients_do_not_grow_without_bound() -> None:
    """The paper's rule, without ε in the average, multiplies them by ``β₂^(-1/4)`` at each update."""
    block = block_of("Jorge", nn.Linear(6, 4, bias=False).float())
    gradients = [torch.randn(4, 6) for _ in range(50)]
    for V in gradients:
        V[:, 2] = 0  # an input that is always zero
    solution, printed = None, EPSILON**-0.25 * torch.eye(6)
    for V in gradients * 8:
        given = Given({"V": V.float()}, EPSILON, previous=solution)
        solution = block.refresh(given)
        printed = update(printed, V.T @ V)
    assert solution["R.root"].norm() < 3 * EPSILON**-0.25
    assert printed[2, 2] > 1e3 * EPSILON**-0.25


def test_a_gradient_that_falls_suddenly_lengthens_roots_by_a_bounded_factor() -> None:
    block = block_of("Jorge", nn.Linear(6, 4, bias=False))
    gradients = [torch.randn(4, 6) for _ in range(20)]
    before = follow(block, gradients, 1e-2, relative=True)
    after = follow(block, [*gradients, 1e-8 * gradients[-1]], 1e-2, relative=True)
    torch.testing.assert_close(after["L.root"], 2**0.25 * before["L.root"])


def test_a_gradient_of_zero_changes_nothing() -> None:
    block, V = block_of("Jorge", nn.Linear(6, 4, bias=False)), torch.randn(4, 6)
    before, after = (
        follow(block, [V, *more], EPSILON) for more in ([], [torch.zeros(4, 6), torch.zeros(4, 6)])
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("relative", [False, True])
def test_a_first_gradient_of_zero_leaves_the_next_one_as_it_is(relative: bool) -> None:
    block, V = block_of("Jorge", nn.Linear(6, 4, bias=False)), torch.randn(4, 6)
    solution = follow(block, [torch.zeros(4, 6)], EPSILON, relative)
    torch.testing.assert_close(block.precondition(solution, V, 0.0), V)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-15, 1e15, 1e25])
def test_roots_of_extreme_gradients_are_finite(size: float, relative: bool) -> None:
    block = block_of("Jorge", nn.Linear(6, 4, bias=False).float())
    sizes = [size, 1.0, size, size, 1.0]
    gradients = [(one * torch.randn(4, 6)).float() for one in sizes]
    solution = follow(block, gradients, 1e-4, relative)
    assert all(torch.isfinite(root).all() for root in solution.values())
    assert torch.isfinite(block.precondition(solution, gradients[-1], 0.0)).all()


# --- products only ---------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Names of all operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


DECOMPOSITIONS = ("linalg_", "eig", "svd", "qr_", "cholesky", "lu_", "inverse", "solve", "lstsq")


def test_nothing_is_decomposed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kronfac.Jorge(model, SGD(model.parameters(), lr=0.01), factor_every=1)
    with Operations() as operations:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 4)).square().sum().backward()
            optimizer.step()
    found = {name for name in operations.names if any(one in name for one in DECOMPOSITIONS)}
    assert found <= {"linalg_vector_norm"}
    assert "mm" in operations.names


@pytest.mark.parametrize(("series", "products"), [("symmetric", 6), ("paper", 5)])
def test_a_side_takes_few_products(series: str, products: int) -> None:
    block = block_of("Jorge", nn.Linear(6, 4, bias=False), series=series)
    with Operations() as operations:
        block.update("L", torch.eye(4), torch.eye(4))
    assert operations.names.count("mm") == products
    assert block.cubes == 2 * products


# --- options and ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"series": "taylor"}, "series='taylor' is not supported"),
        ({"beta2": 1.0}, "beta2=1.0 must be a number in"),
        ({"max_dim": 2.5}, "max_dim=2.5 must be a whole number"),
        ({"rescale": "quadratic"}, "units of squared gradients"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        kronfac.Jorge(model, SGD(model.parameters(), lr=0.1), **options)


def test_nothing_travels_if_every_rank_solves_for_itself() -> None:
    for found in run(2, bytes_sent, "Jorge", "replicated"):
        assert found == {"reduce": 0, "share": 0, "spread": 0, "rescale": 0}


def test_only_triangles_of_roots_travel_if_work_is_shared() -> None:
    triangles, updates = sum(d * (d + 1) // 2 for d in WIDTHS), 4
    for found in run(2, bytes_sent, "Jorge", "comm-opt"):
        assert found["reduce"] == found["spread"] == 0
        assert found["share"] == updates * triangles * 4
