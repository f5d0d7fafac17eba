"""The K-FAC block against dense Kronecker formulas, for every solver, form of a side and group."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac.layers.rows import DenseRows
from kronfac.linalg.solve import newton_schulz_inverse
from kronfac.methods.kfac.block import EIGEN_MAX_WIDTH, KFACBlock, choose_solver
from kronfac.protocol.block import Given
from tests import oracles

GAMMA = 0.1
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
SOLVERS = ["eigen", "cholesky", "newton-schulz"]

# d_out, d_in, max_dim and whether there is a G: all that decides which form a side has.
FORMS = {
    "dense-dense": ((3, 4), 10, True),
    "dense-diagonal": ((3, 6), 4, True),
    "diagonal-dense": ((6, 3), 4, True),
    "diagonal-diagonal": ((3, 4), 1, True),
    "identity-dense": ((3, 4), 10, False),
    "identity-diagonal": ((3, 4), 1, False),
}
every_form = pytest.mark.parametrize(
    ("sides", "max_dim", "output_factor"), FORMS.values(), ids=FORMS.keys()
)
every_solver = pytest.mark.parametrize("solver", SOLVERS)
with_groups = pytest.mark.parametrize("groups", [(), (2,)], ids=["plain", "grouped"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


def make_block(
    shape: tuple[int, ...], solver: Any = "eigen", max_dim: int = 10, output_factor: bool = True
) -> KFACBlock:
    return KFACBlock(
        shape,
        torch.float64,
        solver=solver,
        max_dim=max_dim,
        output_factor=output_factor,
        per_sample=False,
    )


def make_means(block: KFACBlock, scale: float = 1.0) -> dict[str, Tensor]:
    """Averages of random rows, in the form that the block keeps."""
    means = {}
    for side, statistic in block.statistics.items():
        *batch, width = statistic.shape[:-1] if statistic.symmetric else statistic.shape
        rows = normal(*batch, 2 * width, width)
        moment = rows.mT @ rows / (2 * width)
        means[side] = scale * (moment if statistic.symmetric else moment.diagonal(0, -2, -1))
    return means


def dense(block: KFACBlock, means: dict[str, Tensor], side: str) -> Tensor | None:
    """A side as a full matrix; `None` for the identity."""
    form = block.forms[side]
    if form == "identity":
        return None
    return means[side] if form == "dense" else torch.diag_embed(means[side])


def solve(block: KFACBlock, means: dict[str, Tensor], gamma: float = GAMMA) -> dict[str, Tensor]:
    solution = block.refresh(Given(means, gamma))
    assert solution is not None
    return solution


def reference_step(block: KFACBlock, means: dict[str, Tensor], V: Tensor, gamma: float) -> Tensor:
    step = oracles.eigen_step if block.solver == "eigen" else oracles.cholesky_step
    A = dense(block, means, "A")
    assert A is not None
    return step(A, dense(block, means, "G"), V, gamma)


# --- the step --------------------------------------------------------------------------------


@every_solver
@every_form
@with_groups
def test_step_is_the_dense_formula(
    solver: str,
    sides: tuple[int, int],
    max_dim: int,
    output_factor: bool,
    groups: tuple[int, ...],
) -> None:
    block = make_block((*groups, *sides), solver, max_dim, output_factor)
    means, V = make_means(block), normal(*groups, *sides)
    actual = block.precondition(solve(block, means), V, GAMMA)
    assert_equal(actual, reference_step(block, means, V, GAMMA))


@every_form
def test_eigen_step_follows_the_damping_at_once(
    sides: tuple[int, int], max_dim: int, output_factor: bool
) -> None:
    block = make_block(sides, "eigen", max_dim, output_factor)
    means, V = make_means(block), normal(*sides)
    actual = block.precondition(solve(block, means, GAMMA), V, 7 * GAMMA)
    assert_equal(actual, reference_step(block, means, V, 7 * GAMMA))


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
@every_form
def test_inverse_step_keeps_the_damping_of_its_refresh(
    solver: str, sides: tuple[int, int], max_dim: int, output_factor: bool
) -> None:
    block = make_block(sides, solver, max_dim, output_factor)
    means, V = make_means(block), normal(*sides)
    actual = block.precondition(solve(block, means, GAMMA), V, 7 * GAMMA)
    assert_equal(actual, reference_step(block, means, V, GAMMA))


@every_solver
def test_groups_do_not_mix(solver: str) -> None:
    block, alone = make_block((2, 3, 4), solver), make_block((3, 4), solver)
    means, V = make_means(block), normal(2, 3, 4)
    actual = block.precondition(solve(block, means), V, GAMMA)
    for j in range(2):
        one = solve(alone, {side: mean[j] for side, mean in means.items()})
        assert_equal(actual[j], alone.precondition(one, V[j], GAMMA))


# --- how damping is split --------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
@pytest.mark.parametrize("zero", ["A", "G"])
@pytest.mark.parametrize("max_dim", [10, 1], ids=["dense", "diagonal"])
def test_a_side_with_zero_trace_has_plain_damping(solver: str, zero: str, max_dim: int) -> None:
    """`(G + √γ)⁻¹ V (A + √γ)⁻¹`: π = 1."""
    block = make_block((3, 4), solver, max_dim)
    means, V = make_means(block), normal(3, 4)
    means[zero] = torch.zeros_like(means[zero])
    actual = block.precondition(solve(block, means), V, GAMMA)
    damped = []
    for side in ("G", "A"):
        matrix = dense(block, means, side)
        assert matrix is not None
        damped.append(matrix + GAMMA**0.5 * torch.eye(len(matrix), **DOUBLE))
    assert_equal(damped[0] @ actual @ damped[1], V)


@pytest.mark.parametrize("scale", [1e24, 1e-24], ids=["overflow", "underflow"])
def test_a_ratio_of_traces_beyond_the_precision_has_plain_damping(scale: float) -> None:
    block = make_block((3, 4), "cholesky")
    means = {name: mean.float() for name, mean in make_means(block).items()}
    means["A"], means["G"] = means["A"] * scale, means["G"] / scale
    solution = solve(block, means)
    for side, mean in means.items():
        damped = mean.double() + GAMMA**0.5 * torch.eye(len(mean), **DOUBLE)
        expected = torch.linalg.inv(damped).float()
        error = (solution[f"{side}.inverse"] - expected).norm()
        assert error <= 1e-3 * expected.norm()


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
def test_the_trace_of_each_group_decides_for_itself(solver: str) -> None:
    block = make_block((3, 3, 4), solver)
    means, V = make_means(block), normal(3, 3, 4)
    means["G"][1] = 0
    means["A"][2] *= 100
    actual = block.precondition(solve(block, means), V, GAMMA)
    assert_equal(actual, oracles.cholesky_step(means["A"], means["G"], V, GAMMA))


@pytest.mark.parametrize("zero", ["A", "G"])
def test_eigen_step_of_a_zero_side_is_the_gradient_over_damping(zero: str) -> None:
    block = make_block((3, 4))
    means, V = make_means(block), normal(3, 4)
    means[zero] = torch.zeros_like(means[zero])
    assert_equal(block.precondition(solve(block, means), V, GAMMA), V / GAMMA)


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_only_the_product_of_the_sides_matters(solver: str, scale: float) -> None:
    """Moving a factor from G to A moves π with it."""
    block = make_block((3, 4), solver)
    means, V = make_means(block), normal(3, 4)
    moved = {"A": means["A"] * scale, "G": means["G"] / scale}
    steps = [block.precondition(solve(block, one), V, GAMMA) for one in (means, moved)]
    assert_equal(steps[1], steps[0])


# --- what is observed ------------------------------------------------------------------------


@every_form
@with_groups
def test_observations_have_the_declared_shapes(
    sides: tuple[int, int], max_dim: int, output_factor: bool, groups: tuple[int, ...]
) -> None:
    block = make_block((*groups, *sides), "eigen", max_dim, output_factor)
    inputs = DenseRows(normal(*groups, 5, 2, sides[1]))
    outputs = DenseRows(normal(*groups, 5, 2, sides[0]))
    observed = block.observe_input(inputs) | block.observe_output(outputs)
    assert {name: tuple(value.shape) for name, value in observed.items()} == {
        name: statistic.shape for name, statistic in block.statistics.items()
    }


@pytest.mark.parametrize("max_dim", [10, 1], ids=["dense", "diagonal"])
def test_observations_are_second_moments(max_dim: int) -> None:
    block = make_block((3, 4), "eigen", max_dim)
    a, g = normal(5, 2, 4), normal(5, 2, 3)
    found = block.observe_input(DenseRows(a)) | block.observe_output(DenseRows(g))
    for side, rows in (("A", a), ("G", g)):
        moment = torch.einsum("nsi,nsj->ij", rows, rows)
        assert_equal(found[side], moment if max_dim == 10 else moment.diagonal())


def test_statistics_say_where_they_come_from() -> None:
    statistics = make_block((3, 4)).statistics
    assert (statistics["A"].source, statistics["A"].degree) == ("input", 0)
    assert (statistics["G"].source, statistics["G"].degree) == ("output", 2)
    assert {one.combine for one in statistics.values()} == {"sum"}


@pytest.mark.parametrize("max_dim", [10, 1], ids=["dense", "diagonal"])
def test_only_dense_statistics_are_symmetric(max_dim: int) -> None:
    statistics = make_block((3, 4), "eigen", max_dim).statistics
    assert all(one.symmetric == (max_dim == 10) for one in statistics.values())


# --- solutions -------------------------------------------------------------------------------


@every_solver
@every_form
@with_groups
def test_solution_has_the_declared_names_and_shapes(
    solver: str,
    sides: tuple[int, int],
    max_dim: int,
    output_factor: bool,
    groups: tuple[int, ...],
) -> None:
    block = make_block((*groups, *sides), solver, max_dim, output_factor)
    solution = solve(block, make_means(block))
    assert {name: tuple(value.shape) for name, value in solution.items()} == dict(
        block.solution_shapes
    )


@every_solver
@every_form
def test_refresh_does_not_write_to_the_averages(
    solver: str, sides: tuple[int, int], max_dim: int, output_factor: bool
) -> None:
    block = make_block(sides, solver, max_dim, output_factor)
    means = make_means(block)
    before = {name: mean.clone() for name, mean in means.items()}
    solve(block, means)
    assert all(torch.equal(means[name], mean) for name, mean in before.items())


@every_solver
def test_precondition_does_not_write_to_the_gradient(solver: str) -> None:
    block = make_block((3, 4), solver)
    V = normal(3, 4)
    before = V.clone()
    block.precondition(solve(block, make_means(block)), V, GAMMA)
    assert torch.equal(V, before)


@every_solver
@pytest.mark.parametrize("side", ["A", "G"])
def test_no_solution_for_averages_that_are_not_finite(solver: str, side: str) -> None:
    block = make_block((3, 4), solver)
    means = make_means(block)
    means[side][0, 0] = torch.nan
    assert block.refresh(Given(means, GAMMA)) is None


def test_newton_schulz_block_gives_up_where_its_solver_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strict(matrix: Tensor, floor: Tensor) -> Tensor | None:
        return newton_schulz_inverse(matrix, floor, tolerance=0.0)

    monkeypatch.setattr("kronfac.methods.kfac.block.newton_schulz_inverse", strict)
    block = make_block((3, 4), "newton-schulz")
    assert block.refresh(Given(make_means(block), GAMMA)) is None


# --- choices and cost ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "solver"), [(EIGEN_MAX_WIDTH, "eigen"), (EIGEN_MAX_WIDTH + 1, "cholesky")]
)
def test_auto_decides_by_the_widest_dense_side(width: int, solver: str) -> None:
    assert choose_solver(width) == solver
    assert make_block((3, width), "auto", 8192).solver == solver
    assert make_block((width, 3), "auto", 8192).solver == solver


def test_a_diagonal_side_does_not_count_for_auto() -> None:
    assert make_block((3, 5000), "auto", 4000).solver == "eigen"


def test_a_side_of_max_dim_is_still_dense() -> None:
    assert make_block((3, 4), "eigen", 4).forms == {"A": "dense", "G": "dense"}
    assert make_block((3, 5), "eigen", 4).forms == {"A": "diagonal", "G": "dense"}


@pytest.mark.parametrize(
    ("solver", "per_cube", "products"),
    [("eigen", 9, 4), ("cholesky", 1, 2), ("newton-schulz", 80, 2)],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_flops_in_closed_form(solver: str, per_cube: int, products: int, groups: int) -> None:
    shape = (groups, 3, 4) if groups > 1 else (3, 4)
    cost = make_block(shape, solver).cost
    assert cost.refresh_flops == groups * per_cube * (4**3 + 3**3)
    assert cost.precondition_flops == groups * products * (3 * 4 * 4 + 3 * 4 * 3)


@every_solver
@every_form
@with_groups
def test_bytes_are_those_of_the_tensors(
    solver: str,
    sides: tuple[int, int],
    max_dim: int,
    output_factor: bool,
    groups: tuple[int, ...],
) -> None:
    block = make_block((*groups, *sides), solver, max_dim, output_factor)
    means = make_means(block)
    assert block.cost.statistics_bytes == sum(mean.nbytes for mean in means.values())
    assert block.cost.solution_bytes == sum(one.nbytes for one in solve(block, means).values())


@every_solver
def test_diagonal_sides_cost_no_decomposition(solver: str) -> None:
    cost = make_block((3, 4), solver, 1).cost
    assert (cost.refresh_flops, cost.precondition_flops) == (0, 0)


# --- the curvature itself --------------------------------------------------------------------


@every_form
@with_groups
def test_quadratic_is_the_dense_form(
    sides: tuple[int, int], max_dim: int, output_factor: bool, groups: tuple[int, ...]
) -> None:
    block = make_block((*groups, *sides), max_dim=max_dim, output_factor=output_factor)
    means = make_means(block)
    step = normal(*groups, *sides)
    A, G = dense(block, means, "A"), dense(block, means, "G")
    assert A is not None
    G = torch.eye(sides[0], **DOUBLE).expand(*groups, -1, -1) if G is None else G
    one_each = [A, G, step] if groups else [A[None], G[None], step[None]]
    expected = [
        v.flatten() @ torch.kron(g, a) @ v.flatten() for a, g, v in zip(*one_each, strict=True)
    ]
    assert_equal(block.quadratic(solve(block, means), step), torch.stack(expected).sum())
