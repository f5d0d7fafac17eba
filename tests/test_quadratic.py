"""``rescale="quadratic"``: learning rate and momentum by the quadratic model."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import kronfac
from kronfac import LevenbergMarquardt
from kronfac.adaptive.damping import AdaptiveDamping
from kronfac.capture.fisher import hessian_product
from kronfac.rescale.quadratic import MAX_MOMENTUM, best_weights
from tests import oracles
from tests.training import (
    CLASSES,
    INPUTS,
    assert_close,
    assert_same,
    batch,
    cnn,
    factors,
    gradients,
    images,
    kfac,
    loss_of,
    mlp,
    parameters,
    saved_and_loaded,
    snapshot,
    step,
)

pytestmark = pytest.mark.usefixtures("double_precision")

LIKELIHOODS = ["categorical", "bernoulli", "gaussian"]
GAMMA = 0.1


def quadratic(model: nn.Module, lr: float = 1.0, **options: Any) -> kronfac.KFAC:
    base = SGD(model.parameters(), lr=lr)
    return kfac(model, base, **({"damping": GAMMA, "rescale": "quadratic"} | options))


def closure_of(model: nn.Module, optimizer: kronfac.KFAC, data: tuple[Tensor, Tensor]) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(data[0])
        optimizer.observe(outputs)
        loss = F.cross_entropy(outputs, data[1])
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, optimizer: kronfac.KFAC, numbers: Any) -> None:
    for number in numbers:
        optimizer.step(closure_of(model, optimizer, batch(number)))


def flat(values: Any) -> Tensor:
    return torch.cat([value.detach().flatten() for value in values])


def dense_ggn(model: nn.Module, outputs: Tensor, likelihood: Any, mask: Tensor) -> Tensor:
    """``Σ Jᵀ H J`` over all parameters and loss terms that count, one output at a time."""
    own = list(model.parameters())
    total = torch.zeros(())
    for term, keep in zip(outputs.flatten(0, -2), mask.flatten(), strict=True):
        rows = [
            flat(torch.autograd.grad(one, own, retain_graph=True, materialize_grads=True))
            for one in term
        ]
        J = torch.stack(rows)
        total = total + keep * J.T @ oracles.loss_hessian(term, likelihood) @ J
    return total


# --- exact products --------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_hessian_products_are_those_of_the_dense_hessian(likelihood: Any) -> None:
    torch.manual_seed(0)
    scores, vectors = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    found = hessian_product(scores, likelihood, vectors)
    for index in [(n, t) for n in range(2) for t in range(3)]:
        expected = oracles.loss_hessian(scores[index], likelihood) @ vectors[index]
        assert_close(found[index], expected)


LOSS_AVERAGES = {"batch": 4.0, "token": 9.0, "number": 7.0, "sum": 1.0}


@pytest.mark.parametrize("average", LOSS_AVERAGES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("how", ["mask", "ignore_index"])
def test_the_update_is_that_of_the_dense_curvature(likelihood: str, average: str, how: str) -> None:
    """Three steps, ``w = -(VᵀCV + γVᵀV)⁻¹ Vᵀ∇L`` with a dense C, for outputs ``[N, T, C]``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))
    reference = copy.deepcopy(model)
    x = torch.randn(4, 3, INPUTS)
    keep = torch.ones(4, 3)
    keep[0, 1] = keep[2, 0] = keep[2, 2] = 0
    divisor = LOSS_AVERAGES[average]
    option = {"number": divisor, "sum": None}.get(average, average)
    optimizer = quadratic(model, loss_average=option)
    solved = kfac(
        reference, SGD(reference.parameters(), lr=0.0), damping=GAMMA, loss_average=option
    )
    last = torch.zeros(sum(p.numel() for p in model.parameters()))
    for number in range(3):

        def loss_from(outputs: Tensor) -> Tensor:
            return (outputs.sin().sum(-1) * keep).sum() / divisor

        def closure() -> Tensor:
            optimizer.zero_grad()
            outputs = model(x)
            if how == "mask":
                optimizer.observe(outputs, likelihood, mask=keep)
            else:
                optimizer.observe(outputs, likelihood, mask=keep.long() - 1, ignore_index=-1)
            loss = loss_from(outputs)
            loss.backward()
            return loss

        reference.load_state_dict(model.state_dict())
        solved.zero_grad()
        with solved.no_capture():
            C = dense_ggn(reference, reference(x), likelihood, keep) / divisor
        loss_from(reference(x)).backward()
        gradient = flat(p.grad for p in reference.parameters())
        solved.step()
        v = flat(p.grad for p in reference.parameters())
        V = torch.stack([v, last] if number else [v], dim=1)
        w = -torch.linalg.solve(V.T @ C @ V + GAMMA * V.T @ V, V.T @ gradient)
        before = flat(model.parameters())
        optimizer.step(closure)
        last = V @ w
        assert_close(flat(model.parameters()) - before, last)
        stats = optimizer.stats()
        expected = [-float(w[0]), float(w[1]) if number else 0.0]
        assert [stats["learning_rate"], stats["momentum"]] == pytest.approx(expected)


def test_several_forwards_are_one_batch() -> None:
    model, twin = mlp(), mlp()
    optimizer, whole = quadratic(model), quadratic(twin)
    x, y = batch(0, samples=8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in (slice(0, 3), slice(3, 8)):
            outputs = model(x[part])
            optimizer.observe(outputs)
            loss = F.cross_entropy(outputs, y[part], reduction="sum") / 8
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(2):
        optimizer.step(closure)
        whole.step(closure_of(twin, whole, (x, y)))
    assert_close(parameters(model), parameters(twin))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Any:
        return self.net[4](checkpoint(self.net[:4], x, use_reentrant=self.reentrant))


def test_activation_checkpoints_change_nothing() -> None:
    model, twin = Checkpointed(reentrant=False), mlp()
    optimizer, plain = quadratic(model), quadratic(twin)
    train(model, optimizer, range(3))
    train(twin, plain, range(3))
    assert_close(parameters(model.net), parameters(twin))


def test_reentrant_checkpoints_are_refused() -> None:
    model = Checkpointed(reentrant=True)
    optimizer = quadratic(model)
    data = (batch()[0].requires_grad_(), batch()[1])
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        optimizer.step(closure_of(model, optimizer, data))


def test_convolutions_with_activations_in_place() -> None:
    """The first update is where the damped model along it has its minimum."""
    model = cnn()
    optimizer = quadratic(model)
    x, y = images()
    own = list(model.parameters())
    with optimizer.no_capture():
        outputs = model(x)
        C = dense_ggn(model, outputs, "categorical", torch.ones(len(x))) / len(x)
        gradient = flat(torch.autograd.grad(F.cross_entropy(outputs, y), own))
    before = flat(own)
    optimizer.step(closure_of(model, optimizer, (x, y)))
    update = flat(own) - before
    assert_close(update @ (C @ update + GAMMA * update), -update @ gradient)


# --- closed forms ----------------------------------------------------------------------------


class Regression:
    """Linear least squares, ``½‖Wx - y‖²`` per sample."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(9, 4), torch.randn(9, 2)
        self.model = nn.Linear(4, 2, bias=False)
        self.optimizer = quadratic(self.model, **options)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        outputs = self.model(self.x)
        self.optimizer.observe(outputs, likelihood="gaussian")
        loss = (outputs - self.y).square().sum() / (2 * len(self.x))
        loss.backward()
        return loss

    @property
    def solution(self) -> Tensor:
        return torch.linalg.lstsq(self.x, self.y).solution.T


def test_with_the_exact_fisher_linear_regression_is_solved_in_one_step() -> None:
    problem = Regression(fisher="exact", damping=1e-12)
    problem.optimizer.step(problem)
    torch.testing.assert_close(problem.model.weight.detach(), problem.solution)
    stats = problem.optimizer.stats()
    assert (stats["learning_rate"], stats["momentum"]) == (pytest.approx(1), 0)


def test_the_damped_solution_needs_no_other_length() -> None:
    """``vᵀ(C + γI)v = vᵀ∇L`` for ``v = (C + γI)⁻¹∇L``."""
    problem = Regression(fisher="exact", damping=0.3)
    problem.optimizer.step(problem)
    assert problem.optimizer.stats()["learning_rate"] == pytest.approx(1)


def test_raw_gradients_become_conjugate_gradients() -> None:
    """The best step in the span of gradient and last step: as many steps as dimensions."""
    problem = Regression(exclude="*", damping=1e-14)
    problem.y = problem.y[:, :1].expand(-1, 2)  # both rows of the weight see the same gradient
    nn.init.zeros_(problem.model.weight)
    for done in range(4):
        gap = (problem.model.weight.detach() - problem.solution).abs().max()
        assert float(gap) > 1e-3, done
        problem.optimizer.step(problem)
    torch.testing.assert_close(problem.model.weight.detach(), problem.solution)


def test_the_momentum_of_the_first_step_is_zero_and_then_not() -> None:
    model = mlp()
    optimizer = quadratic(model)
    train(model, optimizer, [0])
    assert optimizer.stats()["momentum"] == 0
    train(model, optimizer, [1])
    assert optimizer.stats()["momentum"] != 0


def test_the_bases_rate_multiplies_the_step_and_not_what_is_kept() -> None:
    model, twin = mlp(), mlp()
    whole, half = quadratic(model), quadratic(twin, lr=0.5)
    start = parameters(model)
    train(model, whole, [0])
    train(twin, half, [0])
    full = {name: value - start[name] for name, value in parameters(model).items()}
    assert_close(parameters(twin), {name: start[name] + value / 2 for name, value in full.items()})
    kept = [entry["kronfac.update"] for entry in half.state_dict()["state"].values()]
    assert_close(dict(zip(full, kept, strict=True)), full)
    assert_close(gradients(twin), {name: -value for name, value in full.items()})


# --- what it leaves alone --------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["empirical", "exact", "forward"])
def test_statistics_are_those_of_one_run(fisher: str) -> None:
    model, twin = mlp(), mlp()
    optimizer = quadratic(model, fisher=fisher)
    plain = kfac(twin, SGD(twin.parameters(), lr=0.0), fisher=fisher)
    train(model, optimizer, [0])
    if fisher == "exact":
        plain.step(closure_of(twin, plain, batch()))
    else:
        step(twin, plain, batch())
    assert_close(factors(optimizer, "A"), factors(plain, "A"))
    if fisher != "forward":
        assert_close(factors(optimizer, "G"), factors(plain, "G"))


def test_the_further_run_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES)
    )
    optimizer = quadratic(model, fisher="mc")
    drawn = []

    def closure() -> Tensor:
        drawn.append(torch.rand(2))
        return closure_of(model, optimizer, batch())()

    torch.manual_seed(1)
    optimizer.step(closure)
    found = torch.get_rng_state()
    torch.manual_seed(1)
    torch.rand(2)
    model(batch()[0])
    assert_same(found, torch.get_rng_state())
    assert_same(drawn[0], drawn[1])
    assert int(model[1].num_batches_tracked) == 2  # one of the step, one of this test


# --- where the model has no answer -----------------------------------------------------------


@pytest.mark.parametrize(
    ("curvature", "slopes", "weights"),
    [
        ([[2.0]], [3.0], (-1.5, 0.0)),
        ([[2.0, 0.0], [0.0, 4.0]], [3.0, 2.0], (-1.5, -0.5)),
        ([[2.0, 2.0], [2.0, 2.0]], [3.0, 3.0], (-1.5, 0.0)),
        ([[2.0, 0.0], [0.0, 0.0]], [3.0, 0.0], (-1.5, 0.0)),
        ([[2.0, math.nan], [math.nan, 1.0]], [3.0, 1.0], (-1.5, 0.0)),
        ([[2.0, 0.0], [0.0, math.inf]], [3.0, 1.0], (-1.5, 0.0)),
        ([[2.0, 0.0], [0.0, 1.0]], [3.0, math.nan], (-1.5, 0.0)),
        ([[2.0, 0.0], [0.0, 1e-3]], [3.0, 2.0], (-1.5, 0.0)),  # a momentum of -2000
        ([[0.0]], [3.0], (-1.0, 0.0)),
        ([[math.nan]], [3.0], (0.0, 0.0)),
        ([[1e-320]], [1e300], (0.0, 0.0)),
        ([[2.0]], [math.inf], (0.0, 0.0)),
    ],
)
def test_coefficients_fall_back(
    curvature: list[list[float]], slopes: list[float], weights: tuple[float, float]
) -> None:
    assert best_weights(curvature, slopes, 1e-16) == pytest.approx(weights)


def test_zero_gradients_give_finite_updates() -> None:
    model = mlp()
    optimizer = quadratic(model)
    train(model, optimizer, range(2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(batch()[0])
        optimizer.observe(outputs)
        loss = (outputs * 0).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert all(bool(torch.isfinite(value).all()) for value in parameters(model).values())
    assert optimizer.stats()["steps"] == 3


def test_parameters_that_the_outputs_do_not_use() -> None:
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    optimizer = quadratic(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(batch()[0])
        optimizer.observe(outputs)
        loss = F.cross_entropy(outputs, batch()[1]) + 0.1 * model.scale
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert all(bool(torch.isfinite(value).all()) for value in parameters(model).values())
    assert model.scale.item() < 1


# --- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.1, LevenbergMarquardt(0.1, every=2)], ids=["fixed", "lm"])
@pytest.mark.parametrize("steps", [1, 4])
def test_resume_is_bit_for_bit(steps: int, damping: Any) -> None:
    model, other = mlp(), mlp()
    optimizer = quadratic(model, damping=damping, refresh_every=3)
    resumed = quadratic(other, damping=damping, refresh_every=3)
    train(model, optimizer, range(steps))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved_and_loaded(snapshot(optimizer)))
    train(model, optimizer, range(steps, 8))
    train(other, resumed, range(steps, 8))
    assert_same(parameters(other), parameters(model))


def test_loaders_that_fill_what_exists_find_the_last_update() -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, other = mlp(), mlp()
    optimizer, resumed = quadratic(model), quadratic(other)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    state = saved_and_loaded(state)
    empty = get_optimizer_state_dict(other, resumed)["state"]
    assert all("kronfac.update" in entry for entry in empty.values())
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert_same(parameters(other), parameters(model))


def test_a_checkpoint_of_another_rescale_starts_without_a_last_update() -> None:
    model, other = mlp(), mlp()
    plain, optimizer = kfac(model), quadratic(other)
    step(model, plain, batch())
    train(other, optimizer, range(2))
    optimizer.load_state_dict(snapshot(plain))
    train(other, optimizer, [0])
    assert optimizer.stats()["momentum"] == 0


def test_the_summary_names_the_memory_of_the_last_update() -> None:
    numbers = sum(p.numel() for p in mlp().parameters())
    assert f"The last update, which the quadratic model keeps: {numbers * 8} B." in str(
        quadratic(mlp())
    )
    assert "last update" not in str(kfac(mlp()))


# --- refusals --------------------------------------------------------------------------------


def test_without_a_closure_nothing_is_changed() -> None:
    model = mlp()
    optimizer = quadratic(model)
    loss_of(model, batch()).backward()
    before, raw = parameters(model), gradients(model)
    with pytest.raises(RuntimeError, match=r"rescale='quadratic'.*step\(closure\)"):
        optimizer.step()
    assert_same(parameters(model), before)
    assert_same(gradients(model), raw)


def test_without_observe_nothing_is_changed() -> None:
    model = mlp()
    optimizer = quadratic(model)
    before = parameters(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        return loss

    for _ in range(2):  # what an earlier step observed does not count
        with pytest.raises(RuntimeError, match=r"optimizer.observe\(outputs"):
            optimizer.step(closure)
    assert_same(parameters(model), before)
    train(model, optimizer, [0])
    with pytest.raises(RuntimeError, match=r"optimizer.observe\(outputs"):
        optimizer.step(closure)


def test_outputs_without_a_graph_are_refused() -> None:
    model = mlp()
    optimizer = quadratic(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(batch()[0])
        optimizer.observe(outputs.detach())
        loss = F.cross_entropy(outputs, batch()[1])
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="outputs without a graph"):
        optimizer.step(closure)


def test_a_base_with_momentum_of_its_own_is_refused() -> None:
    model = mlp()
    for base in (SGD(model.parameters(), lr=1.0, momentum=0.9), AdamW(model.parameters())):
        with pytest.raises(ValueError, match=r"chooses the momentum itself, but group 0"):
            kfac(model, base, rescale="quadratic")


def test_sparse_gradients_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, CLASSES))
    optimizer = quadratic(model)
    data = (torch.arange(5), torch.zeros(5, dtype=torch.long))
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step(closure_of(model, optimizer, data))


def test_observe_is_still_refused_where_nobody_needs_it() -> None:
    with pytest.raises(ValueError, match="needs no call"):
        kfac(mlp()).observe(torch.zeros(2, 3))


# --- with damping that adapts itself ---------------------------------------------------------


@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_the_rule_is_shown_the_exact_curvature(monkeypatch: pytest.MonkeyPatch, lr: float) -> None:
    seen = []
    monkeypatch.setattr(
        AdaptiveDamping, "judge", lambda _, loss, actual, found, step: seen.append(found) or "kept"
    )
    model = mlp()
    optimizer = quadratic(model, lr=lr, damping=LevenbergMarquardt(0.1, every=1))
    train(model, optimizer, [0])
    seen.clear()
    outputs = model(batch(1)[0])
    C = dense_ggn(model, outputs, "categorical", torch.ones(len(outputs))) / len(outputs)
    own = list(model.parameters())
    gradient = flat(torch.autograd.grad(F.cross_entropy(outputs, batch(1)[1]), own))
    before = flat(own)
    train(model, optimizer, [1])
    change = flat(own) - before
    assert seen == pytest.approx([float(gradient @ change + change @ C @ change / 2)])


@pytest.mark.parametrize("size", [1, 4])
def test_small_batches_leave_parameters_finite(size: int) -> None:
    """They contradict each other, and steps that fit one of them may ruin the others."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    optimizer = quadratic(model, fisher="mc", damping=1e-4, refresh_every=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        loss = nn.functional.cross_entropy(outputs, y)
        loss.backward()
        return loss

    for _ in range(40):
        x, y = torch.randn(size, 8), torch.randint(4, (size,))
        optimizer.step(closure)
        assert abs(optimizer.stats()["momentum"]) <= MAX_MOMENTUM
    assert all(bool(p.isfinite().all()) for p in model.parameters())
