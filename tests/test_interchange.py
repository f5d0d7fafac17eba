"""Checkpoints are matched by parameter names: order and wrappers do no harm, mismatches are named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.training import (
    assert_same,
    batch,
    kfac,
    layers,
    mlp,
    parameters,
    saved_and_loaded,
    step,
    train,
)


class Wrapper(nn.Module):
    """What DistributedDataParallel does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "module": Wrapper,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "module-compiled": lambda model: Wrapper(torch.compile(model, backend="eager")),
}


def optimizer_of(model: nn.Module, reverse: bool = False) -> kronfac.KFAC:
    own = list(model.parameters())
    base = SGD(own[::-1] if reverse else own, lr=0.1, momentum=0.9)
    return kfac(model, base, momentum=0.5)


def assert_continues(net: nn.Sequential, optimizer: kronfac.KFAC) -> None:
    """Load what a plain run saved into `optimizer`, and end as the plain run does."""
    plain = mlp()
    reference = optimizer_of(plain)
    train(plain, reference, range(2))
    net.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(saved_and_loaded(reference.state_dict()))
    train(plain, reference, range(2, 4))
    train(net, optimizer, range(2, 4))
    assert_same(parameters(net), parameters(plain))


# --- wrappers --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_have_plain_names(wrapper: str) -> None:
    assert set(layers(optimizer_of(WRAPPERS[wrapper](mlp())))) == {"0", "2", "4"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_plain_checkpoint_loads_into_a_wrapped_model(wrapper: str) -> None:
    net = mlp()
    assert_continues(net, optimizer_of(WRAPPERS[wrapper](net)))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_models_checkpoint_loads_into_a_plain_one(wrapper: str) -> None:
    net, plain = mlp(), mlp()
    optimizer, reference = optimizer_of(WRAPPERS[wrapper](net)), optimizer_of(plain)
    train(net, optimizer, range(2))
    reference.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert_same(reference.state_dict(), optimizer.state_dict())


def test_names_that_only_look_wrapped_are_kept_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.module = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x * self.weight)

    model = Scaled()
    optimizer = kfac(model)
    step(model, optimizer, batch())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.stats()["without_solution"] == []


# --- order -----------------------------------------------------------------------------------


def test_another_order_of_parameters_is_matched_by_name() -> None:
    net = mlp()
    assert_continues(net, optimizer_of(net, reverse=True))


def test_another_order_leaves_the_base_optimizers_own_names_in_order() -> None:
    net, other = mlp(), mlp()
    saved = kfac(net, SGD(net.named_parameters(), lr=0.1))
    turned = list(other.named_parameters())[::-1]
    optimizer = kfac(other, SGD(turned, lr=0.1))
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in turned]


def test_groups_are_matched_in_their_order() -> None:
    def grouped(model: nn.Sequential, reverse: bool) -> kronfac.KFAC:
        lower, upper = list(model[0].parameters()), list(model[2].parameters())
        lower = lower[::-1] if reverse else lower
        return kfac(model, SGD([{"params": lower}, {"params": upper, "lr": 0.2}], lr=0.1))

    net, other = mlp(), mlp()
    optimizer, loading = grouped(net, False), grouped(other, True)
    step(net, optimizer, batch())
    other.load_state_dict(net.state_dict())
    loading.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    step(net, optimizer, batch(1))
    step(other, loading, batch(1))
    assert_same(parameters(other), parameters(net))


# --- mismatches ------------------------------------------------------------------------------


def named(**sizes: tuple[int, int]) -> nn.Module:
    model = nn.Module()
    for name, (rows, columns) in sizes.items():
        model.add_module(name, nn.Linear(columns, rows, bias=False))
    return model


def load(saved: nn.Module, loading: nn.Module, **options: Any) -> None:
    kfac(loading, **options).load_state_dict(kfac(saved).state_dict())


def test_another_shape_is_named_with_both_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"'head\.weight' is \(3, 4\) in the checkpoint and \(5, 4\) here"
    ):
        load(named(body=(4, 4), head=(3, 4)), named(body=(4, 4), head=(5, 4)))


def test_a_parameter_missing_from_the_checkpoint_is_named() -> None:
    with pytest.raises(ValueError, match=r"'head\.weight' is not in the checkpoint"):
        load(named(body=(4, 4)), named(body=(4, 4), head=(3, 4)))


def test_a_parameter_missing_here_is_named() -> None:
    with pytest.raises(ValueError, match=r"'head\.weight' is not in group 0"):
        load(named(body=(4, 4), head=(3, 4)), named(body=(4, 4)))


def test_another_number_of_groups_is_named() -> None:
    model = mlp()
    split = kfac(model, SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}]))
    with pytest.raises(ValueError, match="has 2 parameter groups, this optimizer has 1"):
        kfac(mlp()).load_state_dict(split.state_dict())


def test_a_refused_checkpoint_changes_nothing() -> None:
    model = mlp()
    optimizer = kfac(model)
    step(model, optimizer, batch())
    before = saved_and_loaded(optimizer.state_dict())
    with pytest.raises(ValueError, match="does not fit this model"):
        optimizer.load_state_dict(kfac(named(body=(4, 4))).state_dict())
    assert_same(saved_and_loaded(optimizer.state_dict()), before)
