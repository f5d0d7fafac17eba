"""Copies: of a model alone they are inert, of a model and its optimizer they go on by themselves."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

import kronfac
from tests.training import (
    applied,
    assert_same,
    batch,
    counts,
    hooks,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    snapshot,
    step,
    train,
)

Both = tuple[nn.Sequential, kronfac.KFAC]
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


def running(**options: Any) -> Both:
    """A run that stands in the middle of a refresh interval."""
    model = mlp()
    options = {"refresh_every": 3, "momentum": 0.5} | options
    optimizer = kfac(model, AdamW(model.parameters(), lr=0.01), **options)
    train(model, optimizer, range(2))
    return model, optimizer


# --- a model with its optimizer --------------------------------------------------------------


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copied_run_goes_on_bit_for_bit(duplicate: str) -> None:
    model, optimizer = running()
    other, copied = COPIES[duplicate]((model, optimizer))
    train(model, optimizer, range(2, 6))
    train(other, copied, range(2, 6))
    assert_same(parameters(other), parameters(model))


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copied_optimizer_watches_the_copied_model(duplicate: str) -> None:
    other, copied = COPIES[duplicate](running())
    assert copied.model is other
    assert copied.param_groups[0]["params"][0] is other[0].weight


def test_a_copied_run_does_not_touch_the_original() -> None:
    model, optimizer = running()
    before = snapshot(optimizer)
    train(*copy.deepcopy((model, optimizer)), range(2, 4))
    assert_same(optimizer.state_dict(), before)


def test_a_copy_keeps_options_and_schedules() -> None:
    _, copied = copy.deepcopy(running(decay=0.5, damping=lambda t: 0.2, rescale="unit"))
    assert copied.decay == 0.5
    assert copied.damping(0) == 0.2
    assert copied._preconditioner.options.rescale == "unit"


def test_a_copy_keeps_its_gradient_scaler() -> None:
    _, copied = copy.deepcopy(running(grad_scaler=torch.amp.GradScaler("cpu")))
    assert isinstance(copied.grad_scaler, torch.amp.GradScaler)


def test_copies_of_copies_gather_no_hooks() -> None:
    model, optimizer = running()
    expected = hooks(model)
    for _ in range(3):
        model, optimizer = copy.deepcopy((model, optimizer))
    assert hooks(model) == expected


def test_a_copy_can_be_detached() -> None:
    other, copied = copy.deepcopy(running())
    copied.detach()
    assert hooks(other) == 0


def test_a_copy_of_a_detached_optimizer_is_detached() -> None:
    model, optimizer = running()
    optimizer.detach()
    other, copied = copy.deepcopy((model, optimizer))
    before, after = applied(other, copied, batch())
    assert_same(before, after)


def test_a_run_is_saved_whole_and_loaded_whole() -> None:
    model, optimizer = running()
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    other, copied = torch.load(file, weights_only=False)
    train(model, optimizer, range(2, 4))
    train(other, copied, range(2, 4))
    assert_same(parameters(other), parameters(model))


# --- a model alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copied_model_observes_nothing(duplicate: str) -> None:
    model, optimizer = running()
    teacher = COPIES[duplicate](model)
    loss_of(teacher, batch(7)).backward()
    assert all(state.pending.empty for state in layers(optimizer).values())


def test_an_averaged_model_observes_nothing() -> None:
    model = mlp()
    optimizer = kfac(model)
    teacher = AveragedModel(model)
    for number in range(2):
        optimizer.zero_grad()
        teacher(batch(number)[0])
        loss_of(model, batch(number)).backward()
        optimizer.step()
        teacher.update_parameters(model)
    assert counts(optimizer, "A")["0"] == 8 + 0.95 * 8


def test_a_copied_model_can_have_an_optimizer_of_its_own() -> None:
    model = mlp()
    kfac(model)
    other, alone = copy.deepcopy(model), mlp()
    train(other, kfac(other), range(3))
    train(alone, kfac(alone), range(3))
    assert_same(parameters(other), parameters(alone))


def test_a_watched_models_state_dict_is_its_own() -> None:
    model = mlp()
    names = list(model.state_dict())
    kfac(model)
    assert list(model.state_dict()) == names


def test_a_copy_made_between_forward_and_backward_leaves_the_step_alone() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    loss = loss_of(model, batch())
    copy.deepcopy(model)
    loss.backward()
    optimizer.step()
    step(twin, reference, batch())
    assert_same(parameters(model), parameters(twin))
