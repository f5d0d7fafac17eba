"""Damping that adapts itself: the rule, the second run of the closure, and what is saved."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from benchmarks.damping import median_loss
from kronfac import LevenbergMarquardt
from kronfac.adaptive.damping import AdaptiveDamping
from tests.test_syncs import CountWaits
from tests.training import (
    CLASSES,
    INPUTS,
    assert_same,
    batch,
    cnn,
    factors,
    gradients,
    images,
    kfac,
    layers,
    loss_of,
    mlp,
    parameters,
    saved_and_loaded,
    snapshot,
    step,
)

pytestmark = pytest.mark.usefixtures("double_precision")

FACTOR = 0.9**5


def closure_of(
    model: nn.Module, optimizer: kronfac.KFAC, data: tuple[Tensor, Tensor]
) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, optimizer: kronfac.KFAC, numbers: Any) -> None:
    for number in numbers:
        optimizer.step(closure_of(model, optimizer, batch(number)))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The changes of the loss, actual and predicted, that the rule is shown."""
    seen = []
    judge = AdaptiveDamping.judge

    def record(
        self: AdaptiveDamping, loss: float, actual: float, predicted: float, step: int
    ) -> Any:
        seen.append((actual, predicted))
        return judge(self, loss, actual, predicted, step)

    monkeypatch.setattr(AdaptiveDamping, "judge", record)
    return seen


# --- the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "predicted", "verdict", "factor"),
    [
        (-0.24, -1.0, "raised", 1 / FACTOR),
        (0.5, -1.0, "raised", 1 / FACTOR),
        (-0.25, -1.0, "kept", 1.0),
        (-0.75, -1.0, "kept", 1.0),
        (-0.76, -1.0, "lowered", FACTOR),
        (-3.0, -1.0, "lowered", FACTOR),
        (-1.0, 0.0, "raised", 1 / FACTOR),
        (-1.0, 1.0, "raised", 1 / FACTOR),
        (1.0, 1.0, "raised", 1 / FACTOR),
        (-1.0, math.nan, "raised", 1 / FACTOR),
        (-1.0, -math.inf, "raised", 1 / FACTOR),
    ],
)
def test_the_ratio_decides(actual: float, predicted: float, verdict: str, factor: float) -> None:
    damping = AdaptiveDamping(LevenbergMarquardt(0.1))
    assert damping.judge(1.0, actual, predicted, 4) == verdict
    assert damping.current == pytest.approx(0.1 * factor, rel=1e-15)
    assert damping.trusted == (verdict != "raised")


@pytest.mark.parametrize(
    ("loss", "after", "predicted", "rejected"),
    [
        (1.0, math.nan, -1.0, True),
        (1.0, math.inf, -1.0, True),
        (1.0, 2.1, -0.5, True),
        (1.0, 1.9, -0.5, False),
        (1.0, 2.1, -1.5, False),
        (1.0, 2.1, 1.5, True),
        (-1.0, 0.1, -0.5, True),
        (0.0, 0.4, -0.5, False),
    ],
)
def test_a_loss_that_doubles_is_rejected(
    loss: float, after: float, predicted: float, rejected: bool
) -> None:
    assert AdaptiveDamping(LevenbergMarquardt()).rejects(loss, after, predicted) == rejected


def test_the_damping_stays_between_its_bounds() -> None:
    damping = AdaptiveDamping(LevenbergMarquardt(0.1, minimum=0.08, maximum=0.15))
    damping.judge(1.0, -1.0, -1.0, 4)
    assert damping.current == 0.08
    damping.judge(1.0, 0.5, -1.0, 9)
    damping.judge(1.0, 0.5, -1.0, 10)
    assert damping.current == 0.15
    damping.reject()
    assert damping.current == 0.15


class Parabola:
    """One weight, one sample, loss ``½c(w - 1)²`` and a model that believes in a curvature of 1.

    With ``G = I`` and an input of 1, a step is ``-s·c·(w - 1)`` with ``s = lr/(1 + γ)``, and the ratio
    of actual to predicted change is ``(1 - sc/2)/(1 - s/2)``.
    """

    def __init__(self, c: float, lr: float, **options: Any) -> None:
        self.c = c
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        base = SGD(self.model.parameters(), lr=lr)
        options = {"damping": LevenbergMarquardt(1.0, every=1), "fisher": "forward"} | options
        self.optimizer = kfac(self.model, base, **options)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.c * (self.model(torch.ones(1, 1)) - 1).square().sum() / 2
        loss.backward()
        return loss


@pytest.mark.parametrize(
    ("c", "lr", "outcome"),
    [(1.0, 1.0, "lowered"), (3.0, 1.0, "kept"), (3.5, 1.0, "raised"), (1.0, 5.0, "rejected")],
)
def test_a_parabola_gives_the_ratio_of_the_closed_form(
    judged: list[tuple[float, float]], c: float, lr: float, outcome: str
) -> None:
    problem = Parabola(c, lr)
    problem.optimizer.step(problem)
    s = lr / 2
    for actual, predicted in judged:
        assert actual / predicted == pytest.approx((1 - s * c / 2) / (1 - s / 2))
    assert len(judged) == int(outcome != "rejected")
    stats = problem.optimizer.stats()
    expected = {"lowered": 0.9, "kept": 1.0, "raised": 1 / 0.9, "rejected": 10.0}[outcome]
    assert stats["damping"] == pytest.approx(expected)
    counted = {name: stats[f"damping_{name}"] for name in ("raised", "lowered", "rejected")}
    assert counted == {name: int(name == outcome) for name in counted}


def test_a_model_that_predicts_well_is_looked_at_every_nth_step_only(
    judged: list[tuple[float, float]],
) -> None:
    problem = Parabola(1.0, 0.5, damping=LevenbergMarquardt(1.0, every=3))
    seen = []
    for _ in range(7):
        problem.optimizer.step(problem)
        seen.append(problem.optimizer.stats()["damping"])
    expected = [0.9**3, 0.9**6]
    assert seen == pytest.approx([1, 1, expected[0], expected[0], expected[0], *[expected[1]] * 2])
    assert len(judged) == 3  # at first, to see whether it does


def test_a_model_that_predicts_badly_is_looked_at_every_step() -> None:
    problem = Parabola(3.5, 1.0, damping=LevenbergMarquardt(1.0, every=50))
    for _ in range(4):
        problem.optimizer.step(problem)
    stats = problem.optimizer.stats()
    assert stats["damping_raised"] == 1  # then the ratio is good enough
    assert stats["damping"] == pytest.approx(0.9**-50)


def state_of(problem: Parabola) -> list[Tensor]:
    base = problem.optimizer.base
    kept = [value for state in base.state.values() for value in state.values()]
    return [problem.model.weight.detach().clone(), *(one.clone() for one in kept)]


def test_a_rejected_step_is_undone() -> None:
    problem = Parabola(1.0, 5.0)
    problem.optimizer.base.param_groups[0]["momentum"] = 0.5
    before = state_of(problem)
    problem.optimizer.step(problem)
    assert_same(state_of(problem), before)
    damping = problem.optimizer.stats()["damping"]
    assert damping == 10.0  # s = 5/11 decreases the loss
    problem.optimizer.step(problem)
    assert problem().item() < 0.5
    assert problem.optimizer.stats()["damping_rejected"] == 1


def test_ten_rejections_in_a_row_end_training_where_it_was_good() -> None:
    problem = Parabola(1.0, 1.0)
    runs = iter(range(100))

    def closure() -> Tensor:
        return problem() * (math.nan if next(runs) % 2 else 1)

    before = problem.model.weight.clone()
    for _ in range(9):
        problem.optimizer.step(closure)
    with pytest.raises(RuntimeError, match=r"10 steps in a row .* and were undone"):
        problem.optimizer.step(closure)
    assert torch.equal(problem.model.weight, before)
    assert problem.optimizer.stats()["damping_rejected"] == 10


def test_loading_leaves_no_way_back_to_before() -> None:
    problem = Parabola(1.0, 1.0)
    for _ in range(3):
        problem.optimizer.step(problem)
    saved = (problem.model.state_dict(), problem.optimizer.state_dict())
    problem.model.load_state_dict({"weight": torch.full((1, 1), 50.0)})
    problem.optimizer.load_state_dict(saved[1])
    before = problem.model.weight.item()
    problem.optimizer.step(problem)  # a loss far above those of the last looks
    assert abs(problem.model.weight.item() - 1) < abs(before - 1)
    assert problem.optimizer.stats()["damping_rejected"] == 0


def test_what_went_wrong_between_looks_is_undone_at_the_next() -> None:
    problem = Parabola(1.0, 1.0, damping=LevenbergMarquardt(1.0, every=3))
    for _ in range(3):
        problem.optimizer.step(problem)
    good = problem.model.weight.detach().clone()
    with torch.no_grad():  # as if the two steps between looks had failed
        problem.optimizer.step(problem)
        problem.model.weight.fill_(math.nan)
        problem.optimizer.step(problem)
    loss = problem.optimizer.step(problem)
    assert loss.item() < 0.5
    assert abs(problem.model.weight.item() - 1) < 1
    assert problem.optimizer.stats()["damping_rejected"] == 1
    assert not torch.equal(problem.model.weight, good)


def test_a_new_damping_acts_at_the_next_step() -> None:
    problem = Parabola(1.0, 1.0)
    for gamma in (1.0, 0.9, 0.81):
        before = problem.model.weight.item()
        problem.optimizer.step(problem)
        change = problem.model.weight.item() - before
        assert change == pytest.approx((1 - before) / (1 + gamma))


def test_a_learning_rate_of_zero_says_nothing() -> None:
    problem = Parabola(1.0, 0.0)
    problem.optimizer.step(problem)
    assert problem.optimizer.stats()["damping"] == 1.0


def test_a_loss_that_is_not_finite_raises_the_damping() -> None:
    problem = Parabola(1.0, 1.0)
    runs = []

    def closure() -> Tensor:
        runs.append(0)
        return problem() * (math.nan if len(runs) == 2 else 1)

    assert problem.optimizer.step(closure).item() == 0.5  # the loss of the first run
    assert problem.optimizer.stats()["damping_rejected"] == 1


# --- the quadratic model ---------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_the_model_is_exact_for_linear_regression(
    judged: list[tuple[float, float]], samples: int, lr: float
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(samples, 3), torch.randn(samples, 2)
    base = SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = kfac(model, base, damping=LevenbergMarquardt(0.1, every=1), fisher="exact", decay=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, likelihood="gaussian")
        loss = (outputs - y).square().sum() / (2 * samples)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    for actual, predicted in judged:
        assert actual == pytest.approx(predicted, rel=1e-9)


def test_the_model_takes_gradient_of_all_and_curvature_of_preconditioned_layers(
    judged: list[tuple[float, float]],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))
    base = SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    optimizer = kfac(model, base, damping=LevenbergMarquardt(0.1, every=2), momentum=0.5)
    train(model, optimizer, [0])
    judged.clear()
    with optimizer.no_capture():
        optimizer.zero_grad()
        loss_of(model, batch(1)).backward()
    raw, before = gradients(model), parameters(model)
    train(model, optimizer, [1])
    change = {name: value - before[name] for name, value in parameters(model).items()}
    expected = sum(float((raw[name] * value).sum()) for name, value in change.items())
    for name in ("0", "3"):
        matrix = torch.cat([change[f"{name}.weight"], change[f"{name}.bias"][:, None]], dim=1)
        vector = matrix.flatten()
        curvature = torch.kron(factors(optimizer, "G")[name], factors(optimizer, "A")[name])
        expected += float(vector @ curvature @ vector) / 2
    norm = torch.stack([change["1.weight"], change["1.bias"]], dim=-1)
    expected += float(torch.einsum("ci,cij,cj->", norm, factors(optimizer, "F")["1"], norm)) / 2
    assert judged[0][1] == pytest.approx(expected, rel=1e-9)


def test_a_bias_that_the_base_does_not_train_has_no_part(
    judged: list[tuple[float, float]],
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, CLASSES)
    base = SGD([model.weight], lr=0.5)
    optimizer = kfac(model, base, damping=LevenbergMarquardt(0.1, every=1))
    before = model.weight.detach().clone()
    with optimizer.no_capture():
        loss_of(model, batch()).backward()
    raw = model.weight.grad.clone()
    train(model, optimizer, [0])
    change = model.weight.detach() - before
    vector = torch.cat([change, torch.zeros(CLASSES, 1)], dim=1).flatten()
    curvature = torch.kron(factors(optimizer, "G")[""], factors(optimizer, "A")[""])
    expected = float((raw * change).sum() + vector @ curvature @ vector / 2)
    assert judged[0][1] == pytest.approx(expected, rel=1e-9)


# --- the second run leaves no trace ----------------------------------------------------------


class Noisy(nn.Module):
    """Random numbers and running statistics in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls = self.calls + 1  # a buffer that is made anew, not written to
        return self.net(x)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_second_run_leaves_no_trace(set_to_none: bool) -> None:
    def run(damping: Any) -> tuple[Any, ...]:
        model = Noisy()
        torch.manual_seed(1)
        optimizer = kfac(model, damping=damping, fisher="mc")
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            outputs = model(batch()[0])
            optimizer.observe(outputs)
            loss = F.cross_entropy(outputs, batch()[1])
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(2):
            returned = optimizer.step(closure).item()
        running = {
            name: [running.count for running in one.running.values()]
            for name, one in layers(optimizer).items()
        }
        state = (model.state_dict(), gradients(model), torch.get_rng_state(), running, returned)
        return state, factors(optimizer, "A"), factors(optimizer, "G"), len(losses)

    *expected, runs = run(0.1)
    # The look at the first step never lowers the damping, so both runs have the same at the second.
    *found, more = run(LevenbergMarquardt(0.1, every=2))
    assert_same(found, expected)
    assert (runs, more) == (2, 4)


def test_both_runs_draw_the_same_random_numbers() -> None:
    model = mlp()
    optimizer = kfac(model, damping=LevenbergMarquardt(0.1, every=1))
    drawn = []

    def closure() -> Tensor:
        drawn.append(torch.rand(3))
        return closure_of(model, optimizer, batch())()

    optimizer.step(closure)
    after = torch.rand(3)
    optimizer.step(closure)
    assert_same(drawn[0], drawn[1])
    assert_same(drawn[2], drawn[3])
    assert len({float(one[0]) for one in [*drawn, after]}) == 3


def test_gradients_are_the_same_tensors_afterwards() -> None:
    model = mlp()
    optimizer = kfac(model, damping=LevenbergMarquardt(0.1, every=1))
    seen = []

    def closure() -> Tensor:
        loss = loss_of(model, batch())
        loss.backward()
        seen.append([p.grad for p in model.parameters()])
        return loss

    optimizer.step(closure)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), seen[0], strict=True))


def test_sparse_gradients_take_part(judged: list[tuple[float, float]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, CLASSES))
    optimizer = kfac(model, damping=LevenbergMarquardt(0.1, every=1), exclude="*")
    data = (torch.arange(3), torch.zeros(3, dtype=torch.long))
    optimizer.step(closure_of(model, optimizer, data))
    squares = sum(float(p.grad.to_dense().square().sum()) for p in model.parameters())
    assert model[0].weight.grad.is_sparse
    assert judged[0][1] == pytest.approx(-0.1 * squares)  # no layer, so only the gradient's part


def test_an_error_in_the_second_run_leaves_no_trace() -> None:
    model = Noisy()
    optimizer = kfac(model, damping=LevenbergMarquardt(0.1, every=1))
    closure = closure_of(model, optimizer, batch())
    runs = []

    def failing() -> Tensor:
        loss = closure()
        runs.append(0)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert float(model.calls) == 1
    assert not optimizer._preconditioner.capture.is_paused


def test_a_step_without_a_look_waits_for_nothing() -> None:
    model = cnn()
    base = SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer = kfac(model, base, damping=LevenbergMarquardt(0.1, every=4), refresh_every=8)
    closure = closure_of(model, optimizer, images())
    optimizer.step(closure)
    with CountWaits() as counter:
        optimizer.step(closure)
    assert not counter.waits


# --- saving ----------------------------------------------------------------------------------


def running(**options: Any) -> tuple[nn.Sequential, kronfac.KFAC]:
    model = mlp()
    rule = LevenbergMarquardt(0.1, every=2)
    return model, kfac(model, damping=rule, refresh_every=3, **options)


@pytest.mark.parametrize("steps", [3, 4])
def test_resume_is_bit_for_bit(steps: int) -> None:
    model, optimizer = running()
    train(model, optimizer, range(steps))
    assert optimizer.stats()["damping"] != 0.1
    other, resumed = running()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved_and_loaded(snapshot(optimizer)))
    assert resumed.stats()["damping"] == optimizer.stats()["damping"]
    train(model, optimizer, range(steps, 10))
    train(other, resumed, range(steps, 10))
    assert_same(parameters(other), parameters(model))
    assert resumed.stats()["damping"] == optimizer.stats()["damping"]


def test_every_layer_saves_the_damping() -> None:
    model, optimizer = running()
    train(model, optimizer, range(2))
    saved = [entry.get("kronfac.damping") for entry in optimizer.state_dict()["state"].values()]
    current = torch.tensor(optimizer.stats()["damping"], dtype=torch.float64)
    assert_same(saved, [current, None] * 3)


def test_a_checkpoint_without_the_damping_starts_from_the_initial_one() -> None:
    model, optimizer = running()
    plain = mlp()
    older = kfac(plain)
    step(plain, older, batch())
    assert not any("damping" in key for one in older.state_dict()["state"].values() for key in one)
    train(model, optimizer, range(2))
    optimizer.load_state_dict(snapshot(older))
    assert optimizer.stats()["damping"] == 0.1


def test_a_fixed_damping_loads_a_checkpoint_of_an_adaptive_one() -> None:
    model, optimizer = running()
    train(model, optimizer, range(2))
    fixed = kfac(mlp(), damping=0.3)
    fixed.load_state_dict(snapshot(optimizer))
    assert fixed.stats()["damping"] == 0.3


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_keep_the_damping_and_go_on_alone(copied: Any) -> None:
    model, optimizer = running()
    train(model, optimizer, range(4))
    other, twin = copied((model, optimizer))
    assert twin.stats()["damping"] == optimizer.stats()["damping"]
    assert twin.damping == optimizer.damping
    train(other, twin, range(4, 8))
    current = optimizer.stats()["damping"]
    train(model, optimizer, range(4, 8))
    assert_same(parameters(other), parameters(model))
    assert optimizer.stats()["damping"] == twin.stats()["damping"] != current


def test_loaders_that_fill_what_exists_find_the_damping() -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer = running()
    train(model, optimizer, range(4))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = running()
    assert "kronfac.damping" in get_optimizer_state_dict(other, resumed)["state"]["0.weight"]
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state)
    train(model, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert_same(parameters(other), parameters(model))


# --- the option ------------------------------------------------------------------------------


def test_the_damping_is_returned_as_it_was_given() -> None:
    rule = LevenbergMarquardt(0.1)
    assert kfac(mlp(), damping=rule).damping is rule


def test_stats_show_numbers_and_callables_at_the_current_step() -> None:
    model = mlp()
    optimizer = kfac(model, damping=lambda t: 0.5 / (1 + t))
    step(model, optimizer, batch())
    assert optimizer.stats()["damping"] == 0.25
    assert kfac(mlp(), damping=0.3).stats()["damping"] == 0.3


def test_the_damping_may_be_set_later() -> None:
    model, optimizer = running()
    train(model, optimizer, range(2))
    optimizer.damping = LevenbergMarquardt(0.7, every=1)
    assert optimizer.stats()["damping"] == 0.7
    train(model, optimizer, range(1))
    assert optimizer.stats()["damping"] != 0.7
    optimizer.damping = 0.2
    step(model, optimizer, batch())  # no closure is needed any more
    assert (optimizer.damping, optimizer.stats()["damping"]) == (0.2, 0.2)


def test_auto_rescale_is_a_clip_if_the_damping_adapts() -> None:
    model = mlp()
    base = SGD(model.parameters(), lr=0.1)
    assert kronfac.KFAC(model, base)._preconditioner.options.rescale == "auto"
    adaptive = kronfac.KFAC(model, base, damping=LevenbergMarquardt())
    assert adaptive._preconditioner.options.rescale == "kl-clip"


@pytest.mark.parametrize("rescale", ["graft", "unit", "orthogonal"])
def test_a_fixed_length_is_refused(rescale: str) -> None:
    with pytest.raises(ValueError, match=f"rescale='{rescale}' fixes the length"):
        kfac(mlp(), damping=LevenbergMarquardt(), rescale=rescale)
    optimizer = kfac(mlp(), rescale=rescale, damping=0.3)
    with pytest.raises(ValueError, match="fixes the length"):
        optimizer.damping = LevenbergMarquardt()
    assert optimizer.damping == 0.3


@pytest.mark.parametrize("solver", ["cholesky", "newton-schulz"])
def test_a_solver_without_undamped_curvature_is_refused(solver: str) -> None:
    with pytest.raises(ValueError, match=r"layer '0' .* give solver='eigen'"):
        kfac(mlp(), damping=LevenbergMarquardt(), solver=solver)
    optimizer = kfac(mlp(), solver=solver, damping=0.3)
    with pytest.raises(ValueError, match="solver='eigen'"):
        optimizer.damping = LevenbergMarquardt()
    assert optimizer.damping == 0.3


def test_auto_solver_is_accepted_where_it_is_eigen(monkeypatch: pytest.MonkeyPatch) -> None:
    kfac(mlp(), damping=LevenbergMarquardt(), solver="auto")
    monkeypatch.setattr("kronfac.methods.kfac.block.EIGEN_MAX_WIDTH", 5)
    with pytest.raises(ValueError, match=r"layer '2' .* give solver='eigen'"):
        kfac(mlp(), damping=LevenbergMarquardt(), solver="auto")


def test_without_a_closure_nothing_is_changed() -> None:
    model, optimizer = running()
    loss_of(model, batch()).backward()
    before, raw, state = parameters(model), gradients(model), snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"call step\(closure\)"):
        optimizer.step()
    assert_same(parameters(model), before)
    assert_same(gradients(model), raw)
    assert_same(optimizer.state_dict(), state)


def test_a_closure_that_returns_nothing_is_refused() -> None:
    problem = Parabola(1.0, 1.0)
    with pytest.raises(RuntimeError, match="the closure returned None"):
        problem.optimizer.step(lambda: print(end=str(problem())[:0]))
    assert problem.model.weight.item() == 0


def test_after_detach_no_closure_is_needed() -> None:
    model, optimizer = running()
    optimizer.detach()
    before = parameters(model)
    step(model, optimizer, batch())
    lr = optimizer.param_groups[0]["lr"]
    expected = {n: before[n] - lr * grad for n, grad in gradients(model).items()}
    torch.testing.assert_close(parameters(model), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.0}, "initial=0.0"),
        ({"initial": math.nan}, "initial=nan"),
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"omega": 1.0}, "omega=1.0"),
        ({"omega": 0}, "omega=0"),
        ({"minimum": -1.0}, "minimum=-1.0"),
        ({"maximum": math.inf}, "maximum=inf"),
        ({"initial": 1e-3, "minimum": 1e-2}, "between minimum=0.01"),
    ],
)
def test_a_bad_rule_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LevenbergMarquardt(**options)


def test_only_the_initial_damping_is_positional() -> None:
    with pytest.raises(TypeError):
        LevenbergMarquardt(1e-3, 5)  # type: ignore[misc]
    assert LevenbergMarquardt(1e-3) == LevenbergMarquardt(initial=1e-3, every=5, omega=0.9)


def test_a_block_without_undamped_curvature_says_so() -> None:
    optimizer = kfac(mlp(), solver="cholesky")
    block = layers(optimizer)["0"].block
    with pytest.raises(NotImplementedError, match="'cholesky' keeps no curvature without damping"):
        block.quadratic({}, torch.zeros(5, 5))


# --- what it is for --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damping_that_does_not_fit_is_rescued() -> None:
    """The problem of ``benchmarks/damping.py``, where 1 is the best power of ten for a fixed damping."""
    best = median_loss(1.0, seeds=3)
    for start in (0.1, 10.0):
        assert median_loss(start, seeds=3) > 1.5 * best
        assert median_loss(LevenbergMarquardt(start), seeds=3) < 1.25 * best
