"""Weights in front of batch norms keep their norm, and steps are a share of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kronfac
from kronfac.step.kept_norms import plain_rates
from kronfac.step.lengths import FREE, lengths
from tests.distributed.ranks import run

KEPT, OTHERS = ("0", "4"), ("7",)
STEPS = 6


def network() -> nn.Sequential:
    """Convolutions and a linear layer in front of norms without an epsilon, and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.BatchNorm2d(12, eps=1e-30),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12 * 16, 10, bias=False),
        nn.BatchNorm1d(10, eps=1e-30),
        nn.Tanh(),
        nn.Linear(10, 9),
    ).double()


def kfac(model: nn.Module, lr: Any = 0.05, **options: Any) -> Any:
    base = torch.optim.SGD(model.parameters(), **{"lr": lr, **options.pop("base", {})})
    given = {"momentum": 0.9, "nesterov": True, "factor_every": 1, "refresh_every": 2}
    return kronfac.KFAC(model, base, **given, **options)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> list[float]:
    losses = []
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 3, 6, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(9, (32,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return {name: named[f"{name}.weight"].detach().clone() for name in (*KEPT, *OTHERS)}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_norms_stay_as_they_are(as_tensor: bool) -> None:
    model = network()
    before = weights(model)
    train(model, kfac(model, lr=torch.tensor(0.05) if as_tensor else 0.05))
    after = weights(model)
    for name in KEPT:
        assert float(after[name].norm()) == pytest.approx(float(before[name].norm()), rel=1e-9)
        assert float((after[name] - before[name]).norm() / before[name].norm()) > 0.1
    for name in OTHERS:
        assert abs(float(after[name].norm() / before[name].norm()) - 1) > 1e-4


def test_groups_with_rates_of_their_own_do_so_too() -> None:
    model = network()
    before = weights(model)
    own = [
        {"params": list(layer.parameters()), "lr": 0.02 * (k + 1)} for k, layer in enumerate(model)
    ]
    base = torch.optim.SGD([group for group in own if group["params"]])
    train(model, kronfac.KFAC(model, base, momentum=0.9, nesterov=True))
    for name, weight in weights(model).items():
        assert (abs(float(weight.norm() / before[name].norm()) - 1) < 1e-9) == (name in KEPT)


def test_a_step_turns_a_weight_by_its_share() -> None:
    """The first step is ``2.25 FREE`` times the rate, in shares of the weight."""
    model = network()
    before = weights(model)
    train(model, kfac(model, lr=0.01), steps=1)
    turn = 2.25 * FREE * 0.01
    for name, weight in weights(model).items():
        if name in KEPT:
            cosine = float((weight * before[name]).sum() / before[name].square().sum())
            assert cosine == pytest.approx(1 / (1 + turn**2) ** 0.5, abs=2e-4)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_scale_of_a_weight_changes_nothing(scale: float) -> None:
    losses = []
    for factor in (1.0, scale):
        model = network()
        with torch.no_grad():
            for name in KEPT:
                model.get_parameter(f"{name}.weight").mul_(factor)
            model[0].bias.mul_(factor)
        # A bias in front of a norm has a gradient of zero but for rounding.
        model[0].bias.requires_grad_(False)
        losses.append(train(model, kfac(model)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_weight_decay_does_not_shrink_them() -> None:
    model = network()
    before = weights(model)
    train(model, kfac(model, base={"weight_decay": 0.1}), steps=12)
    for name in KEPT:  # by one step's decay
        assert float(weights(model)[name].norm() / before[name].norm()) == pytest.approx(
            0.995, abs=1e-3
        )


def test_a_rate_of_zero_moves_nothing() -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, kfac(model, lr=0.0), steps=3)
    assert all(
        torch.equal(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True)
    )


def test_a_rate_that_falls_to_zero_is_fine() -> None:
    model = network()
    before, optimizer = weights(model), kfac(model)
    for rate in (0.1, 1e-8, 0.0, 1e-30, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        train(model, optimizer, steps=1)
    for name in KEPT:
        assert float(weights(model)[name].norm() / before[name].norm()) == pytest.approx(
            1, rel=1e-9
        )


def test_networks_without_such_norms_are_not_looked_at() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(108, 12), nn.LayerNorm(12), nn.Linear(12, 9)
    ).double()
    optimizer = kfac(model)
    train(model, optimizer)
    assert not any(s.buffers["pace"][1] for s in optimizer.layers if "pace" in s.buffers)


def test_half_precision_keeps_norms_to_its_rounding() -> None:
    model = network().bfloat16()
    for module in model:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eps = 1e-5
    before, optimizer = weights(model), kfac(model)
    for seed in range(STEPS):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 3, 6, 6, generator=generator).bfloat16()
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), torch.arange(32) % 9).backward()
        optimizer.step()
    for name in KEPT:
        ratio = float(weights(model)[name].float().norm() / before[name].float().norm())
        assert ratio == pytest.approx(1, abs=5e-3)


def test_only_plain_sgd_takes_a_gradient_as_it_is() -> None:
    p = nn.Parameter(torch.zeros(2))
    assert plain_rates(torch.optim.SGD([p], lr=0.1).param_groups) == {p: 0.1}
    others = [
        torch.optim.SGD([p], lr=0.1, momentum=0.9),
        torch.optim.SGD([p], lr=0.1, maximize=True),
        torch.optim.RMSprop([p], lr=0.1),
        torch.optim.AdamW([p], lr=0.1),
    ]
    assert not any(plain_rates(one.param_groups) for one in others)


# --- several ranks, all of which see the same batch ---------------------------------------------------


def on_rank(rank: int, scheme: Any) -> dict[str, Tensor]:
    model: nn.Module = network()
    inner = model
    if scheme == "shards":
        fully_shard(model[0])
        fully_shard(model)
        optimizer = kfac(model)
    else:
        model = DistributedDataParallel(model)
        optimizer = kfac(model, distribute=scheme)
    train(model, optimizer)
    parameters = dict(inner.named_parameters()).items()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in parameters}


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt", "layer-parallel", "shards"])
def test_ranks_keep_the_norms_of_one_process(scheme: str) -> None:
    model = network()
    alone = kfac(model)
    train(model, alone)
    expected = dict(model.named_parameters())
    for found in run(2, on_rank, scheme):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-6, atol=1e-9)


def test_late_steps_are_alike_at_high_rates() -> None:
    """Twice the rate turns as far after many steps, and twice as far at first."""
    kept = {"momentum": torch.ones(1), "coherence": torch.ones(2), "inputs": torch.zeros(())}
    turned = {}
    for count in (1.0, 1e6):
        for rate in (0.05, 0.1, 0.2, 0.8):
            known = torch.tensor([count, 0.0, 0.0, rate]), torch.tensor([rate, 1.0])
            found = lengths([kept | {"history": known[0], "pace": known[1]}])
            assert found is not None
            turned[count, rate] = rate * float(found)
    for count, rate, others in ((1.0, 0.2, 2.0), (1e6, 0.2, 1.0), (1e6, 0.8, 1.0)):
        assert turned[count, rate] == pytest.approx(others * turned[count, 0.1], rel=1e-4)
    for count in (1.0, 1e6):
        assert turned[count, 0.05] == pytest.approx(0.5 * turned[count, 0.1], rel=1e-5)
