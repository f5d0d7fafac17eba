"""``row_form``: preconditioning from rows gives the product form's numbers, or leaves it to that form."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import kronfac
from kronfac.methods.kfac.block import KFACBlock
from kronfac.step import row_form
from tests.test_syncs import CountWaits
from tests.training import (
    assert_same,
    hooks,
    layers,
    parameters,
    saved_and_loaded,
    snapshot,
)

INPUTS, WIDTH, CLASSES, SAMPLES = 10, 12, 3, 4
#: Those of :class:`Net` that are wider than a batch has rows; its head is not.
WIDE = ("first", "second", "third")
MOMENTA: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}


class Net(nn.Module):
    """Three wide layers, two of equal shape, and a narrow head, on ``[N, d]`` or ``[N, S, d]``."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH, bias)
        self.second = nn.Linear(WIDTH, WIDTH, bias)
        self.third = nn.Linear(WIDTH, WIDTH, bias)
        self.head = nn.Linear(WIDTH, CLASSES, bias)
        #: How the body is checkpointed, if it is.
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        x = self.head(x)
        return x.mean(1) if x.dim() == 3 else x

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.third(self.second(x).relu_()))


def batch(number: int, samples: int = SAMPLES, positions: int | None = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(number)
    shape = (samples, INPUTS) if positions is None else (samples, positions, INPUTS)
    x = torch.randn(*shape, generator=generator)
    return x, torch.randint(CLASSES, (samples,), generator=generator)


def loss_of(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def build(model: nn.Module | None = None, **options: Any) -> Any:
    """An optimizer with two refreshes in the steps of :func:`train`, and one statistic between."""
    torch.manual_seed(0)
    model = Net() if model is None else model
    chosen: dict[str, Any] = {"solver": "cholesky", "damping": 0.1, "rescale": None}
    chosen |= {"factor_every": 2, "refresh_every": 4, **options}
    return kronfac.KFAC(model, SGD(model.parameters(), lr=0.002), **chosen)


#: What a test does between ``zero_grad`` and ``step`` with batch ``number``.
Loop = Callable[[Any, int], None]


def backward(optimizer: Any, number: int) -> None:
    loss_of(optimizer.model, batch(number)).backward()


def train(optimizer: Any, loop: Loop = backward, numbers: Any = range(7)) -> Any:
    for number in numbers:
        optimizer.zero_grad()
        loop(optimizer, number)
        optimizer.step()
    return optimizer


class Uses:
    """Counts how often layers are preconditioned from rows."""

    count = 0


@pytest.fixture(autouse=True)
def uses(monkeypatch: pytest.MonkeyPatch, double_precision: None) -> Uses:
    """Let small layers take the row form, and count."""
    found, plain = Uses(), KFACBlock.precondition_rows

    def counted(self: Any, *args: Any) -> Tensor:
        found.count += 1
        return plain(self, *args)

    monkeypatch.setattr(row_form, "LEAST_SAVING", 0)
    monkeypatch.setattr(KFACBlock, "precondition_rows", counted)
    return found


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def assert_equal_forms(
    loop: Loop = backward, model: Callable[[], nn.Module] = Net, **options: Any
) -> Any:
    """The same training by rows and by products; returns the former's optimizer."""
    found = []
    for rows in (True, False):
        torch.manual_seed(0)
        found.append(train(build(model(), row_form=rows, **options), loop))
    rows, products = found
    assert_close(parameters(rows.model), parameters(products.model))
    for name, state in layers(products).items():
        for key, value in state.buffers.items():
            assert_close(layers(rows)[name].buffers[key], value)
    return rows


def chosen(optimizer: Any) -> set[str]:
    """Names of the layers that take the row form."""
    return {s.name for s in optimizer.layers if s.row_form is not None and s.row_form.chosen}


# --- the same numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("rescale", [None, "unit", "graft", "kl-clip", "auto", "orthogonal"])
def test_rows_give_what_products_give(momentum: str, rescale: Any, uses: Uses) -> None:
    optimizer = assert_equal_forms(rescale=rescale, **MOMENTA[momentum])
    assert chosen(optimizer) == set(WIDE)
    ordinary = 5  # of seven steps, two refresh
    expected = {"plain": 7, "momentum": ordinary, "nesterov": 7}[momentum]
    assert uses.count == len(WIDE) * expected


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz", "separable"])
@pytest.mark.parametrize("damping", [0.1, kronfac.Relative(0.1)], ids=["absolute", "relative"])
def test_every_solver_with_one_matrix_a_side(solver: str, damping: Any, momentum: str) -> None:
    optimizer = assert_equal_forms(solver=solver, damping=damping, **MOMENTA[momentum])
    assert chosen(optimizer) == set(WIDE)


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", [None, 2])
def test_biases_and_inputs_of_rank_2_and_3(bias: bool, positions: Any, momentum: str) -> None:
    def loop(optimizer: Any, number: int) -> None:
        loss_of(optimizer.model, batch(number, 2, positions)).backward()

    optimizer = assert_equal_forms(loop, lambda: Net(bias), **MOMENTA[momentum])
    assert set(WIDE) <= chosen(optimizer)


@pytest.mark.parametrize("options", [{"fisher": "forward"}, {"sharing": "reduce"}, {"rows": None}])
def test_other_statistics(options: dict[str, Any]) -> None:
    assert chosen(assert_equal_forms(momentum=0.9, **options)) >= set(WIDE)


def test_gradients_that_observe_asks_for_are_not_those_of_the_loss(uses: Uses) -> None:
    def loop(optimizer: Any, number: int) -> None:
        x, y = batch(number)
        scores = optimizer.model(x)
        optimizer.observe(scores)
        F.cross_entropy(scores, y).backward()

    assert chosen(assert_equal_forms(loop, fisher="exact", momentum=0.9)) == set(WIDE)
    assert uses.count == 5 * len(WIDE)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_micro_batches_add_up(momentum: str, uses: Uses) -> None:
    def loop(optimizer: Any, number: int) -> None:
        for part in range(2):
            (loss_of(optimizer.model, batch(2 * number + part, 2)) / 2).backward()

    assert chosen(assert_equal_forms(loop, **MOMENTA[momentum])) == set(WIDE)
    assert uses.count >= 5 * len(WIDE)


def test_momentum_and_damping_that_change() -> None:
    def loop(optimizer: Any, number: int) -> None:
        optimizer.momentum, optimizer.damping = 0.9 - 0.1 * number, 0.1 * (number + 1)
        backward(optimizer, number)

    for nesterov in (True, False):
        assert_equal_forms(loop, momentum=0.9, nesterov=nesterov)


def test_every_step_may_refresh_or_none() -> None:
    for options in ({"refresh_every": 1, "factor_every": 1}, {"refresh_every": 100}):
        assert_equal_forms(momentum=0.9, nesterov=True, **options)


# --- what is not the sum of its rows is left to products ---------------------------------------------


def clip_norm(optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.model.parameters(), 1e-2)


def clip_value(optimizer: Any) -> None:
    nn.utils.clip_grad_value_(optimizer.model.parameters(), 1e-2)


def multiply(optimizer: Any) -> None:
    for parameter in optimizer.model.parameters():
        parameter.grad.mul_(0.5)


def replace(optimizer: Any) -> None:
    for parameter in optimizer.model.parameters():
        parameter.grad = 2 * parameter.grad


def change_bias(optimizer: Any) -> None:
    optimizer.model.second.bias.grad.add_(0.1)


def add_penalty(optimizer: Any) -> None:
    sum(p.square().sum() for p in optimizer.model.parameters()).backward()


def forget_bias(optimizer: Any) -> None:
    """Of two batches, the bias's gradient has the second one only."""
    optimizer.model.second.bias.grad = None
    backward(optimizer, 40)


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize(
    "change",
    [clip_norm, clip_value, multiply, replace, change_bias, add_penalty, forget_bias],
)
def test_gradients_that_change_after_backward(
    change: Callable[[Any], None], momentum: str, uses: Uses
) -> None:
    seen: list[int] = []

    def loop(optimizer: Any, number: int) -> None:
        backward(optimizer, number)
        if number in (2, 3):
            change(optimizer)
        seen.append(uses.count)

    optimizer = assert_equal_forms(loop, **MOMENTA[momentum])
    assert chosen(optimizer) == set(WIDE)
    assert seen[3] == seen[2] or change in (change_bias, forget_bias)
    assert uses.count > seen[6] > seen[2]


def penalty(optimizer: Any, number: int) -> None:
    model = optimizer.model
    extra = sum(p.square().sum() for p in model.second.parameters())
    (loss_of(model, batch(number)) + 0.1 * extra).backward()


def shared_graph(optimizer: Any, number: int) -> None:
    """Two forwards and one backward: each weight is used twice in its graph."""
    model = optimizer.model
    (loss_of(model, batch(number)) + loss_of(model, batch(number + 50))).backward()


def functional(optimizer: Any, number: int) -> None:
    model, (x, y) = optimizer.model, batch(number)
    hidden = torch.tanh(F.linear(x, model.first.weight))
    (loss_of(model, (x, y)) + hidden.square().mean()).backward()


def gradient_penalty(optimizer: Any, number: int) -> None:
    model, (x, y) = optimizer.model, batch(number)
    x = x.requires_grad_()
    loss = loss_of(model, (x, y))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()


def checkpointed(reentrant: bool) -> Loop:
    def loop(optimizer: Any, number: int) -> None:
        optimizer.model.reentrant = reentrant
        backward(optimizer, number)
        optimizer.model.reentrant = None

    return loop


def offloaded(optimizer: Any, number: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        backward(optimizer, number)


def overwritten_input(optimizer: Any, number: int) -> None:
    """A buffer that the next batch is written to before the step."""
    x, y = batch(number)
    loss_of(optimizer.model, (x, y)).backward()
    x.normal_()


def create_graph(optimizer: Any, number: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle, which is broken here
        loss_of(optimizer.model, batch(number)).backward(create_graph=True)
    for parameter in optimizer.model.parameters():
        parameter.grad = parameter.grad.detach()


def keep_zeros(optimizer: Any, number: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(optimizer, number)


def forward_replaced(optimizer: Any, number: int) -> None:
    model = optimizer.model
    for layer in (model.first, model.second, model.third):
        layer.forward = lambda x, own=layer: F.linear(2 * x, own.weight, own.bias)
    backward(optimizer, number)


UNUSABLE: dict[str, tuple[Loop, set[str]]] = {
    "penalty": (penalty, {"first", "third"}),
    "shared graph": (shared_graph, set()),
    "functional": (functional, {"second", "third"}),
    "gradient penalty": (gradient_penalty, set()),
    "checkpoint": (checkpointed(False), {"first"}),
    "reentrant checkpoint": (checkpointed(True), {"first"}),
    "offloaded": (offloaded, set()),
    "overwritten input": (overwritten_input, {"second", "third"}),
    "create graph": (create_graph, set()),
    "zeros": (keep_zeros, set(WIDE)),  # there are none before the first step
    "forward replaced": (forward_replaced, set()),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_other_ways_to_a_gradient(name: str) -> None:
    loop, expected = UNUSABLE[name]
    optimizer = assert_equal_forms(loop, momentum=0.9, nesterov=True)
    assert chosen(optimizer) == expected


@pytest.mark.parametrize("name", [name for name in UNUSABLE if name != "forward replaced"])
def test_other_ways_that_come_later(name: str) -> None:
    def loop(optimizer: Any, number: int) -> None:
        (UNUSABLE[name][0] if number in (2, 4) else backward)(optimizer, number)

    assert chosen(assert_equal_forms(loop, momentum=0.9)) == set(WIDE)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_hooks_that_change_gradients() -> None:
    def loop(optimizer: Any, number: int) -> None:
        model = optimizer.model
        x, y = batch(number)
        handles = [model.first.weight.register_hook(lambda grad: 0.5 * grad)]
        if number >= 2:
            handles.append(model.second.weight.register_post_accumulate_grad_hook(double))
        hidden = torch.tanh(model.first(x))
        product = model.second(hidden)
        product.register_hook(lambda grad: 3 * grad)
        F.cross_entropy(model.head(torch.tanh(model.third(product.relu_()))), y).backward()
        for part in range(2):  # to a gradient that is there already, too
            loss_of(model, batch(number + 20 + part, 1)).backward()
        for handle in handles:
            handle.remove()

    optimizer = assert_equal_forms(loop, momentum=0.9)
    assert chosen(optimizer) == {"second", "third"}


def test_passes_that_are_not_observed_or_not_trained_count_in_the_gradient(uses: Uses) -> None:
    def loop(optimizer: Any, number: int) -> None:
        backward(optimizer, number)
        with optimizer.no_capture():
            loss_of(optimizer.model, batch(number + 20, 1)).backward()
        optimizer.model.eval()
        loss_of(optimizer.model, batch(number + 40, 1)).backward()
        optimizer.model.train()

    assert chosen(assert_equal_forms(loop, momentum=0.9)) == set(WIDE)
    assert uses.count == 5 * len(WIDE)


def test_gradients_that_were_cleared_or_asked_for_do_not_count(uses: Uses) -> None:
    def loop(optimizer: Any, number: int) -> None:
        model = optimizer.model
        backward(optimizer, number + 20)
        model.zero_grad()
        torch.autograd.grad(loss_of(model, batch(number + 40)), list(model.parameters()))
        backward(optimizer, number)

    assert chosen(assert_equal_forms(loop, momentum=0.9)) == set(WIDE)
    assert uses.count == 5 * len(WIDE)


def test_a_graph_that_is_used_twice(uses: Uses) -> None:
    def loop(optimizer: Any, number: int) -> None:
        loss = loss_of(optimizer.model, batch(number, 2))
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    assert chosen(assert_equal_forms(loop, momentum=0.9)) == set(WIDE)
    assert uses.count == 5 * len(WIDE)


def test_a_gradient_scaler(uses: Uses) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def scaled(optimizer: Any, number: int) -> None:
        scaler.scale(loss_of(optimizer.model, batch(number))).backward()

    def run(rows: bool) -> Any:
        optimizer = build(row_form=rows, momentum=0.9)
        for number in range(6):
            optimizer.zero_grad()
            if number < 2:
                backward(optimizer, number)
                optimizer.step()
            else:
                scaled(optimizer, number)
                scaler.step(optimizer)
                scaler.update()
        return optimizer

    rows, products = run(True), run(False)
    assert_close(parameters(rows.model), parameters(products.model))
    assert uses.count == len(WIDE)


def test_gradients_that_change_without_a_trace_at_the_first_step() -> None:
    def loop(optimizer: Any, number: int) -> None:
        backward(optimizer, number)
        for parameter in optimizer.model.parameters():
            parameter.grad.data.clamp_(-1e-2, 1e-2)

    assert chosen(assert_equal_forms(loop, momentum=0.9)) == set()


def test_frozen_and_unused_layers() -> None:
    def loop(optimizer: Any, number: int) -> None:
        model, (x, y) = optimizer.model, batch(number)
        model.first.requires_grad_(number not in (2, 3))
        model.second.bias.requires_grad_(number < 5)
        hidden = model.second(torch.tanh(model.first(x)))
        hidden = hidden if number in (3, 5) else model.third(torch.tanh(hidden))
        F.cross_entropy(model.head(hidden), y).backward()

    for momentum in MOMENTA.values():
        assert chosen(assert_equal_forms(loop, **momentum)) == set(WIDE)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias
        self.twice, self.head = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def test_weights_that_are_used_twice() -> None:
    assert chosen(assert_equal_forms(model=Tied, momentum=0.9)) == set()


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x.float())


def test_products_in_another_precision() -> None:
    assert chosen(assert_equal_forms(model=lambda: Autocast().float(), momentum=0.9)) == set()


def test_compiled_models_take_the_product_form() -> None:
    torch._dynamo.reset()
    found = []
    for rows in (True, False):
        optimizer = build(row_form=rows, momentum=0.9)
        compiled = torch.compile(optimizer.model, backend="aot_eager", fullgraph=True)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(compiled, batch(number)).backward()
            optimizer.step()
        found.append(parameters(optimizer.model))
        assert not chosen(optimizer)
    assert_close(*found)


# --- which layers -----------------------------------------------------------------------------------


def test_a_batch_with_more_rows_than_pay_stays_with_products(uses: Uses) -> None:
    def large(optimizer: Any, number: int) -> None:
        loss_of(optimizer.model, batch(number, 9)).backward()

    assert chosen(assert_equal_forms(large, momentum=0.9)) == set()
    assert uses.count == 0

    def loop(optimizer: Any, number: int) -> None:
        if number in (2, 3):
            large(optimizer, number)
            held = optimizer._preconditioner.row_form._watched
            assert not any(rows._sums for rows in held.values())
        else:
            backward(optimizer, number)

    assert chosen(assert_equal_forms(loop, momentum=0.9)) == set(WIDE)
    assert uses.count == 3 * len(WIDE)  # one step starts again


def test_the_limit_is_where_operations_are_equal() -> None:
    states = layers(build())
    for name, (d_out, d_in) in {"first": (12, 11), "second": (12, 13), "head": (3, 13)}.items():
        product = 2 * d_in * d_out * (d_in + d_out)
        each = 2 * (d_in**2 + d_out**2 + d_in * d_out)
        assert row_form.most_rows(states[name].block) == product // each


def test_solutions_that_do_not_divide_into_two_matrices_have_no_row_form() -> None:
    for options in ({"solver": "eigen"}, {"max_dim": 10}, {"solver": "thermodynamic"}):
        optimizer = train(build(momentum=0.9, **options), numbers=range(2))
        assert not chosen(optimizer) & {"first", "second"}
    for method in (kronfac.EKFAC, kronfac.Shampoo, kronfac.Eva):
        model = Net()
        other: Any = method(model, SGD(model.parameters(), lr=0.02), row_form=True)  # type: ignore[operator]
        assert not chosen(train(other, numbers=range(2)))


def test_small_layers_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.set_default_dtype(torch.float64)
    optimizer = build(momentum=0.9)
    assert all(state.row_form is None for state in optimizer.layers)
    assert hooks(optimizer.model) == hooks(build(momentum=0.9, row_form=False).model)


def test_hooks_stay_only_where_they_are_used() -> None:
    optimizer = build(momentum=0.9)
    before = hooks(build(row_form=False).model)
    assert hooks(optimizer.model) == before + 4
    train(optimizer, numbers=range(1))
    assert hooks(optimizer.model) == before + len(WIDE)
    optimizer.detach()
    assert hooks(optimizer.model) == 0


# --- state ------------------------------------------------------------------------------------------


def resumed(optimizer: Any, **options: Any) -> Any:
    model = Net()
    model.load_state_dict(optimizer.model.state_dict())
    other = build(model, **options)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_resumes_bit_for_bit(momentum: str, steps: int, uses: Uses) -> None:
    options = MOMENTA[momentum]
    optimizer = train(build(**options), numbers=range(steps))
    others = [resumed(optimizer, **options), copy.deepcopy(optimizer)]
    before = uses.count
    train(optimizer, numbers=range(steps, 9))
    assert uses.count > before
    for other in others:
        assert chosen(other) == set(WIDE)
        train(other, numbers=range(steps, 9))
        assert_same(parameters(other.model), parameters(optimizer.model))
        assert_same(snapshot(other), snapshot(optimizer))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("samples", [SAMPLES, 20], ids=["rows", "products"])
def test_distributed_checkpoints_resume_to_rounding(samples: int, tmp_path: Path) -> None:
    """They fill what a new optimizer has, which is no preconditioned momentum: it is made again."""

    def loop(optimizer: Any, number: int) -> None:
        loss_of(optimizer.model, batch(number, samples)).backward()

    optimizer = train(build(momentum=0.9, nesterov=True), loop, range(3))
    weights, state = get_state_dict(optimizer.model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other = build(momentum=0.9, nesterov=True)
    weights, state = get_state_dict(other.model, other)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other.model, other, model_state_dict=weights, optim_state_dict=state)
    train(optimizer, loop, range(3, 9))
    train(other, loop, range(3, 9))
    assert chosen(other) == chosen(optimizer) == (set(WIDE) if samples == SAMPLES else set())
    same = assert_close if samples == SAMPLES else assert_same
    same(parameters(other.model), parameters(optimizer.model))


def test_a_change_of_damping_makes_the_preconditioned_momentum_again() -> None:
    found = []
    for by_rows in (True, False):
        optimizer = train(
            build(solver="separable", momentum=0.9, row_form=by_rows), numbers=range(3)
        )
        assert bool(chosen(optimizer)) == by_rows
        optimizer.damping = kronfac.Relative(0.7)
        found.append(parameters(train(optimizer, numbers=range(3, 6)).model))
    assert_close(*found)


def test_a_running_optimizer_loads_either_choice() -> None:
    def large(optimizer: Any, number: int) -> None:
        loss_of(optimizer.model, batch(number, 20)).backward()

    small = train(build(momentum=0.9), numbers=range(3))
    wide = train(build(momentum=0.9), large, range(3))
    states = saved_and_loaded(small.state_dict()), saved_and_loaded(wide.state_dict())
    for optimizer, state, expected in ((wide, states[0], set(WIDE)), (small, states[1], set())):
        optimizer.load_state_dict(state)
        assert chosen(train(optimizer, numbers=range(2))) == expected
        own = layers(optimizer)["second"].buffers
        assert ("preconditioned_momentum" in own) == bool(expected)


@pytest.mark.parametrize("saved", [True, False])
def test_checkpoints_go_with_and_without_it(saved: bool) -> None:
    optimizer = train(build(momentum=0.9, row_form=saved), numbers=range(3))
    other = resumed(optimizer, momentum=0.9, row_form=not saved)
    train(optimizer, numbers=range(3, 7))
    train(other, numbers=range(3, 7))
    assert_close(parameters(other.model), parameters(optimizer.model))
    assert chosen(other) == (set() if saved else set(WIDE))


def test_looking_at_the_state_changes_nothing() -> None:
    quiet, looked = build(momentum=0.9), build(momentum=0.9)
    train(quiet)
    for number in range(7):
        train(looked, numbers=[number])
        looked.zero_grad()
        get_state_dict(looked.model, looked)
    assert_same(parameters(looked.model), parameters(quiet.model))


def test_without_the_option_nothing_is_there() -> None:
    optimizer = build(momentum=0.9, row_form=False)
    train(optimizer)
    assert all(state.row_form is None for state in optimizer.layers)
    entry = optimizer.state_dict()["state"][0]
    assert not [key for key in entry if "row_form" in key or "preconditioned" in key]
    with pytest.raises(ValueError, match="row_form='yes' must be True or False"):
        build(row_form="yes")


# --- cost -------------------------------------------------------------------------------------------


@pytest.fixture
def single_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The defaults that users have."""
    monkeypatch.setattr(row_form, "LEAST_SAVING", 2**24)
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def step_flops(rows: bool, **options: Any) -> int:
    """Operations of an ordinary step of an MLP on MNIST, with 128 images."""
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer: Any = kronfac.KFAC(
        model, SGD(model.parameters(), lr=0.1), row_form=rows, solver="cholesky", **options
    )
    optimizer.refresh_every = optimizer.factor_every = 3
    x, y = torch.randn(128, 784), torch.randint(10, (128,))
    for number in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert number or chosen(optimizer) == ({"0", "2"} if rows else set())
    return counter.get_total_flops()


@pytest.mark.parametrize("momentum", MOMENTA)
def test_operations_of_a_step_are_those_of_the_formula(
    momentum: str, single_precision: None
) -> None:
    def product(d_in: int, d_out: int) -> int:
        return 2 * d_in * d_out * (d_in + d_out)

    def by_rows(d_in: int, d_out: int) -> int:
        return 2 * 128 * (d_in**2 + d_out**2 + d_in * d_out)

    options = {"rescale": None, "early_refresh": False, **MOMENTA[momentum]}
    head = product(1025, 10)
    expected = by_rows(785, 1024) + by_rows(1025, 1024) + head
    before = product(785, 1024) + product(1025, 1024) + head
    assert step_flops(True, **options) == expected
    assert step_flops(False, **options) == before
    assert expected / before == pytest.approx(0.202, abs=1e-3)


def test_nothing_is_read_back_between_refreshes() -> None:
    optimizer = train(build(momentum=0.9, nesterov=True), numbers=range(2))
    optimizer.zero_grad()
    backward(optimizer, 2)
    with CountWaits() as counter:
        optimizer.step()
    assert not counter.waits


def test_rows_are_gone_after_the_step_even_if_the_loss_is_kept() -> None:
    optimizer = build(momentum=0.9)
    x, y = batch(0)
    losses = [loss_of(optimizer.model, (x, y))]
    losses[0].backward()
    optimizer.step()
    watched = optimizer._preconditioner.row_form
    assert not watched._rows
    assert not any(rows._sums or rows._latest for rows in watched._watched.values())


# --- the summary ------------------------------------------------------------------------------------


def test_the_summary_names_the_layers() -> None:
    optimizer = build(momentum=0.9)
    title = "Preconditioned from the rows of a step"
    assert title not in optimizer.summary()
    train(optimizer, numbers=range(1))
    lines = optimizer.summary().splitlines()
    assert lines[1 + next(i for i, line in enumerate(lines) if line.startswith(title))] == (
        "  first second third"
    )
    assert all(len(line) <= 80 for line in lines)
    assert title not in train(build(row_form=False), numbers=range(1)).summary()
