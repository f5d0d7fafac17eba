"""Parts of a solution, solved on their own or as summands, make what a refresh makes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac.linalg.solve import cholesky_inverse, cholesky_inverse_share, share_rows
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.protocol.block import Block, Cost, Given, Statistic, Tensors

GAMMA = 0.1
SOLVERS = ["eigen", "cholesky", "newton-schulz"]

# d_out, d_in, max_dim, whether there is a G, and whether the input picks columns.
FORMS = {
    "dense-dense": ((3, 4), 10, True, False),
    "dense-diagonal": ((3, 6), 4, True, False),
    "diagonal-dense": ((6, 3), 4, True, False),
    "diagonal-diagonal": ((3, 4), 1, True, False),
    "identity-dense": ((3, 4), 10, False, False),
    "identity-diagonal": ((3, 4), 1, False, False),
    "dense-picks": ((3, 4), 10, True, True),
    "identity-picks": ((3, 4), 10, False, True),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=SOLVERS)
def solver(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[(), (2,)], ids=["plain", "grouped"])
def groups(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def block(request: pytest.FixtureRequest, solver: Any, groups: tuple[int, ...]) -> KFACBlock:
    sides, max_dim, output_factor, picks_columns = request.param
    return make_block((*groups, *sides), solver, max_dim, output_factor, picks_columns)


def make_block(
    shape: tuple[int, ...],
    solver: Any = "cholesky",
    max_dim: int = 1000,
    output_factor: bool = True,
    picks_columns: bool = False,
) -> KFACBlock:
    return KFACBlock(
        shape,
        torch.float64,
        solver=solver,
        max_dim=max_dim,
        output_factor=output_factor,
        per_sample=False,
        picks_columns=picks_columns,
    )


def positive(size: int, *batch: int) -> Tensor:
    rows = torch.randn(*batch, 2 * size, size, dtype=torch.float64)
    return rows.mT @ rows / (2 * size)


def make_means(block: Block) -> dict[str, Tensor]:
    """Averages of random rows; a diagonal has a zero, as a token that was never seen."""
    means = {}
    for name, statistic in block.statistics.items():
        if statistic.symmetric:
            *batch, size, _ = statistic.shape
            means[name] = positive(size, *batch)
        else:
            means[name] = torch.rand(statistic.shape, dtype=torch.float64)
            means[name][..., 0] = 0
    return means


def given(block: Block, part: str, means: Tensors) -> Given:
    """What a part may look at."""
    own = {name: means[name] for name in block.parts[part].statistics}
    return Given(own, GAMMA, block.outlines(means))


def divisible(block: Block) -> list[str]:
    return [name for name, part in block.parts.items() if part.shared_flops is not None]


# --- what parts are --------------------------------------------------------------------------


def assert_partition(block: Block) -> None:
    parts = block.parts.values()
    assert sorted(n for part in parts for n in part.statistics) == sorted(block.statistics)
    assert sorted(n for part in parts for n in part.solution) == sorted(block.solution_shapes)


def test_parts_divide_statistics_and_solution(block: KFACBlock) -> None:
    assert_partition(block)
    assert list(block.parts) == list(block.statistics)


def test_flops_of_dense_parts_are_those_of_a_refresh(solver: Any, groups: tuple[int, ...]) -> None:
    block = make_block((*groups, 3, 5), solver)
    flops = {name: part.flops for name, part in block.parts.items()}
    assert sum(flops.values()) == block.cost.refresh_flops
    per_cube = {"eigen": 9, "cholesky": 1, "newton-schulz": 80}[solver]
    count = 2 if groups else 1
    assert flops == {"A": count * per_cube * 125, "G": count * per_cube * 27}


def test_flops_of_a_diagonal_are_its_width(solver: Any, groups: tuple[int, ...]) -> None:
    block = make_block((*groups, 3, 5), solver, max_dim=4)
    assert block.parts["A"].flops == (10 if groups else 5)
    assert block.parts["A"].shared_flops is None


def test_a_dense_cholesky_side_and_no_other_is_divisible(block: KFACBlock) -> None:
    expected = [side for side, form in block.forms.items() if form == "dense"]
    assert divisible(block) == (expected if block.solver == "cholesky" else [])
    for name in divisible(block):
        part = block.parts[name]
        assert part.shared_flops == part.flops // 3


# --- solving parts ---------------------------------------------------------------------------


def assert_parts_are_the_refresh(block: Block) -> None:
    means = make_means(block)
    merged: dict[str, Tensor] = {}
    for name, part in block.parts.items():
        solved = block.solve(name, given(block, name, means))
        assert solved is not None
        assert sorted(solved) == sorted(part.solution)
        merged |= solved
    expected = block.refresh(Given(means, GAMMA))
    assert expected is not None
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(merged[name], value)
        assert value.shape == block.solution_shapes[name]


def test_parts_are_the_refresh(block: KFACBlock) -> None:
    assert_parts_are_the_refresh(block)


@pytest.mark.parametrize("size", [1, 2])
def test_unit_wise_is_one_part(size: int) -> None:
    block = UnitWiseBlock((4, 1, size), torch.float64, per_sample=True)
    assert list(block.parts) == [""]
    assert block.parts[""].flops == block.cost.refresh_flops
    assert_partition(block)
    assert_parts_are_the_refresh(block)
    assert block.outline("F", positive(size, 4)) is None
    assert not block.outline_shapes


@pytest.mark.parametrize("side", ["A", "G"])
def test_a_refresh_fails_with_any_part(solver: Any, side: str) -> None:
    block = make_block((3, 4), solver)
    means = make_means(block)
    means[side][0, 1] = float("nan")
    solved = {part: block.solve(part, given(block, part, means)) for part in block.parts}
    assert [part for part, solution in solved.items() if solution is None] == [side]
    assert block.refresh(Given(means, GAMMA)) is None


# --- outlines --------------------------------------------------------------------------------


def test_outlines_are_linear_and_as_announced(block: KFACBlock) -> None:
    first, second = make_means(block), make_means(block)
    assert set(block.outline_shapes) == (set() if block.solver == "eigen" else set(first))
    for name in first:
        outline = block.outline(name, first[name])
        if outline is None:
            assert name not in block.outline_shapes
            continue
        assert outline.shape == block.outline_shapes[name]
        other = block.outline(name, second[name])
        both = block.outline(name, first[name] + 3 * second[name])
        assert other is not None
        assert both is not None
        torch.testing.assert_close(both, outline + 3 * other, rtol=1e-13, atol=0)


# --- summands --------------------------------------------------------------------------------


def shares_of(matrix: Tensor, of: int) -> list[Tensor]:
    shares = [cholesky_inverse_share(matrix, index, of) for index in range(of)]
    found = [share for share in shares if share is not None]
    assert len(found) == of
    return found


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=["plain", "batch", "two"])
@pytest.mark.parametrize("of", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 300])
def test_shares_add_up_to_the_inverse(size: int, of: int, batch: tuple[int, ...]) -> None:
    matrix = positive(size, *batch) + GAMMA * torch.eye(size, dtype=torch.float64)
    shares = shares_of(matrix, of)
    torch.testing.assert_close(sum(shares), torch.linalg.inv(matrix), rtol=0, atol=1e-10)
    for share in shares:
        assert torch.equal(share, share.mT)
        assert share.is_contiguous()
        assert share.dtype == matrix.dtype


@pytest.mark.parametrize("size", [1, 5, 40])
def test_one_share_is_the_inverse_to_the_bit(size: int) -> None:
    matrix = positive(size) + GAMMA * torch.eye(size, dtype=torch.float64)
    expected = cholesky_inverse(matrix)
    assert expected is not None
    assert torch.equal(shares_of(matrix, 1)[0], expected)


def test_more_shares_than_rows() -> None:
    matrix = positive(3) + GAMMA * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(sum(shares_of(matrix, 11)), torch.linalg.inv(matrix))


@pytest.mark.parametrize("of", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 1000])
def test_rows_of_shares_cover_and_cost_the_same(width: int, of: int) -> None:
    ranges = [share_rows(width, index, of) for index in range(of)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(width))
    for start, stop in ranges:  # within half a row on either side
        assert abs((stop**3 - start**3) - width**3 / of) <= 3.01 * width**2


def test_a_share_does_not_write_to_the_matrix() -> None:
    matrix = positive(300) + GAMMA * torch.eye(300, dtype=torch.float64)
    before = matrix.clone()
    shares_of(matrix, 2)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("of", [1, 2, 5])
def test_all_shares_fail_together(of: int) -> None:
    indefinite = torch.diag(torch.tensor([1.0] * 6 + [-1.0], dtype=torch.float64))
    poisoned = torch.eye(7, dtype=torch.float64)
    poisoned[6, 6] = float("inf")
    both = torch.stack([torch.eye(7, dtype=torch.float64), indefinite])
    for matrix in (indefinite, poisoned, both):
        assert cholesky_inverse(matrix) is None
        assert all(cholesky_inverse_share(matrix, index, of) is None for index in range(of))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_shares_climb_to_the_same_rung(dtype: torch.dtype) -> None:
    """The last row alone needs a jitter, and each share takes it."""
    matrix = torch.diag(torch.tensor([1.0] * 6 + [0.0], dtype=dtype))
    expected = cholesky_inverse(matrix)
    assert expected is not None
    for of in (1, 2, 5):
        torch.testing.assert_close(sum(shares_of(matrix, of)), expected)


@pytest.mark.parametrize("of", [1, 2, 3])
def test_shares_climb_to_double_precision(of: int) -> None:
    rows = torch.randn(4, 256)
    matrix = rows.T @ rows
    jittered = matrix + torch.eye(256) * (1e-6 * matrix.diagonal().mean())
    assert int(torch.linalg.cholesky_ex(jittered).info) != 0
    expected = cholesky_inverse(matrix)
    shares = shares_of(matrix, of)
    assert expected is not None
    assert {share.dtype for share in shares} == {torch.float32}
    torch.testing.assert_close(sum(shares), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


def test_a_share_that_overflows_is_no_share() -> None:
    assert cholesky_inverse_share(torch.full((1, 1), 1e-40), 0, 1) is None


@pytest.mark.parametrize("of", [1, 2, 3, 9])
def test_shares_of_a_part_add_up_to_it(block: KFACBlock, of: int) -> None:
    means = make_means(block)
    for name in block.parts:
        own = given(block, name, means)
        if name not in divisible(block):
            with pytest.raises(NotImplementedError, match=name):
                block.solve_share(name, own, 0, of)
            continue
        expected = block.solve(name, own)
        shares = [block.solve_share(name, own, index, of) for index in range(of)]
        assert expected is not None
        for key, value in expected.items():
            summed = sum(share[key] for share in shares if share is not None)
            torch.testing.assert_close(summed, value, rtol=0, atol=1e-10)


# --- a block that says nothing about parts ---------------------------------------------------


class PlainBlock(Block):
    label = "plain"

    def __init__(self) -> None:
        self.statistics = {"a": Statistic((2,), "input"), "b": Statistic((2,), "output")}
        self.solution_shapes = {"x": (2,)}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return {"x": given.means["a"] + given.damping * given.means["b"]}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return gradient

    @property
    def cost(self) -> Cost:
        return Cost(12, 0, 0, 0)


def test_a_block_is_one_part_by_default() -> None:
    block = PlainBlock()
    assert list(block.parts) == [""]
    assert block.parts[""].flops == 12
    assert divisible(block) == []
    assert_partition(block)
    assert_parts_are_the_refresh(block)
    assert block.outline_shapes == {}
    with pytest.raises(NotImplementedError, match="plain"):
        block.solve_share("", Given(make_means(block), GAMMA), 0, 2)
