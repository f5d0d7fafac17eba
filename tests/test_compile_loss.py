"""A compiled model that computes its loss itself: no gradient of its scores leaves the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import (
    SAMPLES,
    assert_close,
    batch,
    counts,
    factors,
    frozen_kfac,
    gradients,
    mlp,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class OwnLoss(nn.Module):
    """Returns loss and scores, as language models do; a gradient comes to the loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten()), scores


# torch looks at `.grad` of the scores and hides the warning by itself, unless it is an error
LOOKS_AT_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@LOOKS_AT_GRAD
@pytest.mark.parametrize("dynamic", [None, True])
def test_loss_terms_are_counted_if_the_loss_is_in_the_graph_too(dynamic: bool | None) -> None:
    results = []
    for compiled in (False, True):
        model = OwnLoss()
        optimizer = frozen_kfac(model, loss_average="token")
        run: Any = model
        if compiled:
            run = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for samples in (SAMPLES, 5):
            x, _ = batch(samples=samples, shape=(5, 4))
            y = torch.randint(3, (samples, 5), generator=torch.Generator().manual_seed(0))
            y[:3, 2:] = -100
            optimizer.zero_grad()
            for weight in (0.5, 0.5):  # micro-batches have terms of their own
                (weight * run(x, y)[0]).backward()
            optimizer.step()
        expected = 2 * (5 * 5 - 9) + 0.95 * 2 * (SAMPLES * 5 - 9)
        assert counts(optimizer, "G") == {f"net.{n}": pytest.approx(expected) for n in (0, 2, 4)}
        results.append((gradients(model), factors(optimizer, "G")))
    assert_close(*results)


@LOOKS_AT_GRAD
def test_terms_that_cannot_be_counted_in_the_graph_are_an_error() -> None:
    model = OwnLoss()
    optimizer = frozen_kfac(model, loss_average="token", exclude="net.4")
    x, y = batch(shape=(5, 4))
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    run(x, y[:, None].expand(-1, 5))[0].backward()
    with pytest.raises(RuntimeError, match="could not count the loss terms"):
        optimizer.step()
