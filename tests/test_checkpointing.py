"""Activation checkpointing of either kind changes nothing: every pass counts once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training import (
    assert_close,
    assert_same,
    batch,
    counts,
    factors,
    frozen_kfac,
    gradients,
    kfac,
    loss_of,
    mlp,
    parameters,
    step,
)

KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


pytestmark = pytest.mark.usefixtures("double_precision")


class Checkpointed(nn.Module):
    """The multilayer perceptron with its middle, or all of it, in a checkpoint."""

    def __init__(self, reentrant: bool, everything: bool = False) -> None:
        super().__init__()
        self.net = mlp()
        self.reentrant, self.everything = reentrant, everything

    def forward(self, x: Tensor) -> Tensor:
        if self.everything:
            return self._run(self.net, x.requires_grad_())
        return self.net[4](self._run(self.net[2:4], self.net[:2](x)))

    def _run(self, part: nn.Module, x: Tensor) -> Any:
        return checkpoint(part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("everything", [False, True], ids=["middle", "everything"])
@KINDS
def test_checkpointing_equals_no_checkpointing(
    reentrant: bool, everything: bool, sharing: str
) -> None:
    model, twin = Checkpointed(reentrant, everything), mlp()
    optimizer, reference = kfac(model, sharing=sharing), kfac(twin, sharing=sharing)
    for number in range(3):
        step(model, optimizer, batch(number))
        step(twin, reference, batch(number))
    assert_close(parameters(model.net), parameters(twin))


@KINDS
def test_two_forwards_before_one_backward(reentrant: bool) -> None:
    model, twin = Checkpointed(reentrant), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    for net in (model, twin):
        (loss_of(net, batch(0)) + loss_of(net, batch(1, samples=5))).backward()
    optimizer.step()
    reference.step()
    assert_close(gradients(model.net), gradients(twin))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("grad", [True, False], ids=["eval", "no_grad"])
@KINDS
def test_another_forward_between_forward_and_backward(reentrant: bool, grad: bool) -> None:
    model, twin = Checkpointed(reentrant), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    for net in (model, twin):
        loss = loss_of(net, batch(0))
        net.train(not grad)
        with torch.set_grad_enabled(grad):
            net(batch(1)[0])
        net.train()
        loss.backward()
    optimizer.step()
    reference.step()
    assert_close(gradients(model.net), gradients(twin))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@KINDS
def test_a_forward_without_gradients_before_the_step_counts_nothing(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    optimizer = frozen_kfac(model)
    with torch.no_grad():
        model(batch(1)[0])
    step(model, optimizer, batch(0))
    assert counts(optimizer, "A") == {"net.0": 8, "net.2": 8, "net.4": 8}


@KINDS
def test_accumulated_micro_batches(reentrant: bool) -> None:
    model, twin = Checkpointed(reentrant), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    for net in (model, twin):
        for number in range(3):
            (loss_of(net, batch(number)) / 3).backward()
    optimizer.step()
    reference.step()
    assert_close(gradients(model.net), gradients(twin))


@KINDS
def test_a_layer_used_on_both_sides_of_a_checkpoint(reentrant: bool) -> None:
    class Shared(nn.Module):
        def __init__(self, segmented: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
            self.segmented = segmented

        def forward(self, x: Tensor) -> Tensor:
            x = self.shared(x).tanh()
            return self.shared(self._middle(x).tanh())

        def _middle(self, x: Tensor) -> Any:
            if not self.segmented:
                return self.inner(x)
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, twin = Shared(True), Shared(False)
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    step(model, optimizer, batch())
    step(twin, reference, batch())
    assert_close(factors(optimizer, "G"), factors(reference, "G"))


@KINDS
def test_no_capture_around_a_checkpointed_forward_observes_nothing(reentrant: bool) -> None:
    model, twin = Checkpointed(reentrant), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    with optimizer.no_capture():
        extra = loss_of(model, batch(1))
    extra.backward()
    optimizer.zero_grad()
    step(model, optimizer, batch(0))
    step(twin, reference, batch(0))
    assert_same(counts(optimizer, "A"), {f"net.{n}": c for n, c in counts(reference, "A").items()})


def test_sampled_labels_through_a_non_reentrant_checkpoint() -> None:
    model, twin = Checkpointed(reentrant=False), mlp()
    runs = (model, frozen_kfac(model, fisher="exact")), (twin, frozen_kfac(twin, fisher="exact"))
    for net, optimizer in runs:
        x, y = batch()
        outputs = net(x)
        optimizer.observe(outputs)
        nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert_close(gradients(model.net), gradients(twin))
