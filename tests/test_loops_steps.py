"""What loops do around steps. The first line of each test says what is true."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from tests import loops
from tests.training import (
    applied,
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
    train,
)

pytestmark = pytest.mark.usefixtures("double_precision")

NAMES = ("0", "2", "4")
DAMPING, DECAY = 0.1, 0.95  # those of `kfac`


def pending(optimizer: Any) -> bool:
    return any(not state.pending.empty for state in layers(optimizer).values())


# --- between backward and step ---------------------------------------------------------------

CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_the_clipped_gradient_is_preconditioned_with_statistics_of_the_unclipped(clip: str) -> None:
    """``v = (G ⊗ A + γI)⁻¹ clip(V)``; A and G are what they are without clipping."""
    model, twin = mlp(), mlp()
    optimizer, reference = frozen_kfac(model), frozen_kfac(twin)
    loss_of(model, batch()).backward()
    raw = gradients(model)
    CLIPS[clip](model)
    clipped = gradients(model)
    assert not torch.equal(raw["0.weight"], clipped["0.weight"])
    optimizer.step()
    step(twin, reference, batch())
    a, g = factors(optimizer, "A"), factors(optimizer, "G")
    assert_same((a, g), (factors(reference, "A"), factors(reference, "G")))
    for name in NAMES:
        expected = loops.solved(a[name], g[name], loops.matrix_of(clipped, name), DAMPING)
        assert_close(loops.matrix_of(gradients(model), name), expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_zeroing_in_place_equals_setting_to_none(sharing: Any) -> None:
    """Both forget the output gradients of a backward that is thrown away."""
    results = []
    for to_none in (True, False):
        model = mlp()
        optimizer = kfac(model, sharing=sharing)
        for number in range(3):
            loss_of(model, batch(9)).backward()
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        results.append((parameters(model), factors(optimizer, "G")))
    assert_same(*results)


def test_micro_batches_with_means_of_their_own() -> None:
    """``loss_i / k`` with uneven sizes: ``G = N Σ g gᵀ`` of the gradients as they are, N of the step."""
    model = mlp()
    optimizer = frozen_kfac(model)
    sizes, expected = (2, 5, 1), {}
    for number, size in enumerate(sizes):
        x, y = batch(number, samples=size)
        (loss_of(model, (x, y)) / len(sizes)).backward()
        outputs, seen = loops.run(mlp(), x)
        products = [product for _, product in seen.values()]
        slopes = torch.autograd.grad(F.cross_entropy(outputs, y) / len(sizes), products)
        for name, slope in zip(NAMES, slopes, strict=True):
            expected[name] = expected.get(name, 0) + sum(sizes) * loops.gram(slope)
    optimizer.step()
    assert_close(factors(optimizer, "G"), expected)
    assert set(counts(optimizer, "G").values()) == {sum(sizes)}


@pytest.mark.parametrize("broken", ["inputs", "labels"])
def test_a_batch_that_is_skipped_for_its_loss(broken: str) -> None:
    """Inputs that are not finite leave nothing; finite ones stay as rows of A, without a gradient."""
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    for number in (0, 7, 1):
        x, y = batch(number)
        if number == 7 and broken == "inputs":
            x = x.index_fill(0, torch.tensor([2]), math.nan)
        weight = math.nan if number == 7 and broken == "labels" else 1.0
        optimizer.zero_grad()
        loss = weight * loss_of(model, (x, y))
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
    train(twin, reference, range(2))
    assert_same(factors(optimizer, "G"), factors(reference, "G"))
    rows = 8 + DECAY * 8 + (8 if broken == "labels" else 0)
    assert counts(optimizer, "A") == dict.fromkeys(NAMES, rows)
    dropped = 1 if broken == "inputs" else 0
    assert optimizer.stats()["dropped"] == dict.fromkeys(NAMES, dropped)
    if broken == "inputs":
        assert_same(parameters(model), parameters(twin))


# --- layers that come and go -----------------------------------------------------------------


def test_a_layer_that_is_unfrozen_starts_with_the_batch_of_that_step() -> None:
    """Nothing of the time when it was frozen is in its statistics."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = kfac(model)
    train(model, optimizer, range(3))
    model[0].requires_grad_(True)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    fresh = kfac(twin)
    found, expected = applied(model, optimizer, batch(3)), applied(twin, fresh, batch(3))
    for name in ("0.weight", "0.bias"):
        assert_same([one[name] for one in found], [one[name] for one in expected])
    assert counts(optimizer, "A")["0"] == counts(optimizer, "G")["0"] == 8


def test_statistics_of_a_frozen_layer_fade() -> None:
    """Each factor step without it weighs what it had by `decay`; its mean stays."""
    model = mlp()
    optimizer = kfac(model)
    step(model, optimizer, batch(0))
    mean = factors(optimizer, "A")["0"]
    model[0].requires_grad_(False)
    train(model, optimizer, (1, 2))
    assert_close(counts(optimizer, "A")["0"], 8 * DECAY**2)
    assert_close(factors(optimizer, "A")["0"], mean)
    model[0].requires_grad_(True)
    step(model, optimizer, batch(3))
    assert_close(counts(optimizer, "A")["0"], 8 * DECAY**3 + 8)


def test_a_layer_that_is_used_every_second_step() -> None:
    """Its average is over its own steps, the older of two by `decay²`; others count every step."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.extra, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, deep: bool) -> Tensor:
            return self.head(self.extra(x).tanh() if deep else x)

    model = Sometimes()
    optimizer = kfac(model)
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x, number % 2 == 0), y).backward()
        optimizer.step()
    first, last = (torch.cat([batch(n)[0], torch.ones(8, 1)], 1) for n in (0, 2))
    expected = (DECAY**2 * loops.gram(first) + loops.gram(last)) / (8 * DECAY**2 + 8)
    assert_close(factors(optimizer, "A")["extra"], expected)
    assert_close(counts(optimizer, "G")["head"], 8 * (1 + DECAY + DECAY**2))


# --- other passes through the model ----------------------------------------------------------


def per_sample_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    def loss(values: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, one[None]), label[None])

    own = dict(model.named_parameters())
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(own, x, y)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "per-sample-gradients": per_sample_gradients,
    "jacrev": lambda model, x, y: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x, y: torch.func.jacfwd(model)(x),
    "vmap": lambda model, x, y: torch.func.vmap(model)(x),
    "vmap-jacrev": lambda model, x, y: torch.func.vmap(torch.func.jacrev(model))(x),
    "jvp": lambda model, x, y: torch.func.jvp(model, (x,), (x,)),
    "evaluation": lambda model, x, y: model.eval()(x).sum().backward(),
}


@pytest.mark.parametrize("loss_average", ["batch", "token"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_and_evaluation_observe_nothing(
    transform: str, loss_average: Any
) -> None:
    """A `torch.func` pass works on a watched model and leaves the steps around it as they are."""
    results = []
    for way in ("plain", transform):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = kfac(model, loss_average=loss_average)
        for number in range(2):
            if way != "plain":
                TRANSFORMS[way](model, *batch(9))
                assert not pending(optimizer)
            model.train()
            step(model, optimizer, batch(number))
        results.append((parameters(model), optimizer.state_dict()))
    assert_same(*results)


def test_a_functional_call_with_the_models_own_weights_is_a_forward() -> None:
    """The same tensors are the same layer."""
    model, twin = mlp(), mlp()
    optimizer, reference = kfac(model), kfac(twin)
    x, y = batch()
    own = dict(model.named_parameters())
    F.cross_entropy(torch.func.functional_call(model, own, x), y).backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_same(parameters(model), parameters(twin))


@pytest.mark.parametrize("loss_average", ["batch", "token"])
def test_many_gradients_at_once_are_not_those_of_a_loss(loss_average: Any) -> None:
    """`is_grads_batched` works on a watched model; the forward counts, its output gradients do not."""
    model, twin = mlp(), mlp()
    optimizer, reference = (frozen_kfac(m, loss_average=loss_average) for m in (model, twin))
    x, y = batch()
    outputs = model(x)
    directions = torch.eye(3)[:, None].expand(3, 8, 3)
    torch.autograd.grad(
        outputs, [model[0].weight], directions, is_grads_batched=True, retain_graph=True
    )
    F.cross_entropy(outputs, y).backward()
    optimizer.step()
    step(twin, reference, (x, y))
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


# --- learning rates and bases ----------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.8),
    "swa": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


def advance(scheduler: Any) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("rescale", [None, "kl-clip"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_does_to_kfac_what_it_does_to_its_base(name: str, rescale: Any) -> None:
    """Rates and momenta are those of a plain SGD, and the steps those of rates set by hand."""
    plain = SGD(mlp().parameters(), lr=0.1, momentum=0.5)
    scheduler, expected = SCHEDULERS[name](plain), []
    for _ in range(6):
        expected.append({key: plain.param_groups[0][key] for key in ("lr", "momentum")})
        plain.step()
        advance(scheduler)
    assert len({one["lr"] for one in expected}) > 1

    model, twin = mlp(), mlp()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.1, momentum=0.5), rescale=rescale)
    reference = kfac(twin, SGD(twin.parameters(), lr=0.1, momentum=0.5), rescale=rescale)
    scheduler = SCHEDULERS[name](optimizer)
    for number, values in enumerate(expected):
        assert {key: optimizer.param_groups[0][key] for key in values} == values
        step(model, optimizer, batch(number))
        advance(scheduler)
        reference.param_groups[0].update(values)
        step(twin, reference, batch(number))
    assert_same(parameters(model), parameters(twin))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
def test_fast_paths_of_a_base_give_what_its_plain_loop_gives(
    kind: Callable[..., Optimizer], options: dict[str, bool]
) -> None:
    """`capturable` is for accelerators only: torch refuses it on a CPU."""
    results = []
    for more in (options, {"foreach": False}):
        model = mlp()
        optimizer = kfac(model, kind(model.parameters(), lr=0.05, weight_decay=0.01, **more))
        train(model, optimizer, range(4))
        results.append(parameters(model))
    assert_close(*results)


def test_stochastic_weight_averaging() -> None:
    """The average is that of the weights; collecting its batch norms observes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kfac(model)
    average, seen = AveragedModel(model), []
    for number in range(3):
        step(model, optimizer, batch(number))
        average.update_parameters(model)
        seen.append(parameters(model))
        for network in (average, model):
            update_bn([batch(9)[0]], network)
        assert not pending(optimizer)
    expected = {name: sum(one[name] for one in seen) / 3 for name in seen[0]}
    assert_close(parameters(average.module), expected)
