"""MKOR: inverses by rank-one updates, their stabilizer, the switch to first order, what travels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.methods.mkor.block import PATIENCE, RATE_MEMORY
from kronfac.methods.mkor.updates import stabilized, take_in
from kronfac.protocol.block import Given
from tests.distributed.equivalence import same_bits
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.methods import small_nets
from tests.references.mkor import SlowMKOR
from tests.training import layers, parameters

MU = 0.95
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def positive(*shape: int) -> Tensor:
    """Positive definite matrices."""
    roots = normal(*shape, 2 * shape[-1])
    return roots @ roots.mT / roots.shape[-1]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def updated(J: Tensor, v: Tensor, update: str, dense: bool = True) -> Tensor:
    return take_in(J, v, 1.0, update=update, memory=MU, dense=dense)  # type: ignore[arg-type]


# --- updates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_the_exact_update_is_the_inverse_of_the_running_average(shape: tuple[int, ...]) -> None:
    S, v = positive(*shape), normal(*shape)
    average = MU * S + (1 - MU) * v[..., None] * v[..., None, :]
    assert_equal(updated(torch.linalg.inv(S), v, "exact"), torch.linalg.inv(average))


def test_the_update_of_the_public_code_adds_an_outer_product() -> None:
    J, v = positive(4), normal(4)
    mixed = MU * J + (1 - MU) * torch.eye(4, dtype=DOUBLE)
    expected = torch.linalg.inv(torch.linalg.inv(mixed) + torch.outer(v, v))
    assert_equal(updated(J, v, "code"), expected)
    assert_equal(updated(J, torch.zeros_like(v), "code"), mixed)
    assert_equal(updated(J, v * 1e6, "code"), updated(J, 100 * v.sign(), "code"))


def test_the_printed_update_grows_where_an_inverse_has_to_shrink() -> None:
    J, v = positive(4), normal(4)
    inside = v @ J @ v
    weight = (1 - MU) / (MU**2 * (1 + MU * (1 - MU) * inside))
    found = updated(J, v, "paper")
    assert_equal(found, MU * J + weight * torch.outer(J @ v, J @ v))
    assert torch.linalg.eigvalsh(found).min() > 0
    assert v @ updated(J, v, "exact") @ v < inside < v @ updated(J, 3 * v, "paper") @ v


@pytest.mark.parametrize("update", ["exact", "paper", "code"])
def test_diagonal_sides_are_updated_as_numbers_are(update: str) -> None:
    J, v = torch.rand(4, dtype=DOUBLE) + 0.1, normal(4)
    found = updated(J, v.square(), update, dense=False)
    expected = [updated(j.reshape(1, 1), x.reshape(1), update) for j, x in zip(J, v, strict=True)]
    assert_equal(found, torch.cat(expected).flatten())


@pytest.mark.parametrize("size", [1e-45, 1e20, 3e38])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("update", ["exact", "paper", "code"])
def test_extreme_vectors_leave_finite_inverses(update: str, dense: bool, size: float) -> None:
    J = torch.eye(3) if dense else torch.ones(3)
    assert torch.isfinite(updated(J, torch.full((3,), size), update, dense)).all()


@pytest.mark.parametrize("update", ["exact", "paper", "code"])
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_it_follows_the_reference(kind: str, update: str) -> None:
    model, other = small_nets.twins(kind)
    base = SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.MKOR(model, base, update=update, factor_every=2, refresh_every=2)
    reference = SlowMKOR(other, lr=0.1, update=update, every=2)
    small_nets.assert_follows(optimizer, reference, kind, steps=6)


# --- the stabilizer --------------------------------------------------------------------------


def test_the_stabilizer_mixes_in_the_identity_beyond_its_threshold() -> None:
    small, large = 1.9 * torch.eye(3), 2.1 * torch.eye(3)
    both = torch.stack([small, large])
    found = stabilized(both, 1.0, threshold=2.0, keep=0.9, dense=True)
    assert_equal(found, torch.stack([small, 0.9 * large + 0.1 * torch.eye(3)]))


def inverses_without_vectors(updates: int, **options: Any) -> list[float]:
    """The largest entry of an inverse that is shown zeros only, after each update."""
    model = nn.Linear(3, 2, bias=False)
    (state,) = layers(kronfac.MKOR(model, SGD(model.parameters(), lr=0.1), **options)).values()
    block, previous, found = state.block, None, []
    for _ in range(updates):
        given = Given({"a": torch.zeros(3), "g": torch.zeros(2)}, 1.0, previous=previous)
        previous = block.refresh(given)
        found.append(previous["A"].abs().max().item())
    return found


def test_the_stabilizer_bounds_what_no_vector_shows() -> None:
    assert max(inverses_without_vectors(60)) <= 2.0 / MU
    free = inverses_without_vectors(60, threshold=math.inf)
    assert free[-1] == pytest.approx(MU**-60, rel=1e-4)


# --- scale and precision ---------------------------------------------------------------------


def test_a_large_damping_leaves_the_gradient() -> None:
    model, other = small_nets.twins("conv")
    plain = SGD(other.parameters(), lr=0.1)
    base = SGD(model.parameters(), lr=0.1)
    small_nets.train(model, kronfac.MKOR(model, base, damping=1e20), "conv", range(3))
    small_nets.train(other, plain, "conv", range(3))
    torch.testing.assert_close(parameters(model), parameters(other), rtol=1e-7, atol=1e-9)


def test_steps_are_as_long_as_gradients() -> None:
    model = nn.Linear(4, 3, bias=False).double()
    optimizer = kronfac.MKOR(model, SGD(model.parameters(), lr=0.1))
    F.cross_entropy(model(normal(6, 4)), torch.arange(6) % 3).backward()
    before = model.weight.grad.clone()
    optimizer.step()
    assert not torch.allclose(model.weight.grad, before)
    assert_equal(model.weight.grad.norm(), before.norm())


def test_inverses_may_be_kept_in_16_bits() -> None:
    found = {}
    for half in (False, True):
        model = small_nets.make("conv").float()
        optimizer = kronfac.MKOR(model, SGD(model.parameters(), lr=0.1), half=half)
        x, y = small_nets.batch("conv", 0)
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x.float()), y).backward()
            optimizer.step()
        states = layers(optimizer).values()
        dtypes = {value.dtype for state in states for value in state.solution.values()}
        assert dtypes == {torch.bfloat16 if half else torch.float32}
        held = sum(state.block.cost.solution_bytes for state in states)
        found[half] = torch.cat([p.detach().flatten() for p in model.parameters()]), held
    assert found[True][1] * 2 == found[False][1]
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=5e-3)


@pytest.mark.parametrize("wide", ["A", "G"])
def test_wide_sides_keep_the_diagonal(wide: str) -> None:
    shape = (6, 3) if wide == "A" else (3, 6)
    model = nn.Linear(*shape, bias=False).double()
    optimizer = kronfac.MKOR(model, SGD(model.parameters(), lr=0.1), max_dim=4)
    x = normal(8, shape[0])
    F.cross_entropy(model(x), torch.arange(8) % shape[1]).backward()
    optimizer.step()
    (state,) = layers(optimizer).values()
    assert {side: value.dim() for side, value in state.solution.items()} == {
        "A": 1 if wide == "A" else 2,
        "G": 1 if wide == "G" else 2,
    }
    if wide == "A":
        assert_equal(state.solution["A"], 1 / (MU + (1 - MU) * x.mean(0).square()))


def test_tokens_keep_their_frequencies() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)).double()
    optimizer = kronfac.MKOR(model, SGD(model.parameters(), lr=0.1))
    F.cross_entropy(model(torch.tensor([0, 0, 2, 3])), torch.tensor([0, 1, 0, 1])).backward()
    optimizer.step()
    frequencies = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=DOUBLE)
    assert_equal(layers(optimizer)["0"].solution["A"], 1 / (MU + (1 - MU) * frequencies))


# --- the switch to first order ---------------------------------------------------------------


def hybrid(model: nn.Module, **options: Any) -> Any:
    base = SGD(model.parameters(), lr=0.05)
    every = {"factor_every": 1, "refresh_every": 1}
    return kronfac.MKOR(model, base, hybrid=True, **{**every, **options})


def test_the_fall_of_a_quadratic_loss_is_known_exactly() -> None:
    model = nn.Linear(4, 2, bias=False).double()
    optimizer = hybrid(model)
    x, y, losses, total = normal(8, 4), normal(8, 2), [], 0.0
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) > 1:
            total = RATE_MEMORY * total + (1 - RATE_MEMORY) * (losses[-2] - losses[-1])
    (state,) = layers(optimizer).values()
    assert state.solution["rate"][0].item() == pytest.approx(total, rel=1e-9)


def falling(model: nn.Module, optimizer: Any, steps: int) -> list[bool]:
    """Train on one batch; after each step, whether the layer has gone over to first order."""
    x, y, over = small_nets.batch("linear", 0)[0], torch.arange(6) % 3, []
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        over.append(all(bool(one.solution["rate"][3] > 0) for one in layers(optimizer).values()))
    return over


def test_a_layer_goes_over_when_the_loss_falls_more_slowly_and_stays_there() -> None:
    model = small_nets.make("linear")
    over = falling(model, hybrid(model, switch_below=1.0), 40)
    first = over.index(True)
    assert first >= PATIENCE
    assert over == [False] * first + [True] * (40 - first)


def test_first_order_steps_are_those_of_the_base() -> None:
    model = small_nets.make("linear")
    optimizer = hybrid(model, switch_below=1.0)
    assert falling(model, optimizer, 40)[-1]
    x, y = small_nets.batch("linear", 7)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert_equal(parameter.grad, gradient)


def test_until_then_it_is_mkor() -> None:
    model, other = small_nets.twins("conv")
    options = {"factor_every": 1, "refresh_every": 1}
    plain = kronfac.MKOR(other, SGD(other.parameters(), lr=0.05), **options)
    small_nets.train(model, hybrid(model), "conv", range(5))
    small_nets.train(other, plain, "conv", range(5))
    torch.testing.assert_close(parameters(model), parameters(other), rtol=0, atol=0)


def switched_on_rank(rank: int, scheme: str) -> tuple[Any, bool]:
    plain = small_nets.make("linear")
    model = DistributedDataParallel(plain)
    optimizer = hybrid(model, distribute=scheme, switch_below=1.0)
    x, y = small_nets.batch("linear", 0)[0], torch.arange(6) % 3
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
    return parameters(plain), same_bits(plain)


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_ranks_go_over_together(scheme: str) -> None:
    model = small_nets.make("linear")
    assert falling(model, hybrid(model, switch_below=1.0), 30)[-1]
    for found, same in run(2, switched_on_rank, scheme):
        assert same
        torch.testing.assert_close(found, parameters(model), rtol=1e-8, atol=1e-10)


def test_half_precision_watches_the_loss_in_full() -> None:
    model = small_nets.make("linear").float()
    optimizer = hybrid(model, half=True)
    x, y = small_nets.batch("linear", 0)
    F.cross_entropy(model(x.float()), y).backward()
    optimizer.step()
    for state in layers(optimizer).values():
        wide = {name for name, one in state.solution.items() if one.dtype == torch.float32}
        assert wide == {"weight", "gradient", "rate"}


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "newton"}, "update='newton' is not supported; choose one of 'exact'"),
        ({"memory": 1.0}, r"memory=1.0 must be a number in \(0, 1\)"),
        ({"threshold": 0.5}, "threshold=0.5 must be a number of at least 1"),
        ({"keep": 1.0}, r"keep=1.0 must be a number in \[0, 1\)"),
        ({"half": 16}, "half=16 is not supported"),
        ({"hybrid": "yes"}, "hybrid='yes' is not supported"),
        ({"switch_below": 0.0}, r"switch_below=0.0 must be a number in \(0, 1\]"),
        ({"max_dim": 0}, "max_dim=0 must be a whole number"),
        ({"fisher": "mc"}, "MKOR needs the mean of the loss's own output gradients"),
        ({"damping": kronfac.Relative()}, "does not know; give damping=1e-3"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        kronfac.MKOR(model, SGD(model.parameters(), lr=0.1), **options)


def test_norms_are_left_to_the_base_optimizer() -> None:
    model = KINDS["cnn"].model()
    optimizer = kronfac.MKOR(model, SGD(model.parameters(), lr=0.1))
    assert set(optimizer.left_out()) == {"1.weight", "1.bias"}


# --- what travels ----------------------------------------------------------------------------

STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hybrid": {"hybrid": True},
    "half": {"half": True},
    "16 bits": {"wire_dtype": torch.bfloat16},
}


def traffic_on_rank(rank: int, scheme: str) -> dict[str, dict[str, int]]:
    found = {}
    for name, asked in RUNS.items():
        options = {"factor_every": 1, "refresh_every": 1, **asked}
        distribute = kronfac.Distribute(scheme, wire_dtype=options.pop("wire_dtype", None))
        model = DistributedDataParallel(KINDS["cnn"].model())
        base = SGD(model.parameters(), lr=0.01)
        optimizer = kronfac.MKOR(model, base, distribute=distribute, **options)
        for number in range(STEPS):
            x, y = KINDS["cnn"].batch(10 * number + rank, 3)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found[name] = optimizer.stats()["bytes"]
        optimizer.detach()
    return found


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt", "mem-opt"])
def test_only_vectors_travel(scheme: str) -> None:
    modules = KINDS["cnn"].model().modules()
    watched = [one for one in modules if isinstance(one, nn.Linear | nn.Conv2d)]
    numbers = sum(one.weight[0].numel() + (one.bias is not None) for one in watched)
    numbers += sum(len(one.weight) for one in watched)
    gradients = sum(p.numel() for one in watched for p in one.parameters())
    for found in run(2, traffic_on_rank, scheme):
        for name, bytes_ in found.items():
            item = 2 if name == "16 bits" else 4
            spread = STEPS * item * gradients if scheme == "mem-opt" else 0
            expected = {"reduce": STEPS * item * numbers, "share": 0, "spread": spread}
            assert {phase: bytes_[phase] for phase in expected} == expected, name
