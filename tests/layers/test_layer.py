"""A layer's gradient as a matrix, and the way back."""

from typing import Any

import pytest
import torch
from torch import nn

from kronfac.layers import Layer, find_layers
from kronfac.layers.parameter_view import ParameterView
from tests import oracles
from tests.feature_order import in_library_order
from tests.layers.cases import CASES, Case, normal

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def with_gradient(case: Case) -> Layer:
    outputs = case.module(case.x)
    outputs.backward(normal(*outputs.shape))
    (found,) = find_layers("layer", case.module)
    return found


@every_case
def test_gradient_is_the_reference_matrix(make: Any) -> None:
    case = make()
    layer = with_gradient(case)
    expected = in_library_order(case.module, oracles.matrix_gradient(case.module))
    assert torch.equal(ParameterView(layer).gradient(), expected)


@every_case
def test_matrix_shape_is_that_of_the_gradient(make: Any) -> None:
    layer = with_gradient(make())
    assert ParameterView(layer).gradient().shape == layer.matrix_shape


@every_case
def test_writing_the_gradient_back_changes_nothing(make: Any) -> None:
    case = make()
    layer = with_gradient(case)
    before = [p.grad.clone() for p in layer.parameters if p.grad is not None]
    ParameterView(layer).write(ParameterView(layer).gradient().clone())
    assert all(
        torch.equal(p.grad, b)
        for p, b in zip(layer.parameters, before, strict=True)
        if p.grad is not None
    )


@every_case
def test_what_is_written_is_read_back(make: Any) -> None:
    layer = with_gradient(make())
    matrix = normal(*layer.matrix_shape)
    ParameterView(layer).write(matrix)
    assert torch.equal(ParameterView(layer).gradient(), matrix)


@every_case
def test_gradients_are_rewritten_in_place(make: Any) -> None:
    layer = with_gradient(make())
    places = [p.grad.data_ptr() for p in layer.parameters if p.grad is not None]
    ParameterView(layer).write(normal(*layer.matrix_shape))
    assert places == [p.grad.data_ptr() for p in layer.parameters if p.grad is not None]


def test_a_frozen_bias_is_not_in_the_matrix() -> None:
    layer = with_gradient(CASES["linear-frozen-bias"]())
    assert layer.matrix_shape == (3, 4)
    assert layer.parameters == [layer.weight]


def test_a_bias_without_gradient_is_a_column_of_zeros() -> None:
    layer = with_gradient(CASES["linear"]())
    assert layer.bias is not None
    layer.bias.grad = None
    assert torch.equal(ParameterView(layer).gradient()[:, -1], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_the_matrix_is_at_least_single_precision(dtype: torch.dtype, factor: torch.dtype) -> None:
    (layer,) = find_layers("layer", nn.Linear(4, 3, dtype=dtype))
    layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.ones_like(layer.bias)
    assert ParameterView(layer).gradient().dtype == layer.factor_dtype == factor


@pytest.mark.parametrize("name", ["linear", "conv2d-groups"])
def test_freezing_the_bias_makes_the_shape_stale_until_it_is_renewed(name: str) -> None:
    case = CASES[name]()
    layer = with_gradient(case)
    *start, width = layer.matrix_shape
    assert not layer.stale()
    case.module.bias.requires_grad_(False)
    assert layer.stale()
    assert layer.matrix_shape == (*start, width)
    layer.renew()
    assert not layer.stale()
    assert layer.matrix_shape == (*start, width - 1)
