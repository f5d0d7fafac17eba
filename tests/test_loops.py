"""Loops with several networks, losses or passes. The first line of each test says what is true."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

import kronfac
from tests import loops
from tests.training import (
    INPUTS,
    assert_close,
    assert_same,
    batch,
    counts,
    factors,
    frozen_kfac,
    gradients,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    step,
)

pytestmark = pytest.mark.usefixtures("double_precision")

NAMES = ("0", "2", "4")


def pending(optimizer: kronfac.KFAC) -> bool:
    return any(not state.pending.empty for state in layers(optimizer).values())


# --- two networks against each other ---------------------------------------------------------


class Adversaries:
    """A generator and a discriminator, each with K-FAC of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, INPUTS))
        self.discriminator = nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, 1))
        self.of_generator, self.of_discriminator = kfac(self.generator), kfac(self.discriminator)

    def discriminator_step(self, number: int, fake: Tensor) -> None:
        self.of_discriminator.zero_grad()
        real = batch(number)[0]
        loss = F.softplus(-self.discriminator(real)).mean()
        loss = loss + F.softplus(self.discriminator(fake.detach())).mean()
        (loss / 2).backward()
        self.of_discriminator.step()

    def generator_step(self, fake: Tensor, judge: nn.Module) -> None:
        self.of_generator.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        self.of_generator.step()

    def fake(self, number: int) -> Tensor:
        return self.generator(batch(number, shape=(2,))[0])

    def train(self, way: str, steps: int = 3) -> None:
        for number in range(steps):
            fake = self.fake(number)
            self.discriminator_step(number, fake)
            judge, context = self.discriminator, nullcontext()
            if way == "copy":  # the reference: nothing comes near the discriminator
                judge = copy.deepcopy(self.discriminator)
            if way == "no_capture":
                context = self.of_discriminator.no_capture()
            judge.requires_grad_(way != "frozen")
            with context:
                self.generator_step(fake, judge)
            self.discriminator.requires_grad_(True)


@pytest.mark.parametrize("way", ["no_capture", "frozen"])
def test_a_generators_step_leaves_no_trace_in_the_discriminator(way: str) -> None:
    """With `no_capture`, or with the discriminator frozen meanwhile, both train as on their own."""
    adversaries, reference = Adversaries(), Adversaries()
    adversaries.train(way)
    reference.train("copy")
    for name in ("generator", "discriminator"):
        found, expected = getattr(adversaries, name), getattr(reference, name)
        assert_same(parameters(found), parameters(expected))
    kept = adversaries.of_discriminator.state_dict(), reference.of_discriminator.state_dict()
    assert_same(*kept)


def test_without_care_a_generators_step_leaves_its_inputs_in_the_discriminator() -> None:
    """Its output gradients go with `zero_grad`, as `.grad` does; its inputs stay as rows of A."""
    adversaries, reference = Adversaries(), Adversaries()
    for number, (one, way) in enumerate([(adversaries, ""), (reference, "copy")]):
        one.train(way, steps=1)
        assert pending(one.of_discriminator) == (number == 0)
        with torch.no_grad():
            fake = one.fake(1)
        one.discriminator_step(1, fake)
    found, expected = adversaries.of_discriminator, reference.of_discriminator
    assert_same(factors(found, "G"), factors(expected, "G"))
    assert counts(expected, "A") == dict.fromkeys(("0", "2"), 16 + 0.95 * 16)
    assert counts(found, "A") == dict.fromkeys(("0", "2"), 16 + 8 + 0.95 * 16)


@pytest.mark.parametrize("gradients", [False, True])
def test_fakes_for_the_discriminator_alone(gradients: bool) -> None:
    """Made without gradients they are not observed; else their inputs are rows of the generator's A."""
    adversaries = Adversaries()
    with torch.set_grad_enabled(gradients):
        fake = adversaries.fake(0)
    adversaries.discriminator_step(0, fake)
    adversaries.generator_step(adversaries.fake(1), adversaries.discriminator)
    rows = 16 if gradients else 8
    assert counts(adversaries.of_generator, "A") == dict.fromkeys(("0", "2"), rows)
    assert counts(adversaries.of_generator, "G") == dict.fromkeys(("0", "2"), 8)


# --- several inputs, heads and losses --------------------------------------------------------


def contrast(left: Tensor, right: Tensor) -> Tensor:
    return (left - right).square().sum(1).mean() + (left * right).sum(1).tanh().mean()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_two_inputs_through_one_network_equal_one_forward_on_both(sharing: Any) -> None:
    """Two forwards in one loss are one batch of twice the samples."""
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model, sharing=sharing), kfac(twin, sharing=sharing)
    for number in range(3):
        left, right = batch(number)[0], batch(number + 50)[0]
        optimizer.zero_grad()
        contrast(model(left), model(right)).backward()
        optimizer.step()
        reference.zero_grad()
        contrast(*twin(torch.cat([left, right])).chunk(2)).backward()
        reference.step()
    assert_close(parameters(model), parameters(twin))


def test_a_pair_that_is_one_sample_has_two_shared_positions() -> None:
    """Inside one outermost forward, two calls are two positions of the same N samples."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return contrast(self.net(left), self.net(right))

    left, right = batch(0)[0], batch(1)[0]
    model, twin = Pairs(), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    model(left, right).backward()
    contrast(twin(left), twin(right)).backward()
    optimizer.step()
    reference.step()
    for name in NAMES:
        assert_close(factors(optimizer, "A")[f"net.{name}"], factors(reference, "A")[name])
        assert_close(2 * factors(optimizer, "G")[f"net.{name}"], factors(reference, "G")[name])
    assert set(counts(optimizer, "G").values()) == {8}


def test_two_backwards_with_reduced_rows_equal_one_of_the_sum() -> None:
    """With `sharing="reduce"` output gradients of one pass add up before they are squared."""
    model, twin = mlp(), mlp()
    optimizer, reference = (frozen_kfac(m, sharing="reduce") for m in (model, twin))
    x, y = batch()
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    outputs.square().mean().backward()
    outputs = twin(x)
    (F.cross_entropy(outputs, y) + outputs.square().mean()).backward()
    optimizer.step()
    reference.step()
    assert_close(factors(optimizer, "G"), factors(reference, "G"))
    assert_close(gradients(model), gradients(twin))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(INPUTS, 5)
        self.main, self.auxiliary = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        return self.main(hidden), self.auxiliary(hidden)


def test_the_trunk_of_auxiliary_heads_sees_the_gradient_of_the_whole_loss() -> None:
    """G of the trunk is ``N Σ g gᵀ`` with g from all heads together; each head has its own."""
    model = TwoHeads()
    optimizer = frozen_kfac(model)
    x, y = batch()
    products: dict[str, Tensor] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda *a, name=name: products.update({name: a[2]}))
    main, auxiliary = model(x)
    loss = F.cross_entropy(main, y) + 0.3 * auxiliary.square().mean()
    slopes = torch.autograd.grad(loss, list(products.values()), retain_graph=True)
    optimizer.zero_grad()  # forgets what that has shown
    loss.backward()
    optimizer.step()
    expected = {n: 8 * loops.gram(g) for n, g in zip(products, slopes, strict=True)}
    assert_close(factors(optimizer, "G"), expected)


def test_a_head_that_the_loss_does_not_use_is_left_alone() -> None:
    """It has no gradient, so nothing moves it, nothing warns, and it has no solution."""
    model = TwoHeads()
    optimizer = kfac(model)
    before = parameters(model)
    F.cross_entropy(model(batch()[0])[0], batch()[1]).backward()
    optimizer.step()
    assert optimizer.stats()["without_solution"] == ["auxiliary"]
    moved = {n for n, value in parameters(model).items() if not torch.equal(value, before[n])}
    assert moved == {"trunk.weight", "trunk.bias", "main.weight", "main.bias"}


@pytest.mark.parametrize("captured", [True, False])
def test_a_gradient_penalty(captured: bool) -> None:
    """Captured, G is that of the inner gradient and of loss and penalty together; else of the loss."""
    model = mlp()
    optimizer = frozen_kfac(model)
    x, y = batch()

    def penalised(network: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor, Any]:
        inputs = x.clone().requires_grad_()
        outputs = network(inputs)
        scores = outputs[0] if isinstance(outputs, tuple) else outputs
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return F.cross_entropy(scores, y), slope.square().mean(), outputs

    if captured:
        loss, penalty, _ = penalised(model)
        (loss + penalty).backward()
    else:
        loss_of(model, (x, y)).backward()
        with optimizer.no_capture():
            penalised(model)[1].backward()
    optimizer.step()
    twin = mlp()
    loss, penalty, (scores, seen) = penalised(lambda inputs: loops.run(twin, inputs))
    products = [product for _, product in seen.values()]
    sources = [scores.sum(), loss + penalty] if captured else [loss]
    slopes = [torch.autograd.grad(one, products, retain_graph=True) for one in sources]
    expected = {
        name: 8 * sum(loops.gram(one[index]) for one in slopes) for index, name in enumerate(NAMES)
    }
    assert_close(factors(optimizer, "G"), expected)
    assert set(counts(optimizer, "A").values()) == {8}


# --- one network, two optimizers -------------------------------------------------------------


def halves(model: nn.Sequential) -> tuple[kronfac.KFAC, kronfac.KFAC]:
    first = kfac(model, SGD(model[0].parameters(), lr=0.1))
    return first, kfac(model, SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1))


def test_two_optimizers_on_disjoint_parameters_equal_one() -> None:
    """When both step after one backward; curvature is per layer."""
    model, twin = mlp(), mlp()
    optimizers, reference = halves(model), kfac(twin)
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        for optimizer in optimizers:
            optimizer.step()
        step(twin, reference, batch(number))
    assert_same(parameters(model), parameters(twin))


@pytest.mark.parametrize("paused", [True, False])
def test_two_halves_that_take_turns(paused: bool) -> None:
    """The half that waits keeps the inputs of the other's pass as rows of A, unless it is paused."""
    model = mlp()
    first, second = halves(model)
    for number, (active, waiting) in enumerate([(first, second), (second, first)]):
        active.zero_grad()
        with waiting.no_capture() if paused else nullcontext():
            loss_of(model, batch(number)).backward()
        active.step()
    assert counts(second, "A") == dict.fromkeys(("2", "4"), 8 if paused else 16)
    assert counts(second, "G") == dict.fromkeys(("2", "4"), 8)
    alone = mlp()
    alone[0].load_state_dict(model[0].state_dict())
    reference = halves(alone)[1]
    step(alone, reference, batch(1))
    assert_same(factors(second, "G"), factors(reference, "G"))


# --- teachers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepcopy", "averaged"])
def test_a_mean_teacher_equals_one_that_never_met_the_optimizer(kind: str) -> None:
    """A copy of a watched model observes nothing, in training mode and with gradients too."""
    results = []
    for foreign in (False, True):
        model = mlp()
        optimizer = kfac(model)
        source = mlp() if foreign else model
        teacher = AveragedModel(source) if kind == "averaged" else copy.deepcopy(source)
        for number in range(3):
            x, y = batch(number)
            optimizer.zero_grad()
            outputs = model(x)
            (F.cross_entropy(outputs, y) + (outputs - teacher(x)).square().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, value in zip(teacher.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
                    mean.grad = None
        results.append((parameters(model), optimizer.state_dict()))
    assert_same(*results)
