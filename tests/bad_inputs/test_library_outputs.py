"""Outputs with more than one loss term per sample: the summary doubts a mean over samples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import hooks, kfac, mlp


@pytest.mark.parametrize(
    ("shape", "options", "remarked"),
    [
        ((8, 5, 4), {}, True),
        ((8, 4), {}, False),
        ((8, 5, 4), {"loss_average": "token"}, False),
        ((8, 5, 4), {"loss_average": None}, False),
        ((8, 5, 4), {"fisher": "forward"}, False),
    ],
    ids=str,
)
def test_the_summary_doubts_a_mean_over_samples(
    shape: tuple[int, ...], options: dict[str, Any], remarked: bool
) -> None:
    model = mlp()
    optimizer = kfac(model, **options)
    model(torch.randn(shape))
    assert ("Outputs have 3 dimensions" in optimizer.summary()) == remarked


def test_a_model_that_pools_its_positions_is_not_doubted() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).mean(1)

    model = Pooled()
    optimizer = kfac(model)
    model(torch.randn(8, 5, 4))
    assert "dimensions" not in optimizer.summary()


def test_nothing_is_left_on_the_model_after_detach() -> None:
    model = mlp()
    kfac(model).detach()
    assert hooks(model) == 0
