"""DeepSpeed and its like are refused in one sentence. Stand-ins have its module names."""

from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.optim import SGD, Optimizer

import kronfac
from tests.training import batch, kfac, mlp, step, train


class Engine(nn.Module):
    """What ``deepspeed.initialize`` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.module = mlp()


class FusedAdam(SGD):
    """An optimizer that DeepSpeed brings along."""


Engine.__module__ = "deepspeed.runtime.engine"
FusedAdam.__module__ = "deepspeed.ops.adam.fused_adam"


def flatten(optimizer: Optimizer) -> None:
    """Do to an optimizer what DeepSpeed's optimizers do: one flat tensor per group."""
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().flatten() for p in group["params"]])
        group["params"] = [nn.Parameter(flat)]


def one_sentence(caught: Any) -> bool:
    message = str(caught.value)
    return "DeepSpeed" in message and message.count(". ") == 0 and message.endswith(".")


def test_an_engine_as_the_model_is_refused() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="the model is a Engine of DeepSpeed") as caught:
        kronfac.KFAC(engine, SGD(engine.parameters(), lr=0.1))
    assert one_sentence(caught)


def test_an_optimizer_of_deepspeed_as_the_base_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="base optimizer is a FusedAdam of DeepSpeed") as caught:
        kronfac.KFAC(model, FusedAdam(model.parameters(), lr=0.1))
    assert one_sentence(caught)


@pytest.mark.parametrize("steps", [0, 2])
def test_flattened_parameter_groups_are_refused_at_the_next_factor_step(steps: int) -> None:
    model = mlp()
    optimizer = kfac(model)
    train(model, optimizer, range(steps))
    flatten(optimizer)
    with pytest.raises(RuntimeError, match="'0' is no longer in param_groups") as caught:
        step(model, optimizer, batch())
    assert one_sentence(caught)


def test_a_group_that_the_user_freezes_may_leave() -> None:
    model = mlp()
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2], model[4])]
    optimizer = kfac(model, SGD(groups, lr=0.1))
    train(model, optimizer, range(2))
    model[0].requires_grad_(False)
    del optimizer.param_groups[0]
    train(model, optimizer, range(2))
    assert optimizer.stats()["steps"] == 4


def test_a_model_emptied_after_the_optimizer_was_made_is_refused() -> None:
    with torch.device("meta"):
        model = mlp()
    optimizer = kfac(model)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="build the optimizer after that"):
        step(model, optimizer, batch())


def test_a_weight_that_is_pruned_later_is_still_the_same_tensor() -> None:
    model = mlp()
    optimizer = kfac(model, on_missing="ignore")
    train(model, optimizer, range(2))
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=1)
    train(model, optimizer, range(2))
    assert optimizer.stats()["steps"] == 4
