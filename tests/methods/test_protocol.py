"""The protocol of blocks fits the whole family: three toy optimizers, each in a few lines.

They differ in what they observe: a rank-one method keeps mean vectors, a sample-space method keeps
the newest rows, and a gradient-only method looks at no activation at all.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.optimizer.base import Preconditioned
from kronfac.protocol.block import Given, Statistic
from tests import oracles
from tests.feature_order import in_library_order
from tests.methods import toys
from tests.methods.toys import GAMMA, GradientOnly, RankOne, SampleSpace

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


# --- what they are run on --------------------------------------------------------------------


def make_model(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        layers = [nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, 2, **DOUBLE)]
        return nn.Sequential(*layers), normal(5, 4)
    groups = 2 if kind == "grouped" else 1
    conv = nn.Conv2d(2, 4, 3, padding=1, groups=groups, **DOUBLE)
    head = nn.Linear(4 * 9, 2, **DOUBLE)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), head), normal(5, 2, 3, 3)


def sample_losses(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().sum(1)


def backward(model: nn.Module, x: Tensor, parts: int = 1) -> None:
    model.zero_grad()
    for part in x.chunk(parts):
        (sample_losses(model(part)).mean() / parts).backward()


def matrix_layers(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]


def rows_of(model: nn.Module, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reference rows in the library's order, of the loss's mean over samples."""
    outputs, (call,) = oracles.run_layer(model, layer, x)
    (g,) = torch.autograd.grad(sample_losses(outputs).mean(), call.z)
    a, g = oracles.layer_rows(layer, call.x, g)
    return in_library_order(layer, a), g


def gradients(model: nn.Module) -> list[Tensor]:
    layers = matrix_layers(model)
    return [in_library_order(layer, oracles.matrix_gradient(layer)) for layer in layers]


def step_gradients(
    optimizer: Preconditioned, x: Tensor, parts: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradient matrices before and after preconditioning; SGD with lr = 0 changes no weight."""
    backward(optimizer.model, x, parts)
    before = gradients(optimizer.model)
    optimizer.step()
    return before, gradients(optimizer.model)


def dense_solve(curvature: Tensor, V: Tensor) -> Tensor:
    damped = curvature + GAMMA * torch.eye(V.numel(), **DOUBLE)
    return torch.linalg.solve(damped, V.flatten()).reshape(V.shape)


def per_group(V: Tensor) -> list[Tensor]:
    return list(V) if V.dim() == 3 else [V]


# --- rank one --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_rank_one_step_is_the_dense_solve(kind: str) -> None:
    model, x = make_model(kind)
    optimizer = RankOne(model, SGD(model.parameters(), lr=0.0))
    expected = [rows_of(model, layer, x) for layer in matrix_layers(model)]
    before, after = step_gradients(optimizer, x)
    for (a, g), V, step in zip(expected, before, after, strict=True):
        # N cancels: the sample's gradient is N·g, and b̄ is a mean over N samples.
        a_mean, b_mean = a.mean((-3, -2)), g.sum((-3, -2))
        groups = zip(
            a_mean.reshape(-1, a.shape[-1]),
            b_mean.reshape(-1, g.shape[-1]),
            per_group(V),
            per_group(step),
            strict=True,
        )
        for a_one, b_one, V_one, step_one in groups:
            u = torch.kron(b_one, a_one)
            assert_equal(step_one, dense_solve(torch.outer(u, u), V_one))


def test_rank_one_vectors_are_averages_over_steps() -> None:
    model, x = make_model("linear")
    optimizer = RankOne(model, SGD(model.parameters(), lr=0.0), decay=0.5)
    batches = [x, normal(3, 4)]
    for batch in batches:
        step_gradients(optimizer, batch)
    (a1, g1), (a2, g2) = (rows_of(model, model[0], batch) for batch in batches)
    running = optimizer._preconditioner.layers[model[0].weight, ""].running
    expected_a = (0.5 * a1.sum((0, 1)) + a2.sum((0, 1))) / (0.5 * 5 + 3)
    expected_b = (0.5 * 5 * g1.sum((0, 1)) + 3 * g2.sum((0, 1))) / (0.5 * 5 + 3)
    assert_equal(running["a"].mean(), expected_a)
    assert_equal(running["b"].mean(), expected_b)


def test_rank_one_vector_of_several_draws_is_their_mean() -> None:
    def mean_vector(samples: int, generator: torch.Generator) -> Tensor:
        torch.manual_seed(0)
        model, x = make_model("linear")
        optimizer = RankOne(model, SGD(model.parameters(), lr=0.0), fisher="mc")
        outputs = model(x)
        optimizer.observe(outputs, "categorical", samples=samples, generator=generator)
        sample_losses(outputs).mean().backward()
        optimizer.step()
        return optimizer._preconditioner.layers[model[0].weight, ""].running["b"].mean()

    together = mean_vector(4, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    alone = torch.stack([mean_vector(1, generator) for _ in range(4)])
    assert_equal(together, alone.mean(0))


# --- sample space ----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 5])
def test_sample_space_step_is_the_empirical_fisher_solve(parts: int) -> None:
    model, x = make_model("linear")
    optimizer = SampleSpace(model, SGD(model.parameters(), lr=0.0))
    fishers = [
        oracles.empirical_fisher_block(layer, sample_losses(model(x)))
        for layer in matrix_layers(model)
    ]
    before, after = step_gradients(optimizer, x, parts)
    for fisher, V, step in zip(fishers, before, after, strict=True):
        assert_equal(step, dense_solve(fisher, V))


def test_rows_of_both_sides_meet_when_passes_go_back_together() -> None:
    """Two forwards before one backward: the second is seen first on the way back."""
    model, x = make_model("linear")
    optimizer = SampleSpace(model, SGD(model.parameters(), lr=0.0))
    fisher = oracles.empirical_fisher_block(model[0], sample_losses(model(x[:4])))
    model.zero_grad()
    outputs = [model(x[:1]), model(x[1:4])]
    (sample_losses(torch.cat(outputs)).sum() / 4).backward()
    (V, *_) = gradients(model)
    optimizer.step()
    assert_equal(gradients(model)[0], dense_solve(fisher, V))


def test_gathered_rows_are_the_newest_ones() -> None:
    model, x = make_model("linear")
    optimizer = SampleSpace(model, SGD(model.parameters(), lr=0.0), decay=0.9)
    step_gradients(optimizer, normal(7, 4))
    step_gradients(optimizer, x)
    gathered = optimizer._preconditioner.layers[model[0].weight, ""].running["a"].mean()
    assert_equal(gathered, rows_of(model, model[0], x)[0].squeeze(1))


def test_gathered_rows_of_shared_positions_are_means_and_sums() -> None:
    model, x = make_model("grouped")
    optimizer = SampleSpace(model, SGD(model.parameters(), lr=0.0))
    a, g = rows_of(model, model[0], x)
    step_gradients(optimizer, x)
    running = optimizer._preconditioner.layers[model[0].weight, ""].running
    assert_equal(running["a"].mean(), a.mean(-2))
    assert_equal(running["g"].mean(), len(x) * g.sum(-2))


# --- gradient only ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_gradient_only_step(kind: str) -> None:
    model, x = make_model(kind)
    optimizer = GradientOnly(model, SGD(model.parameters(), lr=0.0), decay=1.0)
    seen = []
    for batch in (x, x + 1, 2 * x):
        before, after = step_gradients(optimizer, batch)
        seen.append(before)
    for history, step in zip(zip(*seen, strict=True), after, strict=True):
        groups = zip(*(per_group(V) for V in history), strict=True)
        for matrices, step_one in zip(groups, per_group(step), strict=True):
            left = torch.stack([V @ V.T for V in matrices]).mean(0)
            right = torch.stack([V.T @ V for V in matrices]).mean(0)
            expected = fractional_power(left) @ matrices[-1] @ fractional_power(right)
            assert_equal(step_one, expected)


def fractional_power(matrix: Tensor) -> Tensor:
    """`(M + γI)^-¼` by a singular value decomposition."""
    left, values, right = torch.linalg.svd(matrix + GAMMA * torch.eye(len(matrix), **DOUBLE))
    return left @ (values**-0.25).diag() @ right


def test_gradient_only_observes_no_call() -> None:
    model, x = make_model("linear")
    optimizer = GradientOnly(model, SGD(model.parameters(), lr=0.0))
    backward(model, x)
    assert all(state.pending.empty for state in optimizer._preconditioner.layers.values())


# --- what every method gets from the machinery -----------------------------------------------

TOYS: dict[str, Callable[..., Preconditioned]] = {
    "rank-one": RankOne,
    "sample-space": SampleSpace,
    "gradient-only": GradientOnly,
}
every_toy = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS.keys())


def train(optimizer: Preconditioned, batches: list[Tensor]) -> None:
    for batch in batches:
        backward(optimizer.model, batch)
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@every_toy
def test_resume_is_bit_for_bit(toy: Callable[..., Preconditioned]) -> None:
    model, x = make_model("linear")
    batches = [x, x + 1, 2 * x, x - 1]
    optimizer = toy(model, SGD(model.parameters(), lr=0.1, momentum=0.9), decay=0.5)
    optimizer.refresh_every = 3
    train(optimizer, batches[:2])
    other = copy.deepcopy(model)
    resumed = toy(other, SGD(other.parameters(), lr=0.1, momentum=0.9), decay=0.5)
    resumed.refresh_every = 3
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, batches[2:])
    train(resumed, batches[2:])
    assert torch.equal(weights(other), weights(model))


@every_toy
def test_a_solution_stays_until_the_next_refresh(toy: Callable[..., Preconditioned]) -> None:
    model, x = make_model("linear")
    optimizer = toy(model, SGD(model.parameters(), lr=0.0))
    optimizer.refresh_every = 2
    state = optimizer._preconditioner.layers[model[0].weight, ""]
    solutions = []
    for batch in (x, x + 1, 2 * x):
        step_gradients(optimizer, batch)
        assert state.solution is not None
        solutions.append({name: value.clone() for name, value in state.solution.items()})
    assert all(torch.equal(value, solutions[0][name]) for name, value in solutions[1].items())
    assert not all(torch.equal(value, solutions[0][name]) for name, value in solutions[2].items())


@every_toy
def test_summary_names_the_method(toy: Callable[..., Preconditioned]) -> None:
    model, _ = make_model("linear")
    optimizer = toy(model, SGD(model.parameters(), lr=0.1))
    assert optimizer.method.made.label in optimizer.summary()


@every_toy
def test_a_copy_continues_by_itself(toy: Callable[..., Preconditioned]) -> None:
    model, x = make_model("linear")
    optimizer = toy(model, SGD(model.parameters(), lr=0.1), decay=0.5)
    train(optimizer, [x])
    twin = copy.deepcopy(optimizer)
    train(optimizer, [x + 1])
    train(twin, [x + 1])
    assert torch.equal(weights(twin.model), weights(model))


# --- what a method may do wrong ---------------------------------------------------------------


def test_statistics_may_be_the_gradient_itself() -> None:
    """They are kept apart from it: the step overwrites gradients."""

    class Block(toys.GradientBlock):
        def __init__(self, layer: Any) -> None:
            super().__init__(layer)
            self.statistics = {"V": Statistic(self.shape, "gradient")}
            self.solution_shapes = {"V": self.shape}

        def observe_gradient(self, gradient: Tensor, context: Any = None) -> dict[str, Tensor]:
            return {"V": gradient}

        def solve(self, part: str, given: Given) -> dict[str, Tensor]:
            return {"V": given.means["V"].clone()}

        def precondition(self, solution: Any, gradient: Tensor, damping: float) -> Tensor:
            return 100 * gradient

    class Aliasing(toys.Toy):
        made = Block

    model = nn.Linear(3, 2, bias=False)
    optimizer = kronfac.register_method(Aliasing)(model, SGD(model.parameters(), lr=0.0))
    model(torch.ones(4, 3)).sum().backward()
    expected = model.weight.grad.clone()
    optimizer.step()
    assert_equal(optimizer.state_dict()["state"][0]["kronfac.V.sum"], expected)


def test_an_option_that_every_method_has_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clashing(toys.Toy):
        momentum: float = 0.5

    with pytest.raises(
        ValueError, match="has an option 'momentum', which every method has already"
    ):
        kronfac.register_method(Clashing)


def test_only_methods_can_be_registered() -> None:
    with pytest.raises(TypeError, match=r"takes a subclass of kronfac\.Method"):
        kronfac.register_method(nn.Linear)  # type: ignore[arg-type]
