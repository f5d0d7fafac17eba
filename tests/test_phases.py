"""Seconds of phases, and of single layers in them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kronfac
from kronfac.state.timing import Phases, Seconds
from tests.training import batch, cnn, images, kfac, layers, mlp, step

PHASES = {"observe-input", "observe-output", "refresh", "precondition"}


def twins() -> nn.Sequential:
    """Two layers of equal shape, which are preconditioned together, and one of another."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def assert_layers_are_whole(seconds: Seconds, optimizer: kronfac.KFAC) -> None:
    assert set(seconds.layers) == set(layers(optimizer))
    assert all(set(own) == PHASES for own in seconds.layers.values())
    assert_within_phases(seconds)


def assert_within_phases(seconds: Seconds) -> None:
    for phase in PHASES:
        spent = sum(own.get(phase, 0.0) for own in seconds.layers.values())
        assert 0 < spent <= seconds[phase] * (1 + 1e-9)  # sums may differ in the last digits


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"sharing": "reduce"}], ids=str)
def test_every_layer_has_its_part_of_the_phases(options: dict[str, object]) -> None:
    model = cnn()
    optimizer = kfac(model, **options)
    with optimizer.timed() as seconds:
        for number in range(3):
            step(model, optimizer, images(number))
    assert_layers_are_whole(seconds, optimizer)


def test_a_batch_is_divided_evenly_among_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronfac.state.timing._now", itertools.count().__next__)  # all work takes 1
    model = twins()
    optimizer = kfac(model)
    with optimizer.timed() as seconds:
        step(model, optimizer, batch())
    assert_layers_are_whole(seconds, optimizer)
    spent = {name: own["precondition"] for name, own in seconds.layers.items()}
    # 1 for the gradients of all three, and 1 for each product.
    assert spent == pytest.approx({"0": 1 / 3 + 1 / 2, "2": 1 / 3 + 1 / 2, "4": 1 / 3 + 1})


def test_observing_by_sampled_labels_is_timed_by_layer() -> None:
    model = mlp()
    optimizer = kfac(model, fisher="mc")
    with optimizer.timed() as seconds:
        outputs = model(batch()[0])
        optimizer.observe(outputs)
        F.cross_entropy(outputs, batch()[1]).backward()
        optimizer.step()
    assert_layers_are_whole(seconds, optimizer)


def test_nothing_is_timed_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> float:
        raise AssertionError("a clock was read, which waits for a GPU")

    monkeypatch.setattr("kronfac.state.timing._now", refuse)
    model = twins()
    optimizer = kfac(model)
    step(model, optimizer, batch())
    assert optimizer.stats()["refreshes"] == 3


def test_a_part_that_raises_is_counted() -> None:
    phases = Phases()
    with phases.timed() as seconds:
        with pytest.raises(ValueError, match="inside"), phases("refresh", "a"):
            raise ValueError("inside")
        with pytest.raises(ValueError, match="inside"), phases.part("precondition", "a", "b"):
            raise ValueError("inside")
    assert set(seconds.layers["a"]) == {"refresh", "precondition"}
    assert set(seconds.layers["b"]) == {"precondition"}
