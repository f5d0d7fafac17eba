"""What an optimizer leaves behind: nothing, when it is detached, dropped or interrupted."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.training import (
    assert_close,
    batch,
    counts,
    hooks,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    step,
)


def test_detach_frees_the_state_of_all_layers() -> None:
    model = mlp()
    optimizer = kfac(model)
    step(model, optimizer, batch())
    state = weakref.ref(next(iter(layers(optimizer).values())))
    optimizer.detach()
    gc.collect()
    assert state() is None


def test_a_backward_after_detach_observes_nothing() -> None:
    model = mlp()
    optimizer = kfac(model)
    loss = loss_of(model, batch())
    optimizer.detach()
    loss.backward()
    optimizer.step()
    assert optimizer.stats()["steps"] == 1


def test_an_optimizer_that_is_dropped_does_not_live_on_in_its_model() -> None:
    model = mlp()
    optimizer = kfac(model)
    step(model, optimizer, batch())
    state = weakref.ref(next(iter(layers(optimizer).values())))
    del optimizer
    gc.collect()
    assert state() is None
    loss_of(model, batch()).backward()


def test_a_new_optimizer_removes_the_hooks_of_one_that_is_gone() -> None:
    model = mlp()
    optimizer = kfac(model)
    number = hooks(model)
    del optimizer
    gc.collect()
    successor = kfac(model)
    assert hooks(model) == number
    assert successor.model is model


def test_an_interrupt_inside_a_forward_does_not_disturb_later_steps() -> None:
    class Interrupted(nn.Module):
        def __init__(self, net: nn.Sequential) -> None:
            super().__init__()
            self.net, self.once = net, True

        def forward(self, x: Tensor) -> Tensor:
            if self.once:
                self.once = False
                raise KeyboardInterrupt
            return self.net(x)

    net, twin = mlp(), mlp()
    model = Interrupted(net)
    optimizer, reference = kfac(model), kfac(twin)
    with pytest.raises(KeyboardInterrupt):
        model(batch()[0])
    for number in range(3):
        step(model, optimizer, batch(number, samples=4 + number))
        step(twin, reference, batch(number, samples=4 + number))
    assert_close(parameters(net), parameters(twin))


def test_an_error_in_a_step_does_not_count_its_batch_twice() -> None:
    model = mlp()
    optimizer = kfac(model, fisher="mc", decay=1.0)
    loss_of(model, batch()).backward()
    with pytest.raises(RuntimeError, match="observed nothing"):
        optimizer.step()
    x, y = batch(1)
    outputs = model(x)
    optimizer.observe(outputs)
    torch.nn.functional.cross_entropy(outputs, y).backward()
    optimizer.step()
    assert set(counts(optimizer, "A").values()) == {float(len(x))}
