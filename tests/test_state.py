"""A run that was saved and resumed equals the run that went on, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import kronfac
from tests.training import (
    assert_same,
    batch,
    differs,
    kfac,
    layers,
    loss_of,
    mlp,
    option_id,
    parameters,
    saved_and_loaded,
    snapshot,
    step,
    train,
)

STEPS = 7
BASES: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "muon": lambda p: Muon(p, lr=0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: StepLR(o, step_size=2, gamma=0.5),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=2 * STEPS),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=STEPS),
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
    "plateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1),
    "sequential": lambda o: SequentialLR(
        o, [ConstantLR(o, factor=0.1, total_iters=2), CosineAnnealingLR(o, T_max=5)], [2]
    ),
}


class Run:
    """A model, its optimizer and its scheduler, in training."""

    def __init__(
        self,
        base: str = "sgd-momentum",
        scheduler: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.model = mlp(seed, bias=base != "muon")  # Muon is for matrices only
        options = {"factor_every": 1, "refresh_every": 3} | options
        self.optimizer = kfac(self.model, BASES[base](self.model.parameters()), **options)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer) if scheduler else None
        self.sampled = options.get("fisher") in ("mc", "exact")

    def train(self, numbers: range) -> None:
        for number in numbers:
            x, y = batch(number)
            self.optimizer.zero_grad()
            outputs = self.model(x)
            if self.sampled:
                self.optimizer.observe(outputs)
            nn.functional.cross_entropy(outputs, y).backward()
            self.optimizer.step()
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return parts | ({"scheduler": self.scheduler.state_dict()} if self.scheduler else {})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler:
            self.scheduler.load_state_dict(state["scheduler"])


def assert_resumes(saved_after: int, **choices: Any) -> None:
    """Save after some steps, resume in fresh objects, and arrive at the same state."""
    straight = Run(**choices)
    straight.train(range(STEPS))
    first = Run(**choices)
    first.train(range(saved_after))
    resumed = Run(**choices, seed=5)
    resumed.load(saved_and_loaded(first.state()))
    resumed.train(range(saved_after, STEPS))
    assert_same(resumed.state(), straight.state())


# --- resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("base", ["sgd-momentum", "adamw", "rmsprop", "nadam"])
def test_resume_with_every_base_and_scheduler(base: str, scheduler: str) -> None:
    assert_resumes(4, base=base, scheduler=scheduler)


@pytest.mark.parametrize("base", ["sgd", "adam", "adagrad", "muon"])
def test_resume_with_further_bases(base: str) -> None:
    assert_resumes(4, base=base)


@pytest.mark.parametrize("saved_after", [0, 1, 2, 3, 4])
def test_resume_anywhere_in_a_refresh_interval(saved_after: int) -> None:
    assert_resumes(saved_after)


@pytest.mark.parametrize("saved_after", [3, 4, 5])
def test_resume_between_factor_steps(saved_after: int) -> None:
    assert_resumes(saved_after, factor_every=2)


@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_resume_during_early_refreshes(saved_after: int) -> None:
    assert_resumes(saved_after, factor_every=3, refresh_every=20)


@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_resume_with_staggered_refreshes(saved_after: int) -> None:
    assert_resumes(saved_after, stagger=True, refresh_every=4)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"rescale": "kl-clip"},
        {"rescale": "trust-region", "trust_radius": 1e-5},
        {"rescale": "graft"},
        {"rescale": "unit"},
        {"rescale": "orthogonal"},
        {"solver": "cholesky"},
        {"solver": "newton-schulz"},
        {"solver": "separable"},
        {"fisher": "forward"},
        {"fisher": "exact"},
        {"sharing": "reduce"},
        {"max_dim": 4},
        {"decay": 0.0},
        {"damping": lambda t: 0.1 / (1 + t)},
    ],
    ids=option_id,
)
def test_resume_with_every_option(options: dict[str, Any]) -> None:
    assert_resumes(4, **options)


def test_resume_with_sampled_labels_continues_their_random_numbers() -> None:
    assert_resumes(4, fisher="mc")


def test_resume_with_sharing_reduce_where_rows_cannot_be_grouped() -> None:
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.mix = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.mix(x.transpose(0, 1)).tanh().transpose(0, 1)).mean(1)

    def run(model: nn.Module, optimizer: kronfac.KFAC, numbers: range) -> None:
        for number in numbers:
            step(model, optimizer, batch(number, shape=(2, 4)))

    straight, resumed = Transposing(), Transposing()
    options: dict[str, Any] = {"sharing": "reduce", "factor_every": 2, "refresh_every": 4}
    optimizer, other = kfac(straight, **options), kfac(resumed, **options)
    run(straight, optimizer, range(3))
    resumed.load_state_dict(straight.state_dict())
    other.load_state_dict(snapshot(optimizer))
    run(straight, optimizer, range(3, 6))
    run(resumed, other, range(3, 6))
    assert_same(parameters(resumed), parameters(straight))


def test_a_saved_state_does_not_move_with_later_steps() -> None:
    run = Run()
    run.train(range(2))
    saved = saved_and_loaded(run.state())
    other = Run()
    other.load(saved)
    before = snapshot(other.optimizer)
    run.train(range(2, 4))
    assert_same(other.optimizer.state_dict(), before)


def test_what_is_loaded_is_copied() -> None:
    run, other = Run("sgd"), Run("sgd")
    run.train(range(2))
    state = run.optimizer.state_dict()
    before = snapshot(run.optimizer)
    other.optimizer.load_state_dict(state)
    other.train(range(2, 4))
    assert_same(run.optimizer.state_dict(), before)


def test_loading_forgets_what_was_pending() -> None:
    run = Run()
    loss_of(run.model, batch(9)).backward()
    run.optimizer.load_state_dict(Run().optimizer.state_dict())
    run.optimizer.zero_grad()
    other = Run()
    run.train(range(1))
    other.train(range(1))
    assert_same(parameters(run.model), parameters(other.model))


# --- what a state dict holds -----------------------------------------------------------------


def test_every_trainable_parameter_has_our_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    state = kfac(model).state_dict()["state"]
    assert [int(entry["kronfac.step"]) for entry in state.values()] == [0] * 6


def test_our_keys_are_marked() -> None:
    run = Run("adamw")
    run.train(range(2))
    base = {"step", "exp_avg", "exp_avg_sq"}
    keys = {key for entry in run.optimizer.state_dict()["state"].values() for key in entry}
    assert {key for key in keys if not key.startswith("kronfac.")} == base


def test_nothing_of_ours_is_at_top_level() -> None:
    assert sorted(kfac(mlp()).state_dict()) == ["param_groups", "state"]


def test_callables_are_never_saved() -> None:
    optimizer = kfac(mlp(), damping=lambda t: 0.1, factor_every=lambda t: 2)
    saved = saved_and_loaded(optimizer.state_dict())
    assert not any(callable(v) for entry in saved["state"].values() for v in entry.values())


def test_single_precision_state_of_a_half_precision_model_keeps_its_precision() -> None:
    model = mlp(dtype=torch.bfloat16)
    optimizer = kfac(model)
    x, y = batch()
    step(model, optimizer, (x.bfloat16(), y))
    optimizer.load_state_dict(snapshot(optimizer))
    kept = layers(optimizer)["0"]
    assert {r.sum.dtype for r in kept.running.values()} == {torch.float32}


def test_offsets_of_staggered_layers_are_restored_not_recomputed() -> None:
    run, other = Run(stagger=True, refresh_every=4), Run(stagger=True, refresh_every=8)
    run.train(range(1))
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    offsets = [{n: s.offset for n, s in layers(r.optimizer).items()} for r in (run, other)]
    assert offsets[0] == offsets[1]


# --- the step by which loaders make state appear ---------------------------------------------


def zero_gradient_step(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def test_a_zero_gradient_first_step_changes_no_parameter() -> None:
    run = Run()
    run.optimizer.param_groups[0]["weight_decay"] = 0.0
    before = parameters(run.model)
    zero_gradient_step(run.model, run.optimizer)
    assert_same(parameters(run.model), before)


def test_a_zero_gradient_first_step_counts_no_step() -> None:
    run = Run()
    zero_gradient_step(run.model, run.optimizer)
    assert run.optimizer.stats()["steps"] == 0


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"fisher": "mc"}], ids=option_id)
def test_a_zero_gradient_first_step_allocates_every_tensor(options: dict[str, Any]) -> None:
    run, trained = Run(**options), Run(**options)
    zero_gradient_step(run.model, run.optimizer)
    trained.train(range(1))

    def shapes(optimizer: kronfac.KFAC) -> dict[Any, dict[str, torch.Size]]:
        state = optimizer.state_dict()["state"]
        return {i: {k: v.shape for k, v in sorted(e.items())} for i, e in state.items()}

    assert shapes(run.optimizer) == shapes(trained.optimizer)


def test_training_after_a_zero_gradient_first_step_equals_training_without_it() -> None:
    run, other = Run("sgd", momentum=0.9), Run("sgd", momentum=0.9)
    zero_gradient_step(run.model, run.optimizer)
    run.train(range(STEPS))
    other.train(range(STEPS))
    assert_same(parameters(run.model), parameters(other.model))


def test_a_first_step_with_statistics_counts_even_if_its_gradient_is_zero() -> None:
    model = mlp()
    optimizer = kfac(model)
    (0 * loss_of(model, batch())).backward()
    optimizer.step()
    assert optimizer.stats()["steps"] == 1


# --- other checkpoints -----------------------------------------------------------------------


def test_a_plain_optimizers_checkpoint_loads_with_one_warning() -> None:
    plain = mlp()
    base = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, base, range(2))
    run = Run()
    with pytest.warns(UserWarning, match="no K-FAC state") as caught:
        run.optimizer.load_state_dict(base.state_dict())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_same(
        [entry["momentum_buffer"] for entry in run.optimizer.state.values()],
        [entry["momentum_buffer"] for entry in base.state.values()],
    )


def test_a_plain_optimizers_checkpoint_makes_statistics_start_anew() -> None:
    run = Run()
    run.train(range(3))
    with pytest.warns(UserWarning, match="statistics start again"):
        run.optimizer.load_state_dict(SGD(mlp().parameters(), lr=0.1).state_dict())
    assert run.optimizer.stats()["without_solution"] == ["0", "2", "4"]


@pytest.mark.parametrize(("saved", "loading"), [("eigen", "cholesky"), ("cholesky", "eigen")])
def test_the_solution_of_another_solver_is_computed_anew_at_the_next_step(
    saved: str, loading: str
) -> None:
    first = Run(solver=saved, refresh_every=100, early_refresh=False)
    first.train(range(2))
    run = Run(solver=loading, refresh_every=100, early_refresh=False)
    with pytest.warns(UserWarning, match="the solution of another solver"):
        run.load(saved_and_loaded(first.state()))
    assert run.optimizer.stats()["without_solution"] == ["0", "2", "4"]
    run.train(range(2, 3))
    assert run.optimizer.stats()["without_solution"] == []


def test_statistics_survive_a_change_of_solver() -> None:
    first, run = Run(solver="eigen"), Run(solver="cholesky")
    first.train(range(2))
    with pytest.warns(UserWarning, match="another solver"):
        run.load(first.state())
    kept = [{n: s.running["A"].sum for n, s in layers(r.optimizer).items()} for r in (first, run)]
    assert_same(kept[0], kept[1])


def test_another_max_dim_is_refused_by_name() -> None:
    first, run = Run(), Run(max_dim=4)
    first.train(range(1))
    with pytest.raises(ValueError, match=r"layer '0': A.sum is \(5, 5\).*and \(5,\) here"):
        run.load(first.state())


def test_resumed_runs_differ_from_runs_that_start_anew() -> None:
    first, fresh = Run(), Run()
    first.train(range(4))
    resumed = Run()
    resumed.load(saved_and_loaded(first.state()))
    fresh.model.load_state_dict(first.model.state_dict())
    resumed.train(range(4, 5))
    fresh.train(range(4, 5))
    assert differs(parameters(resumed.model), parameters(fresh.model))
