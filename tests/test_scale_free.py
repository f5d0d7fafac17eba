"""Weights whose scale the loss does not depend on: found by their gradients, and given longer steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import kronfac
from kronfac.step.lengths import FREE, lengths, remember
from tests.distributed.ranks import run

NORMS = [nn.BatchNorm1d, nn.BatchNorm2d]


def normed(*, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, bias=False),
        nn.BatchNorm2d(12) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12 * 16, 10),
        nn.BatchNorm1d(10) if norm else nn.Identity(),
        nn.Linear(10, 9),
    )


def kfac(model: nn.Module, **options: Any) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    return kronfac.KFAC(model, base, momentum=0.9, nesterov=True, **options)


def step(model: nn.Module, optimizer: Any, seed: int = 0, autocast: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(32, 3, 6, 6, generator=generator).to(dtype)
    y = torch.randint(9, (32,), generator=generator)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = model(x)
    F.cross_entropy(scores.to(dtype), y).backward()
    optimizer.step()


def marks(optimizer: Any) -> dict[str, bool]:
    held = {state.name: state for state in optimizer.layers}
    return {
        name: bool(one.buffers["pace"][1])
        for name, one in held.items()
        if one.rule == "orthogonal" and "pace" in one.buffers
    }


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_in_front_of_batch_norms_are_found(dtype: torch.dtype, autocast: bool) -> None:
    if autocast and dtype == torch.float64:
        pytest.skip("autocast leaves float64 alone")
    model = normed().to(dtype)
    optimizer = kfac(model)
    step(model, optimizer, autocast=autocast)
    assert marks(optimizer) == {"0": True, "4": True, "6": False}


def test_others_are_not() -> None:
    model = normed(norm=False)
    optimizer = kfac(model)
    step(model, optimizer)
    assert marks(optimizer) == {"0": False, "4": False, "6": False}


def test_frozen_statistics_make_the_scale_count() -> None:
    model = normed()
    model[1].eval()
    optimizer = kfac(model, exclude=NORMS)
    step(model, optimizer)
    assert marks(optimizer) == {"0": False, "4": True, "6": False}
    model[5].eval()
    step(model, optimizer)  # the early refresh after one step
    assert marks(optimizer) == {"0": False, "4": False, "6": False}


def test_a_gradient_of_zero_says_nothing() -> None:
    """Residual branches often start with a norm whose weight is zero."""
    model = normed()
    nn.init.zeros_(model[5].weight)
    optimizer = kfac(model)
    step(model, optimizer)
    assert marks(optimizer)["4"] is False
    step(model, optimizer, seed=1)
    assert marks(optimizer)["4"] is True


def test_a_gradient_of_few_outputs_says_nothing() -> None:
    model = nn.Linear(5, 20, bias=False)
    optimizer = kfac(model)
    for _ in range(2):
        direction = torch.randn(5)
        direction -= (
            model.weight[3].detach()
            @ direction
            * model.weight[3].detach()
            / float(model.weight[3].detach().square().sum())
        )
        optimizer.zero_grad()
        scores = model(torch.eye(5))  # the gradient of output 3 is orthogonal to its weight
        (scores[:, 3] @ direction + 1e-4 * scores.square().sum()).backward()
        optimizer.step()
        assert marks(optimizer) == {"": False}


def test_few_outputs_may_be_orthogonal_by_chance() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 9))
    optimizer = kfac(model)
    optimizer.zero_grad()
    model(torch.randn(16, 5)).square().mean().backward()
    optimizer.step()
    assert marks(optimizer)["0"] is False


def test_steps_are_longer_there() -> None:
    """What remains is the same: the first step of two networks that differ by a norm's mode."""
    found = []
    for scale in (True, False):
        model = normed()
        optimizer = kfac(model, exclude=NORMS)
        before = model[0].weight.detach().clone()
        if not scale:
            model[1].eval()
        step(model, optimizer)
        moved = (model[0].weight.detach() - before).flatten(1)
        found.append(float(moved.norm()) / (0.01 * 12**0.5))
        inputs = float(optimizer.layers[0].buffers["inputs"])
    longer, plain = found
    norm = float(normed()[0].weight.detach().norm()) / 12**0.5
    assert plain == pytest.approx(2.25 / max(1, inputs), rel=1e-4)
    assert longer == pytest.approx(2.25 * FREE * norm, rel=2e-2)  # a chord of the arc


def test_it_is_saved() -> None:
    model = normed()
    optimizer = kfac(model)
    for seed in range(3):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    second = kfac(other)
    second.load_state_dict(optimizer.state_dict())
    assert marks(second) == marks(optimizer)
    for net, own in ((model, optimizer), (other, second)):
        step(net, own, seed=5)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_older_checkpoint_loads() -> None:
    model = normed()
    optimizer = kfac(model)
    step(model, optimizer)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        for name in [name for name in entry if name.endswith("pace")]:
            del entry[name]
    optimizer.detach()
    second = kfac(model)
    second.load_state_dict(saved)
    step(model, second, seed=1)
    assert marks(second) == {"0": True, "4": True, "6": False}


def test_no_other_rule_looks_at_it() -> None:
    model = normed()
    optimizer = kfac(model, rescale="orthogonal", exclude=NORMS)
    step(model, optimizer)
    assert not any(marks(optimizer).values())


def on_shards(rank: int) -> dict[str, bool]:
    model = normed()
    fully_shard(model)
    optimizer = kfac(model)
    step(model, optimizer, seed=rank)
    return marks(optimizer)


def test_shards_are_looked_at_together() -> None:
    """Each layer has one owner, which knows."""
    found: dict[str, bool] = {}
    for own in run(2, on_shards):
        assert not set(found) & set(own)
        found |= own
    assert found == {"0": True, "4": True, "6": False}


def transposed(rank: int) -> dict[str, bool]:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(256, 8), nn.Tanh(), nn.Linear(256, 9))
    fully_shard(model)
    optimizer = kfac(model)
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(32, 8)), torch.randint(9, (32,))).backward()
    optimizer.step()
    return marks(optimizer)


def test_transposed_weights_on_shards_are_not_taken_for_such() -> None:
    found: dict[str, bool] = {}
    for own in run(2, transposed):
        found |= own
    assert found == {"0": False, "2": False}


def by_inputs(rank: int) -> dict[str, bool]:
    """No rank has a whole row: of a weight that is cut along inputs, and of one stored by inputs."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 12, 3, bias=False),
        nn.BatchNorm2d(12),
        nn.Flatten(),
        Conv1D(10, 12 * 16),
        nn.BatchNorm1d(10),
        nn.Linear(10, 1),
    )
    fully_shard(model[0], shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(model)
    optimizer = kfac(model)
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(32, 4, 6, 6, generator=generator)).sigmoid().mean().backward()
    optimizer.step()
    return marks(optimizer)


def test_shards_that_are_not_rows_are_looked_at_together() -> None:
    found: dict[str, bool] = {}
    for own in run(2, by_inputs):
        found |= own
    assert found == {"0": True, "3": True, "5": False}


def test_it_is_kept_beside_the_weight() -> None:
    """Numbers that ranks add up may be elsewhere."""
    model = normed()
    optimizer = kfac(model)
    step(model, optimizer)
    for state in optimizer.layers:
        assert state.buffers["pace"].device == state.layer.weight.device
        assert state.buffers["pace"].dtype == state.layer.factor_dtype


# --- what oscillates --------------------------------------------------------------------------


def after(rate: float | Tensor, momentum: Tensor, steps: int = 100) -> float:
    """Length of a layer's step at a constant rate, and after as many steps at another one."""
    names = {"momentum": momentum, "coherence": torch.ones(2)}
    names |= {"history": torch.zeros(4), "pace": torch.zeros(2), "inputs": torch.zeros(())}
    found = torch.zeros(1)
    for count in range(100 + steps):
        names["coherence"].mul_(0.9).add_(1)
        remember([names], torch.ones(1), [0.1 if count < 100 else rate])
        found = lengths([names])
    return float(found)


def aged(count: int) -> float:
    """Length of a step whose gradients agree."""
    return 2.25 / (1 + (count - 1) / 100) ** 0.5


NOISE = (0.1 / 1.9) ** 0.5


@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradients_that_turn_back_count_as_noise_while_the_rate_falls(as_tensor: bool) -> None:
    rate = 0.09
    falling = torch.tensor(rate) if as_tensor else rate
    turning, steady = torch.full((1,), 0.3), torch.full((1,), 5.0)
    assert after(0.1, turning) == pytest.approx(0.03 * aged(200), rel=1e-3)
    assert after(falling, turning) == pytest.approx(NOISE * aged(100), rel=1e-3)
    assert after(falling, steady) == pytest.approx(after(0.1, steady))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_only_steps_of_noise_age_a_layer_while_the_rate_falls(share: float) -> None:
    """A coherence of half that of noise ages by a sixteenth of a step."""
    momentum = torch.full((1,), share * NOISE * 10)
    count = 100 + 400 * share**4
    expected = max(2.25 / (1 + (count - 1) / 100) ** 0.5, 2.25 / 3)
    assert after(0.09, momentum, 400) == pytest.approx(NOISE * expected, rel=1e-2)


def test_idle_layers_do_not_get_younger_than_new_ones() -> None:
    names = {"momentum": torch.full((1,), 0.1), "coherence": torch.tensor([10.0, 10.0])}
    names |= {
        "history": torch.tensor([2.0, 0.0, 0.0, 0.1]),
        "pace": torch.zeros(2),
        "inputs": torch.zeros(()),
    }
    for _ in range(5):  # without gradients
        remember([names], torch.zeros(1), [0.01])
        lengths([names])
    assert names["history"][0] == 0
