"""AdaFisher: scaled diagonals, their averages, the first moment, what travels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import kronfac
from kronfac.methods.adafisher import AdaFisherBlock, FirstMoment, min_max
from kronfac.protocol.block import Given
from kronfac.protocol.transform import LayerStep
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.methods import small_nets
from tests.references.adafisher import SlowAdaFisher
from tests.training import layers, parameters

LAMBDA = 1e-3
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def block_of(shape: tuple[int, ...], average: str = "paper", normalize: bool = True) -> Any:
    gammas = (0.92, 0.008) if average == "paper" else None
    return AdaFisherBlock(shape, DOUBLE, gammas=gammas, normalize=normalize)


# --- the division ----------------------------------------------------------------------------


def test_the_division_is_by_the_damped_diagonal_of_a_kronecker_product() -> None:
    solution = {"h": torch.rand(5, dtype=DOUBLE), "s": torch.rand(4, dtype=DOUBLE)}
    V, block = normal(4, 5), block_of((4, 5))
    dense = torch.kron(torch.diag(solution["s"]), torch.diag(solution["h"]))
    damped = dense + LAMBDA * torch.eye(20, dtype=DOUBLE)
    expected = torch.linalg.solve(damped, V.flatten()).reshape(4, 5)
    assert_equal(block.precondition(solution, V, LAMBDA), expected)
    assert_equal(block.multiply(solution, V).flatten(), dense @ V.flatten())
    assert_equal(block.mean_curvature(solution), (dense.trace() / 20).reshape(1, 1))


def test_without_curvature_it_is_the_gradient_over_the_damping() -> None:
    V = normal(4, 5)
    zeros = {"h": torch.zeros(5, dtype=DOUBLE), "s": torch.zeros(4, dtype=DOUBLE)}
    assert_equal(block_of((4, 5)).precondition(zeros, V, LAMBDA), V / LAMBDA)


def test_a_true_average_without_scaling_is_the_diagonal_of_kfac() -> None:
    steps = []
    options = {"damping": 0.1, "rescale": None, "factor_every": 1, "refresh_every": 1, "decay": 0.5}
    own: dict[str, dict[str, Any]] = {
        "AdaFisher": {"average": "true", "normalize": False, "beta": 0.0},
        "KFAC": {"max_dim": 1},
    }
    for name, more in own.items():
        model = small_nets.make("conv")
        optimizer = getattr(kronfac, name)(
            model, SGD(model.parameters(), lr=0.1), **options, **more
        )
        small_nets.train(model, optimizer, "conv", range(3))
        steps.append(parameters(model))
    torch.testing.assert_close(*steps, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("average", ["paper", "true"])
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_it_follows_the_reference(kind: str, average: str) -> None:
    model, other = small_nets.twins(kind)
    optimizer = kronfac.AdaFisher(
        model,
        SGD(model.parameters(), lr=1e-3),
        average=average,
        factor_every=2,
        refresh_every=2,
        rescale=None,
    )
    reference = SlowAdaFisher(other, lr=1e-3, average=average, every=2)
    small_nets.assert_follows(optimizer, reference, kind, steps=6)


# --- averages --------------------------------------------------------------------------------


def test_scaling_maps_to_the_unit_interval() -> None:
    values = torch.tensor([3.0, 1.0, 2.0])
    assert_equal(min_max(values, values.amin(), values.amax()), torch.tensor([1.0, 0.0, 0.5]))
    equal = torch.ones(3)
    assert_equal(min_max(equal, equal.amin(), equal.amax()), torch.zeros(3))


def test_scaling_does_not_depend_on_the_scale_of_the_loss() -> None:
    """An offset of 1e-6 would drown the diagonal of a loss that is averaged over many samples."""
    values = torch.rand(5)
    tiny = values * 1e-12
    torch.testing.assert_close(
        min_max(tiny, tiny.amin(), tiny.amax()), min_max(values, values.amin(), values.amax())
    )


def test_the_papers_rule_starts_from_ones_and_falls_to_less_than_a_hundredth() -> None:
    block, previous, found = block_of((2, 3)), None, []
    means = {"h": torch.tensor([0.0, 1.0, 2.0]), "s": torch.tensor([1.0, 3.0])}
    for _ in range(8):
        previous = block.refresh(Given(means, LAMBDA, previous=previous))
        found.append(previous["h"])
    scaled = torch.tensor([0.0, 0.5, 1.0])
    torch.testing.assert_close(found[0], 0.08 + 0.008 * scaled)
    torch.testing.assert_close(found[-1], 0.008 / 0.92 * scaled, rtol=0, atol=1e-6)


def test_the_papers_rule_takes_each_diagonal_once() -> None:
    model = small_nets.make("linear")
    base = SGD(model.parameters(), lr=0.0)
    optimizer = kronfac.AdaFisher(model, base, factor_every=2, refresh_every=4)
    small_nets.train(model, optimizer, "linear", range(1))
    first = {name: state.solution["h"].clone() for name, state in layers(optimizer).items()}
    small_nets.train(model, optimizer, "linear", range(1, 2))
    for name, state in layers(optimizer).items():
        assert torch.equal(state.solution["h"], first[name])
    small_nets.train(model, optimizer, "linear", range(2, 3))
    for name, state in layers(optimizer).items():
        assert (state.solution["h"] < first[name]).all()


# --- the first moment ------------------------------------------------------------------------


def test_the_first_moment_is_adams() -> None:
    weight = nn.Parameter(normal(4, 5))
    adam, rule = Adam([weight], lr=0.0, betas=(0.9, 0.99)), FirstMoment(0.9)
    buffers: dict[str, Tensor] = {}
    for step in range(4):
        weight.grad = normal(4, 5)
        found = rule(weight.grad, LayerStep(step, buffers))
        adam.step()
        assert_equal(found, adam.state[weight]["exp_avg"] / (1 - 0.9 ** (step + 1)))


def test_without_beta_nothing_is_kept() -> None:
    model = small_nets.make("linear")
    optimizer = kronfac.AdaFisher(model, SGD(model.parameters(), lr=0.01), beta=0.0)
    small_nets.train(model, optimizer, "linear", range(2))
    assert all(not state.buffers for state in layers(optimizer).values())


def test_weight_decay_is_decoupled() -> None:
    """What the base optimizer adds to a gradient is not divided."""
    model, other = small_nets.twins("linear")
    options = {"rescale": None, "beta": 0.0}
    before = parameters(model)
    decayed = kronfac.AdaFisher(
        model, SGD(model.parameters(), lr=1e-3, weight_decay=0.1), **options
    )
    plain = kronfac.AdaFisher(other, SGD(other.parameters(), lr=1e-3), **options)
    small_nets.train(model, decayed, "linear", range(1))
    small_nets.train(other, plain, "linear", range(1))
    for name, value in parameters(model).items():
        assert_equal(value, parameters(other)[name] - 1e-3 * 0.1 * before[name])


# --- layers ----------------------------------------------------------------------------------


def test_norms_are_divided_by_the_second_moments_of_their_gradients() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)).double()
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
    options = {"average": "true", "normalize": False, "beta": 0.0, "rescale": None}
    optimizer = kronfac.AdaFisher(model, SGD(model.parameters(), lr=0.0), **options)
    x, y = normal(5, 4, 3, 3), torch.arange(5) % 3
    squares = [torch.zeros(4, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE)]
    for n in range(5):
        single = copy.deepcopy(model)
        F.cross_entropy(single(x[n : n + 1]), y[n : n + 1]).backward()
        squares[0] += single[0].weight.grad.square() / 5
        squares[1] += single[0].bias.grad.square() / 5
    F.cross_entropy(model(x), y).backward()
    before = [model[0].weight.grad.clone(), model[0].bias.grad.clone()]
    optimizer.step()
    assert_equal(model[0].weight.grad, before[0] / (squares[0] + LAMBDA))
    assert_equal(model[0].bias.grad, before[1] / (squares[1] + LAMBDA))


def test_every_layer_of_a_transformer_takes_part() -> None:
    model = KINDS["transformer"].model()
    optimizer = kronfac.AdaFisher(model, SGD(model.parameters(), lr=0.01))
    assert optimizer.left_out() == {}


@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("average", ["paper", "true"])
def test_it_trains_at_its_usual_rate(kind: str, average: str) -> None:
    model = KINDS[kind].model()
    base = SGD(model.parameters(), lr=1e-3)
    optimizer = kronfac.AdaFisher(model, base, average=average)
    x, y = KINDS[kind].batch(0, 32)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    assert max(losses) < 1.2 * losses[0]


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.0}, r"beta=1.0 must be a number in \[0, 1\)"),
        ({"gammas": 0.9}, r"gammas=0.9 must be two numbers in \(0, 1\]"),
        ({"gammas": (0.9, -1.0)}, "must be two numbers"),
        ({"average": "false"}, "average='false' is not supported; choose one of 'paper', 'true'"),
        ({"normalize": None}, "normalize=None is not supported"),
        ({"fisher": "forward"}, "which fisher='forward' does not observe"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        kronfac.AdaFisher(model, SGD(model.parameters(), lr=0.1), **options)


# --- what travels ----------------------------------------------------------------------------


def traffic_on_rank(rank: int, scheme: str) -> dict[str, int]:
    model = DistributedDataParallel(KINDS["cnn"].model())
    base = SGD(model.parameters(), lr=0.01)
    every = {"factor_every": 2, "refresh_every": 2}
    optimizer = kronfac.AdaFisher(model, base, distribute=scheme, rescale="graft", **every)
    for number in range(4):
        x, y = KINDS["cnn"].batch(10 * number + rank, 3)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    found: dict[str, int] = optimizer.stats()["bytes"]
    return found


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt"])
def test_only_vectors_travel(scheme: str) -> None:
    modules = KINDS["cnn"].model().modules()
    watched = [one for one in modules if isinstance(one, nn.Linear | nn.Conv2d | nn.GroupNorm)]
    numbers = 0
    for one in watched:
        norm = isinstance(one, nn.GroupNorm)
        d_in = len(one.weight) if norm else one.weight[0].numel() + (one.bias is not None)
        numbers += d_in + len(one.weight)
    for found in run(2, traffic_on_rank, scheme):
        assert found["reduce"] == 2 * 4 * numbers  # two updates
        assert found["share"] == found["spread"] == 0
