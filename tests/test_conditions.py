"""Training loops and models as people write them: each gives what the plain loop would give."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.training import (
    applied,
    assert_close,
    assert_same,
    batch,
    cnn,
    counts,
    differs,
    factors,
    frozen_kfac,
    gradients,
    images,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    step,
    train,
)

pytestmark = pytest.mark.usefixtures("double_precision")


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 4), (5, 3)])
def test_accumulated_micro_batches_equal_one_batch(sizes: tuple[int, ...], sharing: str) -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model, sharing=sharing), kfac(twin, sharing=sharing)
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        for inputs, labels in zip(x.split(sizes), y.split(sizes), strict=True):
            (loss_of(model, (inputs, labels)) * len(inputs) / len(x)).backward()
        optimizer.step()
        step(twin, reference, (x, y))
    assert_close(parameters(model), parameters(twin))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_several_forwards_before_one_backward_equal_one_batch(sharing: str) -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model, sharing=sharing), kfac(twin, sharing=sharing)
    x, y = batch()
    losses = [loss_of(model, (x[:4], y[:4])), loss_of(model, (x[4:], y[4:]))]
    (sum(losses) / 2).backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_close(parameters(model), parameters(twin))


def test_an_uneven_last_batch_counts_by_its_samples() -> None:
    model = mlp()
    optimizer = kfac(model, decay=1.0)
    step(model, optimizer, batch(0))
    step(model, optimizer, batch(1, samples=3))
    assert counts(optimizer, "A") == counts(optimizer, "G") == {"0": 11, "2": 11, "4": 11}


def test_a_lone_vector_is_a_batch_of_one() -> None:
    x, y = batch(samples=1)
    model, twin = mlp(), mlp()
    step(model, kfac(model), (x[0], y[0]))
    step(twin, kfac(twin), (x, y))
    assert_close(parameters(model), parameters(twin))


def test_a_vector_of_scalar_samples_counts_them() -> None:
    class Curve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, times: Tensor) -> Tensor:
            return self.layer(times.unsqueeze(-1))

    model = Curve()
    optimizer = kfac(model)
    model(torch.linspace(0, 1, 6)).square().mean().backward()
    optimizer.step()
    assert counts(optimizer, "G") == {"layer": 6}


# --- how a model is called -------------------------------------------------------------------


class ByKeyword(nn.Module):
    """Takes its inputs in several ways; the batch is not the first thing it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, flag: bool = False, *, inputs: Any) -> Tensor:
        x = inputs["x"] if isinstance(inputs, dict) else inputs
        return self.net[4](input=self.net[:4](x))


@pytest.mark.parametrize("kind", ["tensor", "dict", "after-a-flag"])
def test_keyword_and_dict_inputs_equal_positional_ones(kind: str) -> None:
    model, twin = ByKeyword(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    x, y = batch()
    if kind == "tensor":
        outputs = model(inputs=x)
    elif kind == "dict":
        outputs = model(inputs={"name": "a batch", "x": x})
    else:
        outputs = model(True, inputs=x)
    F.cross_entropy(outputs, y).backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_same(parameters(model.net), parameters(twin))


def test_submodules_called_without_the_root_forward_equal_the_root_forward() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        for inputs, labels in zip(x.split(4), y.split(4), strict=True):
            outputs = inputs
            for module in model:
                outputs = module(outputs)
            (F.cross_entropy(outputs, labels) / 2).backward()
        optimizer.step()
        step(twin, reference, (x, y))
    assert_close(parameters(model), parameters(twin))


def test_a_head_called_beside_the_root_forward_equals_one_forward() -> None:
    class Split(nn.Module):
        def __init__(self, net: nn.Sequential) -> None:
            super().__init__()
            self.body, self.head = net[:4], net[4]

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    net, twin = mlp(), mlp()
    model = Split(net)
    optimizer, reference = kfac(model), kfac(twin)
    x, y = batch()
    F.cross_entropy(model.head(model(x)), y).backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_close(parameters(net), parameters(twin))


def test_a_model_may_be_one_layer() -> None:
    model = nn.Linear(4, 3)
    optimizer = kfac(model)
    step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == []


def test_a_forward_that_raises_does_not_disturb_the_next() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, broken: bool = False) -> Tensor:
            if broken:
                raise ValueError("broken")
            return self.net(x)

    model, twin = Fragile(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    with pytest.raises(ValueError, match="broken"):
        model(batch()[0], broken=True)
    step(model, optimizer, batch())
    step(twin, reference, batch())
    assert_same(parameters(model.net), parameters(twin))


def test_a_pre_hook_of_the_user_that_raises_does_not_disturb_the_next_forward() -> None:
    def broken(*_: Any) -> None:
        raise ValueError("broken")

    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 3))  # N is 4, the layer sees 8 rows
    handle = model.register_forward_pre_hook(broken)
    optimizer = kfac(model)
    x, y = torch.randn(4, 2, 4), torch.randint(3, (8,))
    with pytest.raises(ValueError, match="broken"):
        model(x)
    handle.remove()
    step(model, optimizer, (x, y))
    assert counts(optimizer, "G") == {"1": 4}


# --- layers ----------------------------------------------------------------------------------


def test_in_place_activations_equal_ordinary_ones() -> None:
    model, twin = cnn(), cnn()
    for index in (1, 3):
        twin[index] = nn.ReLU()
    optimizer, reference = kfac(model), kfac(twin)
    for number in range(2):
        step(model, optimizer, images(number))
        step(twin, reference, images(number))
    assert_same(parameters(model), parameters(twin))


def test_an_in_place_activation_after_a_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    optimizer = kfac(model)
    step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == []


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_channels_last_equals_contiguous(solver: str) -> None:
    model, twin = cnn().to(memory_format=torch.channels_last), cnn()
    optimizer, reference = kfac(model, solver=solver), kfac(twin, solver=solver)
    for number in range(2):
        x, y = images(number)
        step(model, optimizer, (x.to(memory_format=torch.channels_last), y))
        step(twin, reference, (x, y))
    assert_close(parameters(model), parameters(twin))


def test_gradients_are_rewritten_in_place() -> None:
    model = cnn()
    optimizer = kfac(model)
    loss_of(model, images()).backward()
    before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
    optimizer.step()
    assert [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()] == before


def test_gradients_keep_their_memory_layout() -> None:
    model = cnn().to(memory_format=torch.channels_last)
    optimizer = kfac(model)
    loss_of(model, images()).backward()
    before = [p.grad.stride() for p in model.parameters()]
    optimizer.step()
    assert [p.grad.stride() for p in model.parameters()] == before


# --- frozen and unused parameters ------------------------------------------------------------


def test_a_frozen_weight_leaves_the_bias_gradient_raw() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    before, after = applied(model, frozen_kfac(model), batch())
    assert torch.equal(before["0.bias"], after["0.bias"])


def test_a_frozen_bias_equals_no_bias() -> None:
    model, twin = mlp(), mlp()
    model[0].bias.requires_grad_(False)
    twin[0].bias = None
    with torch.no_grad():
        model[0].bias.zero_()
    optimizer, reference = kfac(model), kfac(twin)
    for number in range(2):
        step(model, optimizer, batch(number))
        step(twin, reference, batch(number))
    assert_close(parameters(model)["0.weight"], parameters(twin)["0.weight"])


def test_freezing_in_the_middle_stops_the_layer_alone() -> None:
    model = mlp()
    optimizer = kfac(model)
    step(model, optimizer, batch(0))
    model[0].requires_grad_(False)
    before = parameters(model)
    step(model, optimizer, batch(1))
    moved = {name for name, value in parameters(model).items() if not value.equal(before[name])}
    assert moved == {"2.weight", "2.bias", "4.weight", "4.bias"}


def test_a_layer_frozen_from_the_start_joins_when_it_is_unfrozen() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = kfac(model)
    step(model, optimizer, batch(0))
    model[0].requires_grad_(True)
    before, after = applied(model, optimizer, batch(1))
    assert not torch.equal(before["0.weight"], after["0.weight"])


def test_a_bias_unfrozen_in_the_middle_joins_its_layer() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = kfac(model)
    step(model, optimizer, batch(0))
    model[0].bias.requires_grad_(True)
    before, after = applied(model, optimizer, batch(1))
    assert not torch.equal(before["0.bias"], after["0.bias"])


def test_a_bias_unfrozen_between_factor_steps_passes_raw_until_the_next() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = frozen_kfac(model, factor_every=5, refresh_every=5)
    step(model, optimizer, batch(0))
    model[0].bias.requires_grad_(True)
    before, after = applied(model, optimizer, batch(1))
    assert torch.equal(before["0.bias"], after["0.bias"])
    assert optimizer.stats()["without_solution"] == ["0"]


class Branches(nn.Module):
    """Two branches of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.use_left = True

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if self.use_left else self.right(x)


def test_a_branch_that_is_not_used_is_left_alone() -> None:
    model = Branches()
    optimizer = kfac(model, AdamW(model.parameters(), lr=0.01))
    step(model, optimizer, batch(0))
    model.use_left = False
    before = parameters(model)
    step(model, optimizer, batch(1))
    assert_same(parameters(model.left), {n: before[f"left.{n}"] for n in ("weight", "bias")})


def test_a_branch_that_is_not_used_only_fades() -> None:
    model = Branches()
    optimizer = kfac(model, decay=0.5)
    step(model, optimizer, batch(0))
    mean = factors(optimizer, "G")["left"]
    model.use_left = False
    step(model, optimizer, batch(1))
    assert counts(optimizer, "G")["left"] == 4
    assert_close(factors(optimizer, "G")["left"], mean)


def test_an_unused_branch_whose_gradient_was_zeroed_in_place_is_no_cause_for_a_warning() -> None:
    model = Branches()
    optimizer = kfac(model)
    step(model, optimizer, batch(0))
    model.use_left = False
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, batch(1)).backward()
    optimizer.step()
    assert counts(optimizer, "G")["right"] == 8


def test_the_base_optimizers_weight_decay_is_not_preconditioned() -> None:
    model, twin = mlp(), mlp()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    reference = kfac(twin, SGD(twin.parameters(), lr=0.1))
    decayed = {name: value * (1 - 0.1 * 0.5) for name, value in parameters(twin).items()}
    start = parameters(twin)
    step(model, optimizer, batch())
    step(twin, reference, batch())
    expected = {n: decayed[n] + value - start[n] for n, value in parameters(twin).items()}
    assert_close(parameters(model), expected)


# --- backward passes -------------------------------------------------------------------------


def test_two_losses_over_one_forward_are_two_backward_passes() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    x, y = batch()
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    outputs.square().mean().backward()
    optimizer.step()

    one, other = mlp(), mlp()
    first, second = frozen_kfac(one), frozen_kfac(other)
    step(one, first, (x, y))
    other(x).square().mean().backward()
    second.step()
    expected = {n: g + factors(second, "G")[n] for n, g in factors(first, "G").items()}
    assert_close(factors(optimizer, "G"), expected)


def test_a_gradient_penalty_outside_capture_leaves_statistics_of_the_loss_alone() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    x, y = batch()
    with optimizer.no_capture():
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        slope.square().mean().backward()
    loss_of(model, (x, y)).backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


def test_double_backward_through_watched_layers_equals_plain_gradients() -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model)

    def penalty(net: nn.Module) -> Tensor:
        inputs = batch()[0].requires_grad_()
        outputs = net(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch()[1]) + slope.square().mean()

    penalty(model).backward()
    penalty(twin).backward()
    assert_same(gradients(model), gradients(twin))
    optimizer.step()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# --- zero_grad -------------------------------------------------------------------------------


def test_zero_grad_between_forward_and_backward_changes_nothing() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    for number in range(3):
        loss = loss_of(model, batch(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train(twin, reference, range(3))
    assert_same(parameters(model), parameters(twin))


def test_a_backward_that_is_thrown_away_leaves_its_inputs_only() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    loss_of(model, batch(0)).backward()
    step(model, optimizer, batch(1))
    step(twin, reference, batch(1))
    assert_same(factors(optimizer, "G"), factors(reference, "G"))
    assert counts(optimizer, "A") == {"0": 16, "2": 16, "4": 16}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_models_own_zero_grad_is_noticed(sharing: str) -> None:
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, sharing=sharing)
    reference = frozen_kfac(twin, sharing=sharing)
    loss_of(model, batch(0)).backward()
    model.zero_grad()
    loss_of(model, batch(1)).backward()
    optimizer.step()
    step(twin, reference, batch(1))
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


def test_gradients_that_are_not_cleared_go_on_accumulating() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    for number in range(2):
        loss_of(model, batch(number)).backward()
    optimizer.step()
    assert counts(optimizer, "G") == {"0": 16, "2": 16, "4": 16}


# --- passes that do not count ----------------------------------------------------------------


def pending(optimizer: Any) -> bool:
    return any(not state.pending.empty for state in layers(optimizer).values())


def test_an_evaluation_forward_observes_nothing() -> None:
    model = mlp()
    optimizer = kfac(model)
    model.eval()
    loss_of(model, batch()).backward()
    assert not pending(optimizer)


def test_a_forward_without_gradients_observes_nothing() -> None:
    model = mlp()
    optimizer = kfac(model)
    with torch.no_grad():
        model(batch()[0])
    with torch.inference_mode():
        model(batch()[0])
    assert not pending(optimizer)


def test_no_capture_observes_nothing_in_either_direction() -> None:
    model = mlp()
    optimizer = kfac(model)
    with optimizer.no_capture():
        loss_of(model, batch()).backward()
    assert not pending(optimizer)


def test_a_backward_inside_no_capture_observes_no_output_gradient() -> None:
    model = mlp()
    optimizer = kfac(model)
    loss = loss_of(model, batch())
    with optimizer.no_capture():
        loss.backward()
    assert not any(state.pending.has_outputs for state in layers(optimizer).values())


def test_no_capture_ends_with_an_exception() -> None:
    model = mlp()
    optimizer = kfac(model)
    with pytest.raises(KeyError), optimizer.no_capture():
        raise KeyError
    loss_of(model, batch()).backward()
    assert pending(optimizer)


def test_no_capture_may_be_nested() -> None:
    model = mlp()
    optimizer = kfac(model)
    with optimizer.no_capture():
        with optimizer.no_capture():
            pass
        loss_of(model, batch()).backward()
    assert not pending(optimizer)


@pytest.mark.parametrize("between", ["eval", "no_grad", "no_capture"])
def test_other_passes_between_forward_and_backward_change_nothing(between: str) -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    for number in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, batch(number))
        if between == "eval":
            model.eval()
            model(batch(9)[0])
            model.train()
        elif between == "no_grad":
            with torch.no_grad():
                model(batch(9)[0])
        else:
            with optimizer.no_capture():
                model(batch(9)[0])
        loss.backward()
        optimizer.step()
        step(twin, reference, batch(number))
    assert_same(parameters(model), parameters(twin))


def test_a_functional_call_with_other_weights_observes_nothing() -> None:
    model = mlp()
    optimizer = kfac(model)
    others = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, others, batch()[0]).sum().backward()
    assert not pending(optimizer)


def test_statistics_are_not_taken_between_factor_steps() -> None:
    model = mlp()
    optimizer = kfac(model, factor_every=5, refresh_every=5)
    step(model, optimizer, batch(0))
    loss_of(model, batch(1)).backward()
    assert not pending(optimizer)


def test_a_preconditioned_step_is_not_the_base_optimizers() -> None:
    model, twin = mlp(), mlp()
    step(model, kfac(model), batch())
    step(twin, SGD(twin.parameters(), lr=0.1), batch())
    assert differs(parameters(model), parameters(twin))
