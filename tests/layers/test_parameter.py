"""Parameters whose products nobody sees: no curvature, but steps by the same rule of lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD

import kronfac
from kronfac.layers.parameter import ParameterLayer
from kronfac.linalg.orthogonal import nearest_orthogonal
from kronfac.protocol.registry import optimizers
from kronfac.rescale.factors import CHANNELS
from kronfac.step.lengths import FIRST
from tests.distributed.models import CLASSES, KINDS
from tests.training import assert_same

LINE: dict[str, Any] = {"momentum": 0.9, "nesterov": True}


class Bare(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(shape))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


FORMS = [
    (nn.LSTM(3, 5), "weight_ih_l0", (4, 5, 3)),
    (nn.GRU(3, 5), "weight_hh_l0", (3, 5, 5)),
    (nn.RNN(3, 5), "weight_hh_l0", (5, 5)),
    (nn.LSTM(3, 5, proj_size=2), "weight_hr_l0", (2, 5)),
    (nn.LSTMCell(3, 5), "weight_hh", (4, 5, 5)),
    (nn.GRU(3, 5), "bias_ih_l0", (15, 1, 1)),
    (nn.ConvTranspose2d(3, 4, 2), "weight", (16, 3)),
    (nn.ConvTranspose2d(6, 4, (2, 3), groups=2), "weight", (2, 12, 3)),
    (nn.ConvTranspose1d(1, 4, 1), "weight", (4, 1, 1)),
    (nn.EmbeddingBag(7, 3), "weight", (3, 7)),
    (nn.PReLU(4), "weight", (4, 1, 1)),
    (Own(3, 5), "weight", (5, 3)),
    (Bare(), "own", (1, 1, 1)),
    (Bare(1, 1, 6), "own", (6, 1, 1)),
    (Bare(1, 5, 6), "own", (5, 6)),
    (Bare(6, 5), "own", (5, 6)),
    (Bare(3, 5, 6), "own", (3, 5, 6)),
    (Bare(3, 6, 5), "own", (3, 5, 6)),
    (Bare(3, 5, 2, 2), "own", (3, 20)),
    (Bare(30, 2, 1, 2, 2), "own", (30, 8)),
    (Bare(9000, 2), "own", (2, 9000)),
]


#: What a parametrized module is made of, and modules that compute in a way of their own.
PARTS = [
    (weight_norm(nn.Conv1d(4, 6, 3)), "original0", (6, 1, 1)),
    (weight_norm(nn.Conv1d(4, 6, 3)), "original1", (6, 12)),
    (weight_norm(nn.Conv2d(4, 6, (1, 3), groups=2)), "original1", (2, 3, 6)),
    (weight_norm(nn.ConvTranspose2d(4, 6, 2)), "original1", (24, 4)),
    (weight_norm(nn.Linear(3, 5)), "original1", (5, 3)),
    (weight_norm(nn.LSTM(3, 5), "weight_hh_l0"), "original1", (4, 5, 5)),
]


@pytest.mark.parametrize(("module", "name", "shape"), PARTS, ids=lambda one: str(one))
def test_forms_of_parts(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    ((role, parts),) = module.parametrizations.items()
    assert ParameterLayer(name, parts, name, module, role).matrix_shape == shape


@pytest.mark.parametrize(("module", "name", "shape"), FORMS, ids=lambda one: str(one))
def test_forms(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    layer = ParameterLayer(name, module, name)
    assert layer.matrix_shape == shape
    values = torch.randn(layer.weight.shape)
    matrix = layer.as_matrix(values)
    assert tuple(matrix.shape) == shape
    grad = torch.zeros_like(values)
    target, value = layer._weight_place(grad, matrix.clone())
    target.copy_(value)
    assert torch.equal(grad, values)


def test_columns_of_a_transposed_convolution_are_what_an_input_becomes() -> None:
    module = nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 3), groups=2, bias=False)
    x = torch.randn(1, 4, 1, 1)
    matrices = ParameterLayer("up", module, "weight").as_matrix(module.weight.detach())
    expected = matrices @ x.view(2, 2, 1)
    torch.testing.assert_close(module(x).view(2, 18, 1), expected)


# --- steps -----------------------------------------------------------------------------------


def train(
    model: nn.Module, optimizer: Any, steps: int = 1, first: int = 0, observes: bool = False
) -> None:
    for number in range(first, first + steps):
        x, y = KINDS["unseen"].batch(number, 8)
        optimizer.zero_grad()
        scores = model(x)
        if observes:
            optimizer.observe(scores)
        F.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def changes(**options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and what the first step at a rate of 0.1 makes of each parameter, divided by -0.1."""
    model = KINDS["unseen"].model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE | options)
    x, y = KINDS["unseen"].batch(0, 8)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return grads, {n: (before[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}


def test_matrices_get_orthogonal_steps_of_their_gradients() -> None:
    grads, steps = changes()
    for name, batch in (("recur.weight_hh_l0", (4, 4, 4)), ("experts", (2, 8, 5))):
        expected = nearest_orthogonal(grads[name].view(batch)).flatten(1)
        norm = FIRST * min(batch[1:]) ** 0.5
        expected = norm * F.normalize(expected, dim=1)
        torch.testing.assert_close(steps[name].reshape_as(expected), expected, rtol=1e-2, atol=1e-3)


def test_entries_get_steps_of_a_fixed_root_mean_square() -> None:
    grads, steps = changes()
    for name in ("recur.bias_ih_l0", "up.bias", "scale"):
        assert float(F.cosine_similarity(grads[name], steps[name], dim=0)) == pytest.approx(1)
        root = float(steps[name].square().mean().sqrt())
        assert root == pytest.approx(FIRST * CHANNELS, rel=1e-4)


@pytest.mark.parametrize("rescale", ["graft", "unit", "orthogonal", "kl-clip", None])
def test_other_rules_leave_them_to_the_base(rescale: str | None) -> None:
    grads, steps = changes(rescale=rescale, momentum=0.0, nesterov=False)
    for name in ("recur.weight_hh_l0", "experts", "scale", "up.bias"):
        torch.testing.assert_close(steps[name], grads[name])


@pytest.mark.parametrize("pattern", [nn.LSTM, "recur"])
def test_what_a_user_leaves_out_is_left_to_the_base(pattern: Any) -> None:
    grads, steps = changes(exclude=[pattern])
    torch.testing.assert_close(steps["recur.weight_hh_l0"], grads["recur.weight_hh_l0"])
    assert not torch.allclose(steps["experts"], grads["experts"])


def test_what_include_does_not_name_is_left_to_the_base() -> None:
    grads, steps = changes(include=["head"])
    for name in ("recur.weight_hh_l0", "experts", "scale"):
        torch.testing.assert_close(steps[name], grads[name])


@pytest.mark.parametrize("name", sorted(optimizers()))
def test_every_method_has_them(name: str) -> None:
    model = KINDS["unseen"].model()
    base = SGD(model.parameters(), lr=0.1)
    optimizer = getattr(kronfac, name)(model, base, **LINE | {"rescale": "auto"})
    before = model.experts.detach().clone()
    train(model, optimizer, observes=optimizer.needs_observe)
    norm = float((before - model.experts.detach()).norm())
    assert norm == pytest.approx(0.1 * FIRST * (2 * 5) ** 0.5, rel=1e-4)


def test_an_expert_without_a_gradient_stays_where_it_is() -> None:
    model = KINDS["unseen"].model()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)
    train(model, optimizer, 2)
    x, y = KINDS["unseen"].batch(2, 8)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    model.experts.grad[1] = 0
    before = model.experts.detach().clone()
    optimizer.step()
    assert torch.equal(model.experts[1], before[1])
    assert not torch.allclose(model.experts[0], before[0], rtol=1e-3)


def test_a_bias_of_several_weights_is_taken_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)
            self.second.bias = self.first.bias
            self.first.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.first(x) + self.second(x)
            return out

    model = Two()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)
    assert all(state.has_curvature for state in optimizer._preconditioner.layers.values())


def test_a_parametrized_module_is_left_out_as_a_whole() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Linear(6, CLASSES))
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), exclude=["0"], **LINE)
    assert [state.name for state in optimizer._preconditioner.layers.values()] == ["1"]


def test_that_nothing_was_observed_is_still_an_error() -> None:
    model = KINDS["unseen"].model()
    base = SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, fisher="mc", on_missing="ignore", **LINE)
    with pytest.raises(RuntimeError, match=r"call optimizer\.observe"):
        train(model, optimizer)


def test_gradients_that_are_not_matrices_are_left_to_the_base() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(5, 3, sparse=True)
            self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.head = nn.Linear(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head((self.tokens(x) * self.phase).real)
            return out

    model = Odd()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)
    model(torch.randint(5, (6,))).square().mean().backward()
    before = model.phase.detach().clone()
    grad = model.phase.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model.phase.detach(), before - 0.1 * grad)
    assert set(optimizer.left_out()) == {"tokens.weight", "phase"}
    assert "steps as long" not in str(optimizer)


def test_a_bias_beside_a_frozen_weight_has_one_until_that_is_trained() -> None:
    model = nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Linear(5, CLASSES))
    )
    for layer in model[:3]:
        layer.weight.requires_grad_(False)
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), exclude=["2"], **LINE)
    x, y = torch.randn(8, 4), torch.randint(CLASSES, (8,))
    before = [layer.bias.detach().clone() for layer in model[:3]]
    F.cross_entropy(model(x), y).backward()
    raw = model[2].bias.grad.clone()
    optimizer.step()
    for layer, value in zip(model[:2], before[:2], strict=True):
        root = float((layer.bias.detach() - value).square().mean().sqrt())
        # The gradient of a bias in front of a batch norm is rounding, of which a length is made as well.
        assert root == pytest.approx(0.1 * FIRST * CHANNELS, rel=1e-3)
    torch.testing.assert_close(model[2].bias.detach(), before[2] - 0.1 * raw)
    assert "its weight is frozen:\n    0.bias 1.bias" in str(optimizer)

    model[1].weight.requires_grad_(True)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    norm = next(state for state in optimizer.layers if state.name == "1")
    assert norm.has_gradient
    assert "1.bias" not in [state.name for state in optimizer.layers]
    beside = optimizer._preconditioner.layers[model[1].bias, ""]
    assert not beside.has_gradient


# --- what the optimizer says and keeps -------------------------------------------------------


def test_the_summary_tells_them_from_what_is_left_to_the_base() -> None:
    model = KINDS["unseen"].model()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), exclude=["up"], **LINE)
    text = str(optimizer)
    same, others = text.split("Not preconditioned, but with momentum and steps as long")[1].split(
        "Not preconditioned"
    )
    assert "places experts scale" in same
    assert "recur.weight_ih_l0" in same
    assert "in exclude:\n    up.weight up.bias" in others
    assert [state.name for state in optimizer.layers] == ["tokens", "head"]


def test_a_model_without_any_layer_is_still_told_of() -> None:
    model = nn.LSTM(3, 5)
    with pytest.warns(UserWarning, match="no layer of the LSTM is preconditioned: steps have"):
        kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)


def test_resumes_bit_for_bit() -> None:
    model = KINDS["unseen"].model()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3, first=3)

    other = KINDS["unseen"].model()
    resumed = kronfac.KFAC(other, SGD(other.parameters(), lr=0.1), **LINE)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, 3, first=3)
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))


def test_an_empty_step_makes_the_state_that_loaders_fill() -> None:
    optimizers = []
    for steps in (1, 0):
        model = KINDS["unseen"].model()
        optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)
        train(model, optimizer, steps)
        optimizers.append(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers[1].step()
    assert all(map(torch.equal, before, model.parameters()))
    shapes = [
        {
            (index, key): getattr(value, "shape", None)
            for index, entry in one.state_dict()["state"].items()
            for key, value in entry.items()
        }
        for one in optimizers
    ]
    assert shapes[0] == shapes[1]


def test_a_gradient_of_zeros_or_none_changes_nothing() -> None:
    model = KINDS["unseen"].model()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **LINE)
    x, y = KINDS["unseen"].batch(0, 8)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    model.experts.grad = None
    model.scale.grad.zero_()
    before = {"experts": model.experts.detach().clone(), "scale": model.scale.detach().clone()}
    optimizer.step()
    assert_same(before, {name: getattr(model, name).detach() for name in before})
