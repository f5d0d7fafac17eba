"""`torch.distributed.checkpoint` in one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import SGD, AdamW, Optimizer

import kronfac
from tests.training import assert_same, kfac, mlp, parameters, snapshot, train


def build(base: str, **options: Any) -> tuple[nn.Sequential, kronfac.KFAC]:
    model = mlp()
    own = model.parameters()
    bases: dict[str, Optimizer] = {
        "sgd": SGD(own, lr=0.1),
        "momentum": SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adamw": AdamW(model.parameters(), lr=0.01),
    }
    options = {"refresh_every": 3, "momentum": 0.5} | options
    return model, kfac(model, bases[base], **options)


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw"])
def test_getting_and_setting_a_state_dict_resumes_bit_for_bit(base: str) -> None:
    model, optimizer = build(base)
    train(model, optimizer, range(4))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = build(base)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state)
    train(model, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert_same(parameters(other), parameters(model))


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw"])
def test_getting_a_state_dict_in_the_middle_changes_nothing(base: str) -> None:
    model, optimizer = build(base)
    train(model, optimizer, range(4))
    optimizer.zero_grad()
    before, weights = snapshot(optimizer), parameters(model)
    get_optimizer_state_dict(model, optimizer)
    assert_same(optimizer.state_dict(), before)
    assert_same(parameters(model), weights)


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw"])
def test_getting_a_state_dict_before_training_changes_no_parameter(base: str) -> None:
    model, optimizer = build(base)
    weights = parameters(model)
    get_optimizer_state_dict(model, optimizer)
    assert_same(parameters(model), weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("base", ["momentum", "adamw"])
def test_saving_to_files_and_loading_resumes_bit_for_bit(base: str, tmp_path: Path) -> None:
    model, optimizer = build(base)
    train(model, optimizer, range(4))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)

    other, resumed = build(base)
    weights, state = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert_same(parameters(other), parameters(model))


def test_a_flattened_state_dict_is_ours_as_well() -> None:
    # Unflattening asks for the keys of `optimizer.state[parameter]`.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build("adamw")
    train(model, optimizer, range(4))
    state = get_optimizer_state_dict(model, optimizer, options=options)
    other, resumed = build("adamw")
    other.load_state_dict(model.state_dict())
    get_optimizer_state_dict(other, resumed, options=options)  # as loaders do
    set_optimizer_state_dict(other, resumed, copy.deepcopy(state), options=options)
    train(model, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert_same(parameters(other), parameters(model))
