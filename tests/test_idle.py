"""Layers and tokens that are not used for a while stay usable: their last mean stays their mean."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.protocol.block import Statistic
from kronfac.statistics.running import Running, new_count


class TwoHeads(nn.Module):
    """Two heads of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        h = self.body(x).relu()
        out: Tensor = self.second(h) if second else self.first(h)
        return out


def optimizer_of(model: nn.Module, **options: object) -> kronfac.KFAC:
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = {"factor_every": 1, "refresh_every": 5, **options}
    return kronfac.KFAC(model, base, **settings)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: kronfac.KFAC, steps: int, second: bool) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(8, 4, generator=generator)
        model(x, second).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("solver", ["eigen", "separable", "cholesky", "newton-schulz"])
def test_a_head_that_is_idle_for_long_does_not_stop_training(solver: str) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = optimizer_of(model, solver=solver, decay=0.05)
    train(model, optimizer, 1, second=True)
    weight = model.second.weight.detach().clone()
    train(model, optimizer, 120, second=False)
    assert_close(model.second.weight.detach(), weight)
    assert optimizer.stats()["failures"]["second"] == 0
    train(model, optimizer, 1, second=True)  # from the last good solution, not 1/γ times too long
    assert (model.second.weight.detach() - weight).norm() < 0.1


def preconditioned(model: TwoHeads, optimizer: kronfac.KFAC) -> Tensor:
    """What the optimizer makes of a fixed gradient of the second head."""
    optimizer.zero_grad()
    model.second.weight.grad = torch.ones_like(model.second.weight)
    assert model.second.bias is not None
    model.second.bias.grad = torch.zeros_like(model.second.bias)
    with optimizer.no_capture():
        optimizer.step()
    return model.second.weight.grad.clone()


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_an_idle_head_is_preconditioned_as_when_it_was_last_used(solver: str) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = optimizer_of(model, solver=solver, rescale=None, on_missing="ignore")
    train(model, optimizer, 6, second=True)
    before = preconditioned(model, optimizer)
    train(model, optimizer, 160, second=False)
    after = preconditioned(model, optimizer)
    assert (after - before).norm() < 1e-3 * before.norm()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_survives_any_number_of_decays(decay: float, dtype: torch.dtype) -> None:
    running = Running(Statistic((3,), source="input"))
    total = torch.tensor([1.0, 2.0, 1e-3], dtype=dtype)
    running.add(total.clone(), new_count(4.0, total.device))
    for _ in range(5000):
        running.decay(decay)
    mean = running.mean()
    assert mean is not None
    assert_close(mean, total / 4, rtol=1e-4, atol=0)
    running.add(total.clone(), new_count(1.0, total.device))  # the past does not count any more
    mean = running.mean()
    assert mean is not None
    assert_close(mean, total)


def test_decay_is_exact_as_long_as_a_layer_is_used() -> None:
    running = Running(Statistic((1,), source="input"))
    running.add(torch.tensor([2.0]), new_count(1.0, torch.device("cpu")))
    running.decay(0.5)
    running.add(torch.tensor([8.0]), new_count(1.0, torch.device("cpu")))
    assert_close(running.mean(), torch.tensor([9.0 / 1.5]))


# --- numbers that are too large --------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e12, 1e15, 1e18])
def test_huge_targets_fail_softly(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    base = torch.optim.SGD(model.parameters(), lr=1e-30)
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=1, rescale=None)
    x, y = torch.randn(64, 8), torch.randn(64, 1) * scale
    for _ in range(8):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    if scale == 1e18:
        assert optimizer.stats()["dropped"]["2"] == 8


# --- tokens ----------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids)).mean(1)
        return out


def embed(model: nn.Module, optimizer: kronfac.KFAC, ids: list[list[int]], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor(ids)).square().sum(-1).mean().backward()
        optimizer.step()


def lengthening(model: Tokens, optimizer: kronfac.KFAC) -> Tensor:
    """How much longer the optimizer makes the gradient of each token."""
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    with optimizer.no_capture():
        optimizer.step()
    grad = model.embedding.weight.grad
    assert grad is not None
    return grad.norm(dim=1) / (1e-3 * 3**0.5)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("idle", [1, 8, 160])
def test_a_token_seen_long_ago_counts_as_one_row(solver: str, idle: int) -> None:
    torch.manual_seed(0)
    model = Tokens()
    base = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = kronfac.KFAC(
        model,
        base,
        factor_every=1,
        refresh_every=1,
        rescale=None,
        solver=solver,  # type: ignore[arg-type]
        damping=1e-4,
        on_missing="ignore",
    )
    embed(model, optimizer, [[0, 1, 2, 3]] * 4, 1)
    embed(model, optimizer, [[0, 1, 1, 2]] * 4, idle)  # 3 is rare, 4 and 5 never come
    entry = optimizer.state_dict()["state"][0]
    expected = entry["kronfac.A.sum"] / entry["kronfac.A.count"]
    expected[3] = torch.maximum(expected[3], 1 / entry["kronfac.A.count"]).float()
    found = lengthening(model, optimizer)
    assert found[4:].tolist() == pytest.approx([1.0, 1.0], rel=1e-5)
    # G is the same for all tokens: their lengths differ by A alone, as far as damping allows
    assert found[3] < 60 * found[1]
    if solver == "eigen":
        values = entry["kronfac.solution.A.values"]
        assert_close(values, expected)


def test_an_idle_embedding_keeps_its_last_mean() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"tokens": Tokens(), "other": nn.Linear(4, 4)})
    tokens = model["tokens"]
    optimizer = optimizer_of(model, refresh_every=1, rescale=None)

    def values() -> Tensor:
        found: Tensor = optimizer.state_dict()["state"][0]["kronfac.solution.A.values"]
        return found.clone()

    for ids in ([[0, 1, 2, 3]], [[0, 1, 1, 1]]):
        optimizer.zero_grad()
        tokens(torch.tensor(ids)).square().mean().backward()
        optimizer.step()
    before = values()
    for _ in range(80):
        optimizer.zero_grad()
        model["other"](torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert_close(values(), before)
