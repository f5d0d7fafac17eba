"""What every method of the family has to do, whatever its mathematics.

A method's own identities are in its own file; this one holds the promises of the engine: training with
its defaults, ranks that equal one process, accumulation, resuming, dead layers, bad batches, autocast.
"""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.distributed import equivalence
from tests.distributed.equivalence import SCHEMES, Case, assert_equals_one_process, on_ranks
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.methods.variants import SKETCHED, VARIANTS
from tests.training import assert_same, parameters, saved_and_loaded

MODELS = ["mlp", "cnn", "transformer"]
#: Methods as they are; with options of their own they run with `-m slow`.
PLAIN = [name for name, (_, own) in VARIANTS.items() if not own]
NAMES = [pytest.param(name, marks=[] if name in PLAIN else [pytest.mark.slow]) for name in VARIANTS]


def make(name: str, model: nn.Module, lr: float = 0.01, **options: Any) -> Any:
    method, own = VARIANTS[name]
    return getattr(kronfac, method)(model, SGD(model.parameters(), lr=lr), **{**own, **options})


def loss_of(model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    scores = model(data[0])
    if optimizer.needs_observe:
        optimizer.observe(scores)
    return F.cross_entropy(scores.flatten(0, -2), data[1].flatten())


def train(model: nn.Module, optimizer: Any, kind: str, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, optimizer, KINDS[kind].batch(number, 12))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


# --- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("mlp", marks=pytest.mark.slow), *MODELS[1:]])
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_with_its_defaults(name: str, kind: str) -> None:
    model = KINDS[kind].model()
    optimizer = make(name, model)
    data = KINDS[kind].batch(0, 32)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(model, optimizer, data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    assert max(losses) < 1.2 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_closures_do_the_same(name: str) -> None:
    options = {"factor_every": 2, "refresh_every": 2}
    plain, closed = KINDS["mlp"].model(), KINDS["mlp"].model()
    train(plain, make(name, plain, **options), "mlp", range(4))
    optimizer = make(name, closed, **options)
    for number in range(4):
        optimizer.step(functools.partial(closure, closed, optimizer, number))
    assert_same(parameters(plain), parameters(closed))


def closure(model: nn.Module, optimizer: Any, number: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, optimizer, KINDS["mlp"].batch(number, 12))
    loss.backward()
    return loss


@pytest.mark.parametrize("name", NAMES)
def test_the_summary_accounts_for_every_parameter(name: str) -> None:
    model = KINDS["transformer"].model()
    optimizer = make(name, model)
    text = str(optimizer)
    assert type(optimizer).__name__ in text
    preconditioned = {
        p for state in optimizer._preconditioner.layers.values() for p in state.layer.parameters
    }
    left_out = optimizer.left_out()
    for parameter_name, parameter in model.named_parameters():
        assert parameter in preconditioned or any(
            parameter_name.startswith(one) for one in left_out
        ), parameter_name


# --- the same numbers ------------------------------------------------------------------------


def family_case(name: str, model: str = "mlp", **settings: Any) -> Case:
    method, own = VARIANTS[name]
    return equivalence.case(model, method=method, steps=5, base="sgd", **{**own, **settings})


def check_ranks(names: list[str], scheme: str, size: int, models: list[str]) -> None:
    cases = [family_case(name, model) for name in names for model in models if name not in SKETCHED]
    found = run(size, on_ranks, scheme, SCHEMES[scheme], cases)
    for case in cases:
        assert_equals_one_process(case, [outcomes[str(case)] for outcomes in found])


def in_turn(scheme: str) -> list[str]:
    """The methods that run under this scheme by default: each under one scheme, all with `-m slow`."""
    number = list(SCHEMES).index(scheme)
    return [name for index, name in enumerate(PLAIN) if index % len(SCHEMES) == number]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_equal_one_process(scheme: str) -> None:
    check_ranks(in_turn(scheme), scheme, 3, ["mlp", "transformer"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_ranks_equal_one_process(scheme: str, size: int) -> None:
    check_ranks(list(VARIANTS), scheme, size, ["mlp", "cnn", "shared", "transformer"])


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_equal_the_whole_batch(name: str) -> None:
    whole = equivalence.alone(family_case(name))
    parts = equivalence.alone(family_case(name, micro=3))
    torch.testing.assert_close(parts.parameters, whole.parameters, rtol=1e-9, atol=1e-11)


# --- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["transformer"])
@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_bit_for_bit(name: str, kind: str) -> None:
    options = {"factor_every": 1, "refresh_every": 3, "momentum": 0.9}
    model = KINDS[kind].model()
    optimizer = make(name, model, **options)
    train(model, optimizer, kind, range(4))
    again = KINDS[kind].model()
    other = make(name, again, **options)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, optimizer, kind, range(4, 8))
    train(again, other, kind, range(4, 8))
    assert_same(parameters(model), parameters(again))


@pytest.mark.parametrize("name", NAMES)
def test_copies_go_their_own_way(name: str) -> None:
    model = KINDS["mlp"].model()
    optimizer = make(name, model)
    train(model, optimizer, "mlp", range(2))
    twin, other = copy.deepcopy((model, optimizer))
    third, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    for each, own in ((model, optimizer), (twin, other), (third, pickled)):
        train(each, own, "mlp", range(2, 4))
    assert_same(parameters(model), parameters(twin))
    assert_same(parameters(model), parameters(third))


# --- what may go wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_dead_layers_stay_finite(name: str) -> None:
    """A layer that passes nothing on: the one after it sees zeros, and it sees no gradient itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.fill_(-1.0)
    optimizer = make(name, model, factor_every=1, refresh_every=1)
    train(model, optimizer, "mlp", range(6))
    assert is_finite(model)


@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_batch_leaves_nothing_behind(name: str, value: float) -> None:
    model = KINDS["mlp"].model()
    optimizer = make(name, model, factor_every=1, refresh_every=1)
    train(model, optimizer, "mlp", range(2))
    x, y = KINDS["mlp"].batch(2, 12)
    x[2, 1] = value
    optimizer.zero_grad()
    loss_of(model, optimizer, (x, y)).backward()
    for parameter in model.parameters():  # as a loop does that skips what is not finite
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0, 0, 0)
    optimizer.step()
    assert is_finite(model)
    train(model, optimizer, "mlp", range(3, 6))
    assert is_finite(model)


@pytest.mark.parametrize("name", NAMES)
def test_a_first_batch_that_is_bad(name: str) -> None:
    model = KINDS["mlp"].model()
    optimizer = make(name, model, factor_every=1, refresh_every=1)
    x, y = KINDS["mlp"].batch(2, 12)
    x[2, 1] = float("nan")
    optimizer.zero_grad()
    loss_of(model, optimizer, (x, y)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0, 0, 0)
    optimizer.step()
    train(model, optimizer, "mlp", range(3, 6))
    assert is_finite(model)


# --- precision and compilers -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str) -> None:
    model = KINDS["cnn"].model()
    optimizer = make(name, model, factor_every=1, refresh_every=2)
    losses = []
    data = KINDS["cnn"].batch(0, 32)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, optimizer, data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert is_finite(model)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_models_give_the_same_numbers(name: str) -> None:
    case = family_case(name, "cnn")
    eager = equivalence.alone(case)
    with equivalence.double_precision():
        model = KINDS["cnn"].model()
        compiled = equivalence.compile_model(model)
        base = SGD(model.parameters(), lr=0.1)
        optimizer = getattr(kronfac, case.method)(compiled, base, **dict(case.options))
        for number in range(case.steps):
            equivalence.take_step(compiled, optimizer, KINDS["cnn"].batch(number, 12), case)
        torch.testing.assert_close(parameters(model), eager.parameters, rtol=1e-9, atol=1e-11)
