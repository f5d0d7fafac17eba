"""Rows of every kind of layer against the reference, which cuts patches out one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac.layers import Layer, find_layers
from kronfac.layers.parameter_view import ParameterView
from kronfac.layers.rows import DenseRows, Rows, TokenRows
from tests import oracles
from tests.feature_order import in_library_order
from tests.layers.cases import CASES, Case, normal

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def layer_of(case: Case) -> Layer:
    (found,) = find_layers("layer", case.module)
    return found


def both_sides(case: Case) -> tuple[Layer, Rows, Rows, Tensor]:
    """The layer, its input and output rows, and the output gradient that was sent back."""
    layer = layer_of(case)
    outputs = case.module(case.x)
    direction = torch.randn_like(outputs)  # in the layout of the outputs
    outputs.backward(direction)
    return layer, layer.inputs((case.x,)), layer.outputs(direction), direction


@every_case
def test_dense_rows_are_the_reference(make: Any) -> None:
    case = make()
    _, inputs, outputs, direction = both_sides(case)
    a, g = oracles.layer_rows(case.module, case.x, direction)
    assert_equal(inputs.dense(), in_library_order(case.module, a))
    assert_equal(outputs.dense(), g)


@every_case
def test_rows_give_the_gradient(make: Any) -> None:
    layer, inputs, outputs, _ = both_sides(make())
    expected = oracles.gradient_from_rows(inputs.dense(), outputs.dense())
    assert_equal(ParameterView(layer).gradient(), expected)


def each_side(make: Any) -> list[Rows]:
    _, inputs, outputs, _ = both_sides(make())
    return [inputs, outputs]


@every_case
def test_covariance(make: Any) -> None:
    for rows in each_side(make):
        dense = rows.dense()
        assert_equal(rows.covariance(), torch.einsum("...nsi,...nsj->...ij", dense, dense))


@every_case
def test_squares(make: Any) -> None:
    for rows in each_side(make):
        assert_equal(rows.squares(), rows.dense().square().sum((-3, -2)))


@every_case
def test_total(make: Any) -> None:
    for rows in each_side(make):
        assert_equal(rows.total(), rows.dense().sum((-3, -2)))


@every_case
def test_summed_over_positions(make: Any) -> None:
    for rows in each_side(make):
        assert_equal(rows.summed(), rows.dense().sum(-2))


@every_case
def test_counts(make: Any) -> None:
    for rows in each_side(make):
        samples, positions = rows.dense().shape[-3:-1]
        assert (rows.samples, rows.positions) == (samples, positions)
        assert rows.count == samples * positions


@every_case
def test_part_of_the_samples(make: Any) -> None:
    for rows in each_side(make):
        parts = [rows.part(n, n + 1).dense() for n in range(rows.samples)]
        assert_equal(torch.cat(parts, -3), rows.dense())


@every_case
def test_uses_side_by_side(make: Any) -> None:
    for rows in each_side(make):
        both = rows.beside(rows)
        assert_equal(both.dense(), torch.cat([rows.dense(), rows.dense()], -2))


@every_case
def test_kept_rows_outlive_what_they_were_made_from(make: Any) -> None:
    case = make()
    _, inputs, outputs, direction = both_sides(case)
    expected = [inputs.dense().clone(), outputs.dense().clone()]
    kept = [inputs.kept(), outputs.kept()]
    with torch.no_grad():
        case.x.zero_()
        direction.zero_()
    for rows, value in zip(kept, expected, strict=True):
        assert_equal(rows.dense(), value)


def test_tokens_are_kept_as_numbers() -> None:
    """One-hot rows of a large vocabulary would not fit."""
    tokens = torch.tensor([[0, 3], [2, 3], [4, 1]])
    rows = TokenRows(tokens, 5, padding=4, dtype=torch.float64)
    dense = rows.dense()
    for made, value in (
        (rows.kept(), dense),
        (rows.part(1, 3), dense[1:]),
        (rows.beside(rows), torch.cat([dense, dense], -2)),
    ):
        assert isinstance(made, TokenRows)
        assert_equal(made.dense(), value)
    assert isinstance(rows.beside(DenseRows(dense)), DenseRows)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_dense_rows_by_themselves(ones: bool, batch: tuple[int, ...]) -> None:
    made = normal(*batch, 3, 2, 4)
    rows = DenseRows(made, ones)
    dense = rows.dense()
    assert dense.shape == (*batch, 3, 2, 4 + ones)
    assert_equal(rows.covariance(), torch.einsum("...nsi,...nsj->...ij", dense, dense))
    assert_equal(rows.squares(), dense.square().sum((-3, -2)))
    assert_equal(rows.total(), dense.sum((-3, -2)))
    assert_equal(rows.summed(), dense.sum(-2))


@pytest.mark.parametrize("name", ["linear-sequence", "conv2d-padded", "conv2d-groups", "conv3d"])
@pytest.mark.parametrize(
    ("low", "factor"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.half, torch.float32)],
)
def test_rows_are_in_factor_precision(name: str, low: torch.dtype, factor: torch.dtype) -> None:
    case = CASES[name]()
    module, x = case.module.to(low), case.x.to(low)
    layer = layer_of(Case(module, x))
    for rows in (layer.inputs((x,)), layer.outputs(torch.randn_like(module(x)))):
        made = (rows.dense(), rows.covariance(), rows.squares(), rows.total(), rows.summed())
        assert {one.dtype for one in made} == {factor}


@pytest.mark.parametrize("name", ["linear", "linear-sequence", "conv2d-padded", "conv2d-groups"])
def test_a_batch_without_samples_adds_nothing(name: str) -> None:
    case = CASES[name]()
    empty = case.x[:0]
    layer = layer_of(case)
    for rows in (layer.inputs((empty,)), layer.outputs(case.module(empty).detach())):
        assert rows.count == 0
        assert not rows.covariance().any()
