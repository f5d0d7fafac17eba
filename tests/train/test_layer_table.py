"""The ``layers`` event says of every parameter what the optimizer's summary says."""

import torch
from torch import nn

import kronfac
from kronfac.train.record.layer_table import describe_layers


def build(**options: object) -> kronfac.KFAC:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    return kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_frozen_layers_are_left_out_with_a_reason():
    found = describe_layers(build(), {"2": {"refresh": 0.5}})
    assert [row["name"] for row in found["layers"]] == ["2"]
    assert found["layers"][0]["ranks"] == "0"
    assert found["layers"][0]["seconds"] == {"refresh": 0.5}
    assert found["skipped"] == [
        {"name": "0.weight", "why": "frozen"},
        {"name": "0.bias", "why": "its weight is frozen"},
    ]


def test_the_summary_gives_the_same_reasons():
    optimizer = build()
    for name, (_, reason) in optimizer.left_out().items():
        assert f"{reason}:\n    {name}" in optimizer.summary()


def test_values_of_schedules_are_those_of_this_step():
    optimizer = build(damping=lambda step: 1.0 / (1 + step), refresh_every=7, momentum=0.5)
    assert [optimizer.value_now(n) for n in ("damping", "refresh_every", "momentum")] == [1, 7, 0.5]
    loss = optimizer.model(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    assert optimizer.value_now("damping") == 0.5


def test_it_is_known_whether_observe_has_to_be_called():
    assert not build().needs_observe
    assert build(fisher="mc").needs_observe
    assert build(rescale="quadratic").needs_observe
