"""Weights longer than √(2·d_out) are brought back to it, after each update, also behind K-FAC."""

import math

import pytest
import torch
from torch import nn

import kronfac
from kronfac.runs.errors import UserError
from kronfac.train.optim.weight_rescaling import WeightRescaling
from tests.training import batch, cnn, images, loss_of, mlp


def stretch(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


def test_long_weights_get_the_norm_of_the_definition() -> None:
    model = cnn()
    stretch(model, 1000.0)
    before = [p.detach().clone() for p in weights(model)]
    WeightRescaling(model).apply()
    for weight, old in zip(weights(model), before, strict=True):
        norm = math.sqrt(2 * weight.shape[0])
        torch.testing.assert_close(weight.detach(), old * norm / old.norm())


def test_short_weights_and_biases_stay() -> None:
    model = cnn()
    stretch(model, 0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    WeightRescaling(model).apply()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    stretch(model, 1000.0)
    biases = [p.detach().clone() for p in model.parameters() if p.dim() == 1]
    WeightRescaling(model).apply()
    after = [p for p in model.parameters() if p.dim() == 1]
    assert all(torch.equal(x, y) for x, y in zip(after, biases, strict=True))


def test_a_layer_in_front_of_a_norm_computes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-12)).double()
    stretch(model[0], 1000.0)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    expected = model(x)
    WeightRescaling(model).apply()
    torch.testing.assert_close(model(x), expected)


def test_patterns_choose_layers() -> None:
    model = mlp()
    chosen = WeightRescaling(model, exclude=["4"])
    assert len(chosen.weights) == 2
    assert all(one is not model[4].weight for one in chosen.weights)
    assert WeightRescaling(model, include=["2"]).weights == [model[2].weight]
    with pytest.raises(UserError, match="nothing"):
        WeightRescaling(model, include=["nothing*"])


def test_a_shared_weight_is_rescaled_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert len(WeightRescaling(nn.Sequential(first, second)).weights) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_it_follows_every_step(wrapped: bool) -> None:
    model, reference = mlp(), mlp()
    base = torch.optim.SGD(model.parameters(), lr=50.0)
    plain = torch.optim.SGD(reference.parameters(), lr=50.0)
    optimizer = kronfac.KFAC(model, base) if wrapped else base
    expected = kronfac.KFAC(reference, plain) if wrapped else plain
    WeightRescaling(model).attach(optimizer)
    by_hand = WeightRescaling(reference)
    for number in range(3):
        for net, one in ((model, optimizer), (reference, expected)):
            one.zero_grad()
            loss_of(net, batch(number)).backward()
            one.step()
        by_hand.apply()
        for weight, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(weight, other)
        for weight in weights(model):
            assert weight.norm().item() <= math.sqrt(2 * weight.shape[0]) * (1 + 1e-6)


def test_images_go_on_training() -> None:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = WeightRescaling(model).attach(optimizer)
    loss_of(model, images()).backward()
    optimizer.step()
    handle.remove()
    assert all(torch.isfinite(p).all() for p in model.parameters())
