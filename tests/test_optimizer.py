"""`kronfac.KFAC` is a `torch.optim.Optimizer` to everything that looks at it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import kronfac
from tests.training import (
    applied,
    assert_same,
    batch,
    counts,
    frozen_kfac,
    gradients,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    step,
    train,
)

# --- what torch sees -------------------------------------------------------------------------


def test_it_is_a_torch_optimizer() -> None:
    assert isinstance(kfac(mlp()), Optimizer)


def assert_same_object(optimizer: Optimizer, base: Optimizer, name: str) -> None:
    """Groups and defaults are the same object; state is the same entries, read and written."""
    if name != "state":
        assert getattr(optimizer, name) is getattr(base, name)
        return
    pairs = list(zip(optimizer.state.values(), base.state.values(), strict=True))
    assert all(one is other for one, other in pairs)
    parameter = base.param_groups[0]["params"][0]
    optimizer.state[parameter]["note"] = 1
    assert base.state[parameter].pop("note") == 1


@pytest.mark.parametrize("name", ["param_groups", "state", "defaults"])
def test_groups_state_and_defaults_are_the_base_optimizers(name: str) -> None:
    model = mlp()
    base = AdamW(model.parameters())
    assert_same_object(kfac(model, base), base, name)


@pytest.mark.parametrize("name", ["param_groups", "state"])
def test_groups_and_state_stay_the_base_optimizers_after_loading(name: str) -> None:
    model = mlp()
    base = AdamW(model.parameters())
    optimizer = kfac(model, base)
    step(model, optimizer, batch())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_object(optimizer, base, name)


@pytest.mark.parametrize("base", [SGD, Adam, AdamW, RMSprop, NAdam, Adagrad])
def test_the_base_optimizers_state_never_holds_our_keys(base: type[Optimizer]) -> None:
    model = mlp()
    optimizer = kfac(model, base(model.parameters(), lr=0.01))
    train(model, optimizer, range(2))
    keys = {key for entry in optimizer.state.values() for key in entry}
    assert not {key for key in keys if key.startswith("kronfac")}


@pytest.mark.parametrize("base", [SGD, Adam, AdamW, RMSprop, NAdam, Adagrad])
def test_the_base_optimizer_steps_on_the_preconditioned_gradient(base: type[Optimizer]) -> None:
    model, twin = mlp(), mlp()
    optimizer = kfac(model, base(model.parameters(), lr=0.01))
    reference = base(twin.parameters(), lr=0.01)
    for number in range(3):
        step(model, optimizer, batch(number))
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = parameter.grad.clone()
        reference.step()
    assert_same(parameters(model), parameters(twin))


def test_the_first_step_is_already_preconditioned() -> None:
    model = mlp()
    before, after = applied(model, frozen_kfac(model), batch())
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_nothing_of_a_fused_base_shows_through() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.1, fused=True))
    assert not optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("name", ["_optimizer", "_strategy"])
def test_names_that_trainers_put_on_optimizers_are_free(name: str) -> None:
    assert not hasattr(kfac(mlp()), name)


def test_it_can_be_built_from_named_parameters() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model.named_parameters(), lr=0.1))
    step(model, optimizer, batch())
    assert not optimizer.stats()["without_solution"]


# --- schedulers ------------------------------------------------------------------------------


def test_a_scheduler_moves_the_base_optimizers_rate() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model.parameters(), lr=1.0))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, range(2), scheduler.step)
    assert optimizer.base.param_groups[0]["lr"] == 0.25


def test_one_cycle_finds_the_momentum_that_it_cycles() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert optimizer.base.param_groups[0]["momentum"] == 0.95


def test_a_warm_up_from_zero_is_counted_from_the_first_step() -> None:
    model = mlp()
    optimizer = kfac(model)
    scheduler = LambdaLR(optimizer, lambda t: t / 10)
    train(model, optimizer, range(3), scheduler.step)
    assert optimizer.stats()["steps"] == 3


# --- closures --------------------------------------------------------------------------------


def test_step_returns_the_closures_loss() -> None:
    model = mlp()
    optimizer = kfac(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        return loss

    expected = loss_of(model, batch())
    assert torch.equal(optimizer.step(closure), expected)


def test_a_closure_equals_the_plain_loop() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    numbers = iter(range(3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(next(numbers)))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    train(twin, reference, range(3))
    assert_same(parameters(model), parameters(twin))


def test_a_step_without_a_closure_returns_none() -> None:
    model = mlp()
    optimizer = kfac(model)
    loss_of(model, batch()).backward()
    assert optimizer.step() is None


# --- hooks of users --------------------------------------------------------------------------


def test_step_hooks_fire_around_the_step() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    loss_of(model, batch()).backward()
    raw, seen = gradients(model), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(model)))
    optimizer.register_step_post_hook(lambda *_: seen.append(gradients(model)))
    optimizer.step()
    assert_same(seen[0], raw)
    assert_same(seen[1], gradients(model))


def test_a_state_dict_hook_may_change_what_is_saved() -> None:
    optimizer = kfac(mlp())
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"note": 1})
    assert optimizer.state_dict()["note"] == 1


def test_a_load_hook_sees_the_state_first() -> None:
    optimizer = kfac(mlp())
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [["param_groups", "state"]]


@pytest.mark.parametrize("kind", ["state_dict_pre", "load_state_dict_post"])
def test_other_state_hooks_fire_once(kind: str) -> None:
    optimizer = kfac(mlp())
    calls: list[Any] = []
    getattr(optimizer, f"register_{kind}_hook")(lambda *_: calls.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [1]


# --- groups ----------------------------------------------------------------------------------


def test_add_param_group_goes_to_the_base_optimizer() -> None:
    model = mlp()
    base = SGD(model[0].parameters(), lr=0.1)
    kfac(model, base).add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    assert base.param_groups[1]["lr"] == 0.5


def test_add_param_group_preconditions_its_layers_from_the_next_step_on() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model[0].parameters(), lr=0.1))
    step(model, optimizer, batch())
    optimizer.add_param_group({"params": list(model[2].parameters())})
    step(model, optimizer, batch(1))
    assert counts(optimizer, "A")["2"] == len(batch()[0])


def test_add_param_group_watches_no_layer_twice() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert len(model[0]._forward_hooks) == 1


def test_layers_outside_the_base_optimizer_are_left_alone() -> None:
    model = mlp()
    assert set(layers(kfac(model, SGD(model[0].parameters(), lr=0.1)))) == {"0"}


# --- detach ----------------------------------------------------------------------------------


def test_detach_removes_every_hook() -> None:
    model = mlp()
    kfac(model).detach()
    attributes = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    left = [name for m in model.modules() for name in attributes if getattr(m, name)]
    assert left == []


def test_after_detach_steps_are_the_base_optimizers() -> None:
    model, twin = mlp(), mlp()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer.detach()
    train(model, optimizer, range(3))
    train(twin, SGD(twin.parameters(), lr=0.1, momentum=0.9), range(3))
    assert_same(parameters(model), parameters(twin))


def test_detach_leaves_other_peoples_hooks() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    kfac(model).detach()
    assert len(model[0]._forward_hooks) == 1


def test_a_detached_optimizer_stays_detached_when_groups_are_added() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model[0].parameters(), lr=0.1))
    optimizer.detach()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before, after = applied(model, optimizer, batch())
    assert_same(before, after)


# --- refusals --------------------------------------------------------------------------------


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        kronfac.KFAC([], SGD(mlp().parameters()))  # type: ignore[arg-type]


def test_a_base_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"base_optimizer must be a torch\.optim\.Optimizer"):
        kronfac.KFAC(mlp(), SGD)  # type: ignore[arg-type]


def test_lbfgs_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="LBFGS evaluates the loss inside its step"):
        kfac(model, torch.optim.LBFGS(model.parameters()))


def test_any_base_that_needs_its_closure_is_refused() -> None:
    class Searching(SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    model = mlp()
    with pytest.raises(ValueError, match="Searching evaluates the loss inside its step"):
        kfac(model, Searching(model.parameters()))


def test_data_parallel_is_refused() -> None:
    model = nn.DataParallel(mlp())
    with pytest.raises(ValueError, match="DataParallel copies the model"):
        kfac(model)


# --- looking ---------------------------------------------------------------------------------


def test_stats_are_plain_numbers() -> None:
    model = mlp()
    optimizer = kfac(model, rescale="kl-clip")
    step(model, optimizer, batch())
    plain = [v for v in optimizer.stats().values() if not isinstance(v, dict | list)]
    assert {type(value) for value in plain} == {int, float}


def test_timed_names_the_phases_of_the_steps_inside() -> None:
    model = mlp()
    optimizer = kfac(model)
    with optimizer.timed() as seconds:
        step(model, optimizer, batch())
    phases = {"reduce", "refresh", "precondition", "rescale", "base"}
    assert phases | {"observe-input", "observe-output"} == set(seconds)


def test_training_lowers_the_loss_faster_than_the_base_alone() -> None:
    model, twin = mlp(), mlp()
    data = batch()
    optimizer, reference = kfac(model, damping=1e-2), SGD(twin.parameters(), lr=0.1)
    for _ in range(10):
        step(model, optimizer, data)
        step(twin, reference, data)
    assert loss_of(model, data) < loss_of(twin, data)


def test_two_models_in_one_process_do_not_meet() -> None:
    one, two, alone = mlp(1), mlp(2), mlp(1)
    first, second, reference = kfac(one), kfac(two), kfac(alone)
    for number in range(3):
        first.zero_grad()
        second.zero_grad()
        losses = loss_of(one, batch(number)), loss_of(two, batch(number + 9))
        sum(losses).backward()
        first.step()
        second.step()
    train(alone, reference, range(3))
    assert_same(parameters(one), parameters(alone))


def test_two_optimizers_may_share_a_model() -> None:
    model, twin = mlp(), mlp()
    lower = kfac(model, SGD(model[0].parameters(), lr=0.1))
    upper = kfac(model, SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1))
    for number in range(3):
        lower.zero_grad()
        upper.zero_grad()
        loss_of(model, batch(number)).backward()
        lower.step()
        upper.step()
    train(twin, kfac(twin), range(3))
    assert_same(parameters(model), parameters(twin))
