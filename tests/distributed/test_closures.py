"""Steps with a closure: damping that adapts itself, and steps by the quadratic model, over ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import (
    Outcome,
    assert_near,
    bounds,
    double_precision,
    same_bits,
)
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.training import parameters

STEPS, SAMPLES = 6, 12
COMMON: dict[str, Any] = {"factor_every": 1, "refresh_every": 2, "decay": 0.95, "solver": "eigen"}
RULES: dict[str, tuple[float, dict[str, Any]]] = {
    "levenberg-marquardt": (
        0.1,
        {"damping": kronfac.LevenbergMarquardt(1e-2, every=2), "fisher": "exact"},
    ),
    "quadratic": (1.0, {"damping": 0.1, "rescale": "quadratic"}),
    "both": (
        1.0,
        {"damping": kronfac.LevenbergMarquardt(1e-1, every=2), "rescale": "quadratic"},
    ),
}


def closure_of(
    model: nn.Module, optimizer: kronfac.KFAC, x: Tensor, y: Tensor
) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        return loss

    return closure


def train(rank: int, rule: str, scheme: Any = None) -> Outcome:
    """On ranks if there are any, with the whole batch otherwise."""
    lr, options = RULES[rule]
    with double_precision():
        kind, outcome = KINDS["cnn"], Outcome({}, {})
        plain = kind.model()
        base = SGD(plain.parameters(), lr=lr)
        model: nn.Module = plain
        world_size = 1
        if scheme is not None:
            world_size, model = dist.get_world_size(), DistributedDataParallel(plain)
            options = options | {"distribute": scheme}
        optimizer = kronfac.KFAC(model, base, **COMMON, **options)
        start, end = bounds(SAMPLES, world_size)[rank]
        for number in range(STEPS):
            x, y = kind.batch(number, SAMPLES)
            optimizer.step(closure_of(model, optimizer, x[start:end], y[start:end]))
            outcome.history.append(parameters(plain))
            if scheme is not None and not same_bits(plain):
                outcome.differing_steps.append(number)
        outcome.parameters, outcome.stats = parameters(plain), optimizer.stats()
        return outcome


@pytest.mark.parametrize(
    ("scheme", "world_size"),
    [
        ("replicated", 2),
        ("comm-opt", 3),
        ("mem-opt", 2),
        (kronfac.Hybrid(0.5), 4),
        ("spd", 2),
        ("auto", 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES)
def test_ranks_equal_one_process(rule: str, scheme: Any, world_size: int) -> None:
    expected = train(0, rule)
    for rank, outcome in enumerate(run(world_size, train, rule, scheme)):
        assert outcome.differing_steps == []
        assert outcome.stats["damping"] == pytest.approx(expected.stats["damping"], rel=1e-9)
        for step, values in enumerate(outcome.history):
            assert_near(values, expected.history[step], f"rank {rank}, step {step}")


def test_the_damping_does_adapt_itself() -> None:
    assert train(0, "levenberg-marquardt").stats["damping"] != 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_parameters_with_owners_are_refused_on_all_ranks(rule: str) -> None:
    for error in run(2, train, rule, "layer-parallel", expect_errors=True):
        assert isinstance(error, ValueError)
        assert "layer-parallel" in str(error)
