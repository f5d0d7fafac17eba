"""K-FAC sees the layers of every model and trains it."""

import pytest
import torch
from torch.nn import functional as F

import kronfac
from kronfac.layers.selection import Selection
from kronfac.train import models

TINY = {
    "mlp": {"hidden": [8]},
    "cnn": {"width": 4},
    "resnet8": {"width": 4},
    "resnet18": {"width": 4},
    "resnet50": {"width": 2},
    "vit": {"patch": 4, "dim": 8, "depth": 2, "heads": 2},
    "gpt": {"dim": 8, "depth": 2, "heads": 2},
}


def task(name):
    torch.manual_seed(0)
    if name == "gpt":
        text = torch.randint(11, (4, 7))
        model = models.build(name, num_classes=11, sample_shape=(6,), **TINY[name])
        return model, text[:, :-1], text[:, 1:]
    model = models.build(name, num_classes=5, sample_shape=(3, 16, 16), **TINY[name])
    return model, torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


@pytest.mark.parametrize("name", TINY)
def test_all_but_loose_parameters_belong_to_layers(name):
    model, _, _ = task(name)
    selection = Selection(model, (), ())
    seen = {p for layer in selection.layers for p in (layer.weight, layer.bias) if p is not None}
    loose = {n for n, p in model.named_parameters() if p not in seen}
    assert loose == ({"class_token", "positions"} if name == "vit" else set())
    assert set(selection.reasons) == loose


@pytest.mark.parametrize("name", TINY)
def test_two_steps_change_every_parameter(name):
    model, inputs, targets = task(name)
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = kronfac.KFAC(model, base, on_missing="raise", factor_every=1, refresh_every=1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert all(p.isfinite().all() for p in after.values())
    assert [n for n, p in after.items() if torch.equal(p, before[n])] == []
