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


# --- forwards without a backward -------------------------------------------------------------


@pytest.mark.parametrize("options", [{"fisher": "mc"}, {"sharing": "reduce"}, {}], ids=str)
def test_zero_grad_frees_all_forwards_but_the_newest(options: dict[str, str]) -> None:
    model = mlp()
    optimizer = kfac(model, **options)
    freed: list[int] = []
    for number in range(5):
        x = batch(number)[0].clone()  # the graph of its forward keeps it
        weakref.finalize(x, freed.append, number)
        model(x)
        del x
        optimizer.zero_grad()
    gc.collect()
    assert len(freed) >= 4
    held = [len(state.pending.held_inputs) for state in layers(optimizer).values()]
    assert max(held) <= 1


def test_the_newest_forward_survives_zero_grad() -> None:
    """Loops call it between forward and backward."""

    def gradients_of(early: bool) -> dict[str, Tensor]:
        model = mlp()
        optimizer = kfac(model, fisher="mc", sharing="reduce")
        if early:
            optimizer.zero_grad()
        out = model(batch()[0])
        if not early:
            optimizer.zero_grad()
        optimizer.observe(out, generator=torch.Generator().manual_seed(0))
        nn.functional.cross_entropy(out, batch()[1]).backward()
        optimizer.step()
        return parameters(model)

    assert_close(gradients_of(early=True), gradients_of(early=False))


def test_inputs_of_forwards_without_a_backward_count_whether_they_are_held_or_not() -> None:
    """Pending inputs stay, as the conventions say; only their memory goes."""

    def statistics(clears: bool) -> Tensor:
        model = mlp()
        optimizer = kfac(model, sharing="reduce")
        for number in range(3):
            model(batch(number)[0])
            if clears:
                optimizer.zero_grad()
        step(model, optimizer, batch(4))
        running = next(iter(layers(optimizer).values())).running["A"]
        assert running.sum is not None
        return running.sum

    assert_close(statistics(clears=True), statistics(clears=False))
