"""The length of a step, and momentum before preconditioning."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.rescale.factors import Update, column_factors
from kronfac.step.lengths import lengths, remember
from tests.training import (
    applied,
    assert_close,
    assert_same,
    batch,
    cnn,
    frozen_kfac,
    gradients,
    images,
    kfac,
    loss_of,
    mlp,
    parameters,
    step,
)

pytestmark = pytest.mark.usefixtures("double_precision")


def of_layer(values: dict[str, Tensor], name: str) -> Tensor:
    """Weight and bias of a layer in one vector."""
    return torch.cat([values[f"{name}.weight"].flatten(), values[f"{name}.bias"].flatten()])


def as_matrix(values: dict[str, Tensor], name: str) -> Tensor:
    """Weight and bias of a linear layer side by side."""
    return torch.cat([values[f"{name}.weight"], values[f"{name}.bias"][:, None]], dim=1)


def preconditioned(data: Any, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """What a first step without rescaling applies."""
    return applied(model, frozen_kfac(model, **options), data)[1]


# --- none ------------------------------------------------------------------------------------


def test_none_leaves_steps_as_solved() -> None:
    plain = preconditioned(batch(), mlp())
    model = mlp()
    optimizer = frozen_kfac(model, rescale=None)
    assert_same(applied(model, optimizer, batch())[1], plain)


# --- graft -----------------------------------------------------------------------------------


def test_graft_keeps_the_gradients_norm_per_layer() -> None:
    model = cnn()
    before, after = applied(model, frozen_kfac(model, rescale="graft"), images())
    for name in ("0", "2", "5"):
        assert_close(of_layer(after, name).norm(), of_layer(before, name).norm())


def test_graft_keeps_the_direction() -> None:
    plain = preconditioned(batch(), mlp())
    model = mlp()
    _, after = applied(model, frozen_kfac(model, rescale="graft"), batch())
    for name in ("0", "2", "4"):
        grafted, solved = of_layer(after, name), of_layer(plain, name)
        assert_close(grafted / grafted.norm(), solved / solved.norm())


def test_graft_takes_the_norm_of_the_momentum() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, rescale="graft", momentum=0.5)
    first, _ = applied(model, optimizer, batch(0))
    second, after = applied(model, optimizer, batch(1))
    expected = (0.5 * of_layer(first, "0") + of_layer(second, "0")).norm()
    assert_close(of_layer(after, "0").norm(), expected)


# --- unit ------------------------------------------------------------------------------------


def test_unit_gives_each_matrix_muons_norm() -> None:
    model = cnn()
    _, after = applied(model, frozen_kfac(model, rescale="unit"), images())
    for name, (rows, columns) in {"0": (2, 10), "2": (3, 9), "5": (3, 13)}.items():
        expected = math.sqrt(min(rows, columns)) * math.sqrt(max(1, rows / columns))
        assert float(of_layer(after, name).norm()) == pytest.approx(expected)


def test_unit_gives_tall_matrices_the_longer_norm() -> None:
    model = nn.Linear(2, 9, bias=False)
    optimizer = frozen_kfac(model, rescale="unit")
    model(torch.randn(5, 2)).square().mean().backward()
    optimizer.step()
    assert float(model.weight.grad.norm()) == pytest.approx(3)  # √2·√(9/2)


def test_unit_gives_every_group_of_a_convolution_the_norm() -> None:
    model = nn.Conv1d(4, 6, 3, groups=2, bias=False)
    optimizer = frozen_kfac(model, rescale="unit")
    model(torch.randn(5, 4, 7)).square().mean().backward()
    optimizer.step()
    norms = model.weight.grad.reshape(2, -1).norm(dim=1)
    assert_close(norms, torch.full((2,), math.sqrt(3)))


def test_unit_leaves_parameters_that_are_not_preconditioned() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3))
    before, after = applied(model, frozen_kfac(model, rescale="unit"), batch())
    assert_same(after["1.weight"], before["1.weight"])


# --- orthogonal ------------------------------------------------------------------------------


def test_orthogonal_gives_singular_values_that_are_alike_and_muons_norm() -> None:
    plain = preconditioned(batch(), mlp())
    model = mlp()
    _, after = applied(model, frozen_kfac(model, rescale="orthogonal"), batch())
    for name in ("0", "2", "4"):
        solved, found = as_matrix(plain, name), as_matrix(after, name)
        left, values, right = torch.linalg.svd(solved, full_matrices=False)
        inner = left.T @ found @ right.T  # singular vectors are those of the solved step
        assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-6)
        clear = inner.diagonal()[values > 1e-2 * values.norm()]
        assert float(clear.min()) > 0.5 * float(clear.max()) > 0
        rows, columns = found.shape
        expected = math.sqrt(min(rows, columns) * max(1, rows / columns))
        assert float(found.norm()) == pytest.approx(expected)


def test_orthogonal_takes_equal_shapes_together_as_alone() -> None:
    def norms(depth: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)), nn.Linear(4, 3))
        _, after = applied(model, frozen_kfac(model, rescale="orthogonal"), batch())
        return torch.stack([of_layer(after, str(n)).norm() for n in range(depth)])

    assert_close(norms(3), torch.full((3,), 2.0))
    assert_close(norms(1), torch.full((1,), 2.0))


def test_orthogonal_leaves_parameters_that_are_no_matrices() -> None:
    model = normed()
    before, after = applied(model, frozen_kfac(model, rescale="orthogonal"), batch())
    assert_same(after["1.weight"], before["1.weight"])


# --- auto ------------------------------------------------------------------------------------


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


class Reader(nn.Module):
    """Embeddings and linear layers, as a model of text has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(self.tokens(ids)))))


def read(model: nn.Module, rescale: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ids = torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(0))
    optimizer = frozen_kfac(model, rescale=rescale, loss_average="token")
    return applied(model, optimizer, (ids.flatten(), ids.flatten() % 3))


def test_auto_moves_every_token_of_the_batch_equally_far_along_its_own_step() -> None:
    solved, found = (read(Reader(), rule)[1]["tokens.weight"] for rule in (None, "auto"))
    assert_close(found.square().mean(-1), torch.tensor([1.0, 1, 1, 1, 1, 0, 0]))
    assert_close(nn.functional.normalize(found), nn.functional.normalize(solved))


def test_auto_leaves_tokens_without_statistics_their_gradients() -> None:
    model = Reader()
    optimizer = frozen_kfac(model, rescale="auto", loss_average="token")
    ids = torch.arange(5)
    applied(model, optimizer, (ids, ids % 3))
    optimizer.factor_every = 1000
    ids = torch.arange(7)
    before, after = applied(model, optimizer, (ids, ids % 3))
    assert_same(after["tokens.weight"][5:], before["tokens.weight"][5:])
    assert_close(after["tokens.weight"][:5].square().mean(-1), torch.ones(5))


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_token_that_is_not_in_the_batch_stays_where_it_is(nesterov: bool) -> None:
    model = Reader()
    options = {"momentum": 0.9, "nesterov": nesterov, "loss_average": "token"}
    optimizer = frozen_kfac(model, rescale="auto", **options)
    ids = torch.arange(5)
    applied(model, optimizer, (ids, ids % 3))
    _, after = applied(model, optimizer, (ids[:3], ids[:3] % 3))
    squares = after["tokens.weight"].square().mean(-1)
    assert_close(squares / squares[0], torch.tensor([1.0, 1, 1, 0, 0, 0, 0]))


def test_vanishing_steps_of_tokens_are_none() -> None:
    step = torch.tensor([[1e-320, 1e-200, 1e-3, 0.0]])
    factors = column_factors(Update(step, step, (0.1,)))
    assert_close(step * factors, torch.tensor([[0.0, 0.0, 1.0, 0.0]]))


def test_auto_makes_the_step_of_every_matrix_orthogonal() -> None:
    found = {}
    for rescale in ("auto", "orthogonal"):
        model = cnn()
        found[rescale] = applied(model, frozen_kfac(model, rescale=rescale), images())[1]
    for name in ("0", "2", "5"):
        assert_same(of_layer(found["auto"], name), of_layer(found["orthogonal"], name))


def test_auto_is_the_default() -> None:
    model = mlp()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1))
    _, after = applied(model, optimizer, batch())
    rows, columns = model[0].weight.shape
    expected = math.sqrt(min(rows, columns + 1) * max(1, rows / (columns + 1)))
    assert float(of_layer(after, "0").norm()) == pytest.approx(expected)


def test_norms_get_a_tenth() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    _, after = applied(model, frozen_kfac(model, rescale="auto"), batch())
    both = torch.cat([after["1.weight"], after["1.bias"]])
    assert float(both.square().mean().sqrt()) == pytest.approx(0.1)


# --- coherence -------------------------------------------------------------------------------


def lengths_under(gradients: list[Tensor], mu: float, **options: Any) -> list[float]:
    """Norms of the steps of a lone layer, as a multiple of Muon's norm, for given gradients."""
    model = nn.Linear(3, 3, bias=False)
    base = SGD(model.parameters(), lr=0.0)
    optimizer = kronfac.KFAC(model, base, momentum=mu, factor_every=1, refresh_every=1, **options)
    found = []
    for gradient in gradients:
        optimizer.zero_grad()
        (model(torch.eye(3)) * gradient.T).sum().backward()
        optimizer.step()
        found.append(float(model.weight.grad.norm()) / math.sqrt(3))
    return found


def test_steps_are_as_long_as_gradients_agree() -> None:
    torch.manual_seed(0)
    mu, gradients = 0.9, [torch.randn(3, 3) for _ in range(5)]
    found = lengths_under(gradients, mu)
    total, weight, squares, logs, recent = torch.zeros(3, 3), 0.0, 0.0, [], 0.0
    for gradient, length in zip(gradients, found, strict=True):
        total = mu * total + gradient
        weight, squares = mu * weight + 1, mu * squares + float(gradient.square().sum())
        coherence = float(total.norm()) / math.sqrt(weight * squares)
        logs.append(math.log(float(gradient.square().sum())))
        recent += (logs[-1] - recent) / weight
        size = min(1.0, math.exp((recent - sum(logs) / len(logs)) / 2))
        age = 1 / math.sqrt(1 + (len(logs) - 1) / 100)
        assert length == pytest.approx(2.25 * coherence * size * age, rel=1e-5)


def test_equal_gradients_agree_at_any_scale() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(3, 3)
    for scale in (1e-12, 1.0, 1e12):
        expected = [2.25 / math.sqrt(1 + step / 100) for step in range(3)]
        assert lengths_under([scale * gradient] * 3, 0.9) == pytest.approx(expected, rel=1e-5)


def test_steps_vanish_with_their_gradients() -> None:
    gradient = torch.eye(3)
    found = lengths_under([gradient * 0.5**step for step in range(20)], 0.0001)
    # The mean of the logarithms lags behind by half of what they have fallen.
    age = 1 / math.sqrt(1.19)
    assert found[-1] == pytest.approx(2.25 * age * 0.5**9.5, rel=1e-3)


def test_steps_do_not_grow_with_their_gradients() -> None:
    found = lengths_under([torch.eye(3) * 2.0**step for step in range(9)], 0.0001)
    expected = [2.25 / math.sqrt(1 + step / 100) for step in range(9)]
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_size_is_left_alone_once_the_rate_falls(as_tensor: bool) -> None:
    """A schedule settles it: a falling rate is not made to fall faster, nor does it jump back."""
    names = {"momentum": torch.ones(1), "coherence": torch.ones(2)}
    names |= {"history": torch.zeros(4), "pace": torch.zeros(2), "inputs": torch.zeros(())}

    def after(squares: list[float], rate: float) -> float:
        for square in squares:
            rates = [torch.tensor(rate) if as_tensor else rate]
            names["coherence"][0].mul_(0.9).add_(1)
            remember([names], torch.tensor([square]), rates)
        count, usual, recent, _ = names["history"].tolist()
        assert count == 0 or float(lengths([names])) > 0
        return math.exp(min(0.0, (recent - usual) / 2))

    after([1.0] * 20, 0.01)  # a warm-up
    small = after([1e-4] * 20, 0.1)
    assert small < 0.2
    assert after([1e-8] * 20, 0.09) == small
    assert after([1.0] * 20, 0.01) == small
    assert after([1.0] * 40, 0.1) > small


def test_steps_of_steady_gradients_keep_a_third_of_their_length() -> None:
    names = {"momentum": torch.ones(1), "coherence": torch.ones(2)}
    names |= {"history": torch.zeros(4), "pace": torch.zeros(2), "inputs": torch.zeros(())}
    found = []
    for _ in range(1000):
        remember([names], torch.ones(1), [0.1])
        found.append(float(lengths([names])))
    assert found[99] == pytest.approx(2.25 / math.sqrt(1.99), rel=1e-5)
    assert found[799] == pytest.approx(2.25 / math.sqrt(8.99), rel=1e-5)
    assert found[-1] == pytest.approx(0.75, rel=1e-5)


def test_gradients_that_cancel_make_no_step() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(3, 3)
    found = lengths_under([gradient, -0.9 * gradient], 0.9)
    assert found[1] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rescale", ["unit", "orthogonal"])
def test_rules_with_a_fixed_length_do_not_look_at_that(rescale: str) -> None:
    torch.manual_seed(0)
    found = lengths_under([torch.randn(3, 3) for _ in range(3)], 0.9, rescale=rescale)
    assert found == pytest.approx([1.0] * 3, rel=1e-5)


def test_one_huge_gradient_is_forgotten() -> None:
    gradients = [torch.full((3, 3), 1e25).float(), *[torch.eye(3).float()] * 200]
    torch.set_default_dtype(torch.float32)
    steady = 2.25 / math.sqrt(3)
    # One of 201 logarithms is 120 larger than the others.
    assert 0.7 * steady < lengths_under(gradients, 0.5)[-1] < steady


def test_a_spike_between_others_changes_next_to_nothing() -> None:
    spike = [torch.eye(3)] * 50 + [1e6 * torch.eye(3)] + [torch.eye(3)] * 150
    steady = 2.25 / math.sqrt(3)
    assert lengths_under(spike, 0.5)[-1] == pytest.approx(steady, rel=1e-2)


def test_a_gradient_of_zero_is_not_remembered() -> None:
    gradients = [torch.eye(3)] * 5 + [0 * torch.eye(3)] + [torch.eye(3)] * 5
    found = lengths_under(gradients, 0.001)
    assert found[5] < 0.1 * found[4]
    assert found[-1] == pytest.approx(2.25 / math.sqrt(1.09), rel=1e-3)


def test_zeros_before_the_first_gradient_are_not_remembered() -> None:
    for scale in (1e-9, 1.0, 1e9):
        found = lengths_under([0 * torch.eye(3)] * 2 + [scale * torch.eye(3)] * 3, 0.001)
        assert found[:2] == [0.0, 0.0]
        assert found[-1] == pytest.approx(2.25 / math.sqrt(1.02), rel=1e-3)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_the_bases_own_momentum_makes_no_longer_steps(dampening: float) -> None:
    """It adds up equal steps to ``(1 - dampening)/(1 - μ)`` times one of them."""
    found = []
    for own in ({}, {"momentum": 0.9, "dampening": dampening}):
        model = mlp()
        optimizer = kfac(model, SGD(model.parameters(), lr=0.0, **own), rescale="auto")
        found.append(applied(model, optimizer, batch())[1])
    share = 0.1 / (1 - dampening)
    assert_close(found[1], {name: share * step for name, step in found[0].items()})


@pytest.mark.parametrize("rescale", ["unit", "orthogonal", "graft", None])
def test_other_rules_leave_the_bases_momentum_to_its_owner(rescale: str | None) -> None:
    found = []
    for own in ({}, {"momentum": 0.9}):
        model = mlp()
        optimizer = kfac(model, SGD(model.parameters(), lr=0.0, **own), rescale=rescale)
        found.append(applied(model, optimizer, batch())[1])
    assert_same(*found)


def test_without_momentum_there_is_nothing_to_compare() -> None:
    torch.manual_seed(0)
    found = lengths_under([torch.randn(3, 3) for _ in range(3)], 0.0)
    assert found == pytest.approx([1.0] * 3, rel=1e-5)


# --- KL clip ---------------------------------------------------------------------------------


def grouped(model: nn.Sequential, rates: tuple[float, float], **options: Any) -> kronfac.KFAC:
    """The first layer with a rate of its own."""
    others = [p for module in model[1:] for p in module.parameters()]
    groups = [{"params": model[0].parameters(), "lr": rates[0]}, {"params": others, "lr": rates[1]}]
    return kfac(model, SGD(groups), rescale="kl-clip", **options)


def clip_by_hand(
    before: dict[str, Tensor], solved: dict[str, Tensor], rates: dict[str, float], bound: float
) -> float:
    total = sum(rates[n] ** 2 * float((before[n] * solved[n]).sum()) for n in before)
    return min(1.0, math.sqrt(bound / total))


@pytest.mark.parametrize("bound", [1e-6, 1e-4, 10.0])
@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.5, 0.1), (0.0, 0.1)])
def test_kl_clip_uses_each_groups_own_rate(rates: tuple[float, float], bound: float) -> None:
    solved = preconditioned(batch(), mlp())
    model = mlp()
    before, after = applied(model, grouped(model, rates, kl_clip=bound), batch())
    by_name = {name: rates[0] if name.startswith("0.") else rates[1] for name in before}
    factor = clip_by_hand(before, solved, by_name, bound)
    assert_close(after, {name: value * factor for name, value in solved.items()})


def test_kl_clip_knows_a_bias_with_a_rate_of_its_own() -> None:
    solved = preconditioned(batch(), mlp())
    model = mlp()
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    base = SGD([{"params": biases, "lr": 0.3}, {"params": weights, "lr": 0.1}])
    optimizer = kfac(model, base, rescale="kl-clip", kl_clip=1e-5)
    before, after = applied(model, optimizer, batch())
    rates = {name: 0.3 if name.endswith("bias") else 0.1 for name in before}
    factor = clip_by_hand(before, solved, rates, 1e-5)
    assert_close(after, {name: value * factor for name, value in solved.items()})


def test_kl_clip_accepts_rates_that_are_tensors() -> None:
    model, twin = mlp(), mlp()
    rate = torch.tensor(0.1)
    step(model, kfac(model, SGD(model.parameters(), lr=rate), rescale="kl-clip"), batch())
    step(twin, kfac(twin, SGD(twin.parameters(), lr=0.1), rescale="kl-clip"), batch())
    assert_close(parameters(model), parameters(twin))


def test_a_rate_of_zero_clips_nothing() -> None:
    solved = preconditioned(batch(), mlp())
    model = mlp()
    _, after = applied(model, frozen_kfac(model, rescale="kl-clip", kl_clip=1e-12), batch())
    assert_same(after, solved)


def test_a_negative_sum_clips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronfac.methods.kfac.block import KFACBlock

    monkeypatch.setattr(KFACBlock, "precondition", lambda _, solution, gradient, damping: -gradient)
    model = mlp()
    optimizer = kfac(model, rescale="kl-clip", kl_clip=1e-12)
    before, after = applied(model, optimizer, batch())
    assert_same(after, {name: -value for name, value in before.items()})


def test_stats_say_how_often_the_clip_was_active() -> None:
    model = mlp()
    optimizer = kfac(model, rescale="kl-clip", kl_clip=1e-9)
    step(model, optimizer, batch(0))
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, batch(1))
    stats = optimizer.stats()
    assert (stats["kl_clip_active"], stats["kl_clip_steps"]) == (1, 2)


# --- momentum --------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_taken_before_preconditioning(nesterov: bool) -> None:
    """buf ← μ·buf + V; the solution is applied to buf, or to V + μ·buf."""
    mu = 0.9
    model, twin = mlp(), mlp()
    optimizer = frozen_kfac(model, momentum=mu, nesterov=nesterov)
    reference = frozen_kfac(twin)
    buffer: dict[str, Tensor] = {}
    for number in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, batch(number)).backward()
        loss_of(twin, batch(number)).backward()
        raw = gradients(twin)
        buffer = {name: mu * buffer.get(name, 0) + value for name, value in raw.items()}
        for name, parameter in twin.named_parameters():
            used = raw[name] + mu * buffer[name] if nesterov else buffer[name]
            parameter.grad.copy_(used)
        optimizer.step()
        reference.step()
        assert_close(gradients(model), gradients(twin))


def test_momentum_leaves_parameters_that_are_not_preconditioned() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3))
    optimizer = frozen_kfac(model, momentum=0.9)
    step(model, optimizer, batch(0))
    before, after = applied(model, optimizer, batch(1))
    assert_same(after["1.weight"], before["1.weight"])


@pytest.mark.parametrize("rescale", [None, "graft", "unit", "orthogonal", "kl-clip"])
def test_without_a_solution_the_gradient_passes_as_it_is(
    monkeypatch: pytest.MonkeyPatch, rescale: str | None
) -> None:
    for name in ("eigen", "eigen_batch"):
        monkeypatch.setattr(f"kronfac.methods.kfac.block.{name}", lambda *_: None)
    model = mlp()
    optimizer = frozen_kfac(model, momentum=0.9, rescale=rescale)
    applied(model, optimizer, batch(0))
    before, after = applied(model, optimizer, batch(1))
    assert_same(after, before)


# --- groups ----------------------------------------------------------------------------------


def test_param_groups_split_what_is_preconditioned_from_the_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3))
    chosen, rest = kronfac.param_groups(model, lr=0.02, other_lr=0.3, momentum=0.9)
    assert chosen["params"] == [*model[0].parameters(), *model[2].parameters()]
    assert rest["params"] == list(model[1].parameters())
    assert (chosen["lr"], rest["lr"], rest["momentum"]) == (0.02, 0.3, 0.9)
    assert "momentum" not in chosen


def test_param_groups_leave_out_an_empty_group() -> None:
    assert len(kronfac.param_groups(mlp(), lr=0.1, other_lr=0.2)) == 1


def test_param_groups_follow_include_and_exclude() -> None:
    chosen, rest = kronfac.param_groups(mlp(), lr=0.1, other_lr=0.2, exclude="4")
    assert [len(group["params"]) for group in (chosen, rest)] == [4, 2]


def test_param_groups_hold_every_parameter_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    groups = kronfac.param_groups(model, lr=0.1, other_lr=0.2)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


def test_param_groups_feed_a_base_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3))
    base = SGD(kronfac.param_groups(model, lr=0.02, other_lr=0.3))
    step(model, kfac(model, base, rescale="unit"), batch())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
