"""A layer that has a gradient but was not observed is named."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import applied, assert_same, batch, frozen_kfac, loss_of, mlp, step


class Functional(nn.Module):
    """Uses the weight of one of its layers without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.called, self.read = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x).tanh(), self.read.weight, self.read.bias)


def test_a_weight_used_directly_is_named_in_a_warning() -> None:
    model = Functional()
    with pytest.warns(UserWarning, match="nothing was captured for 'read' although") as caught:
        step(model, frozen_kfac(model), batch())
    assert len(caught) == 1


def test_the_warning_points_at_the_step() -> None:
    model = Functional()
    optimizer = frozen_kfac(model)
    loss_of(model, batch()).backward()
    with pytest.warns(UserWarning, match="nothing was captured") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


def test_the_warning_comes_once() -> None:
    model = Functional()
    optimizer = frozen_kfac(model)
    with pytest.warns(UserWarning, match="nothing was captured"):
        step(model, optimizer, batch(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, batch(1))


def test_such_a_gradient_passes_as_it_is() -> None:
    model = Functional()
    optimizer = frozen_kfac(model, on_missing="ignore")
    before, after = applied(model, optimizer, batch())
    assert_same(after["read.weight"], before["read.weight"])
    assert optimizer.stats()["without_solution"] == ["read"]


def test_the_other_layers_are_preconditioned() -> None:
    model = Functional()
    before, after = applied(model, frozen_kfac(model, on_missing="ignore"), batch())
    assert not torch.equal(after["called.weight"], before["called.weight"])


def test_it_can_raise_instead() -> None:
    model = Functional()
    with pytest.raises(RuntimeError, match="nothing was captured for 'read'"):
        step(model, frozen_kfac(model, on_missing="raise"), batch())


def test_it_can_be_silent() -> None:
    model = Functional()
    optimizer = frozen_kfac(model, on_missing="ignore")
    step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == ["read"]


def test_a_layer_in_exclude_is_no_cause_for_a_warning() -> None:
    model = Functional()
    optimizer = frozen_kfac(model, exclude="read")
    step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == []


def test_a_layer_that_trains_in_evaluation_mode_is_named() -> None:
    model = mlp()
    model[2].eval()
    with pytest.warns(UserWarning, match="nothing was captured for '2'"):
        step(model, frozen_kfac(model), batch())


def test_several_layers_are_named_in_one_warning() -> None:
    model = mlp().eval()
    with pytest.warns(UserWarning, match="'0', '2', '4'") as caught:
        step(model, frozen_kfac(model), batch())
    assert len(caught) == 1


def test_a_layer_without_a_gradient_is_no_cause_for_a_warning() -> None:
    model = Functional()
    model.read.requires_grad_(False)
    optimizer = frozen_kfac(model)
    step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == []
