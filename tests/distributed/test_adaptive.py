"""Damping and steps that adapt themselves do so alike on all ranks, as one process would."""

from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import assert_near, bounds, double_precision, same_bits
from tests.distributed.ranks import run
from tests.training import batch, mlp, parameters

SAMPLES, STEPS = 24, 8
RULES: dict[str, dict[str, Any]] = {
    "Levenberg-Marquardt": {"damping": kronfac.LevenbergMarquardt(1.0, every=2, omega=0.5)},
    "quadratic": {"damping": 0.1, "rescale": "quadratic"},
}


def train(rank: int, rule: str, scheme: str) -> tuple[dict[str, Tensor], float]:
    with double_precision():
        plain = mlp()
        alone = dist.get_world_size() == 1
        model = plain if alone else DistributedDataParallel(plain)
        base = SGD(plain.parameters(), lr=1.0 if rule == "quadratic" else 0.1)
        options = {"factor_every": 1, "refresh_every": 2, "solver": "eigen", "fisher": "exact"}
        optimizer = kronfac.KFAC(model, base, distribute=scheme, **options, **RULES[rule])
        start, end = bounds(SAMPLES, dist.get_world_size())[rank]
        for number in range(STEPS):
            x, y = batch(number, SAMPLES)

            def closure(x: Tensor = x[start:end], y: Tensor = y[start:end]) -> Tensor:
                optimizer.zero_grad()
                outputs = model(x)
                optimizer.observe(outputs)
                loss = F.cross_entropy(outputs, y)
                loss.backward()
                return loss

            optimizer.step(closure)
            assert same_bits(plain)
        return parameters(plain), optimizer.stats()["damping"]


@pytest.mark.parametrize("scheme", [pytest.param("comm-opt", marks=pytest.mark.slow), "mem-opt"])
@pytest.mark.parametrize("rule", RULES)
def test_ranks_adapt_as_one_process_does(rule: str, scheme: str) -> None:
    expected, damping = run(1, train, rule, scheme)[0]
    if rule == "Levenberg-Marquardt":
        assert damping != 1.0
    for values, found in run(3, train, rule, scheme):
        assert found == pytest.approx(damping, rel=1e-12)
        assert_near(values, expected, f"{rule}, {scheme}")


def refuse(rank: int, rule: str) -> str:
    plain = mlp()
    with pytest.raises(ValueError, match="layer-parallel") as error:
        kronfac.KFAC(
            plain, SGD(plain.parameters(), lr=1.0), distribute="layer-parallel", **RULES[rule]
        )
    return str(error.value)


@pytest.mark.parametrize("rule", RULES)
def test_owners_of_gradients_cannot_adapt_together(rule: str) -> None:
    for message in run(2, refuse, rule):
        assert "choose another scheme" in message
