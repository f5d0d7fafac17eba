"""An interval that adapts is the same on all ranks and in one process, and survives a resume."""

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
from tests.training import assert_same, batch, mlp, parameters

SAMPLES = 24
NUMBERS = [*[0] * 8, *range(8, 12), *[12] * 8]
Outcome = tuple[dict[str, Tensor], list[int], dict[str, Any]]


def train(
    rank: int,
    scheme: str,
    tolerance: float,
    resume_at: int | None = None,
    saved: tuple[Any, Any] | None = None,
    save_at: int | None = None,
) -> Any:
    """Train on all batches, with a resume between, from a saved state, or up to saving it."""
    with double_precision():
        rule = kronfac.StaleInterval(tolerance)
        options: dict[str, Any] = {"factor_every": rule, "refresh_every": rule, "decay": 0.0}

        def build() -> tuple[Any, Any, kronfac.KFAC]:
            plain = mlp()
            alone = dist.get_world_size() == 1
            model = plain if alone else DistributedDataParallel(plain)
            base = SGD(plain.parameters(), lr=0.05)
            return plain, model, kronfac.KFAC(model, base, distribute=scheme, **options)

        plain, model, optimizer = build()
        start, end = bounds(SAMPLES, dist.get_world_size())[rank]
        lengths = []
        for time, number in enumerate(NUMBERS):
            if time == save_at:
                return optimizer.full_state_dict(), plain.state_dict()
            if time == resume_at:
                optimizer.consolidate()
                state, weights = saved or (optimizer.state_dict(), plain.state_dict())
                plain, model, optimizer = build()
                plain.load_state_dict(weights)
                optimizer.load_state_dict(state)
            x, y = batch(number, SAMPLES)
            optimizer.zero_grad()
            F.cross_entropy(model(x[start:end]), y[start:end]).backward()
            optimizer.step()
            assert same_bits(plain)
            lengths.append(optimizer.stats()["refresh_every"])
        return parameters(plain), lengths, optimizer.stats()


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt", "mem-opt", "layer-parallel", "spd"])
def test_ranks_agree_and_equal_one_process(scheme: str) -> None:
    expected, lengths, _ = run(1, train, scheme, 0.3)[0]
    assert max(lengths) > 2
    for values, found, _ in run(2, train, scheme, 0.3):
        assert found == lengths
        assert_near(values, expected, scheme)


def test_ranks_with_statistics_of_their_own_agree() -> None:
    (first, lengths, _), (second, others, _) = run(2, train, "local", 0.3)
    assert lengths == others
    assert max(lengths) > 2
    assert_near(first, second, "local")


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_a_resume_continues_bit_for_bit(scheme: str) -> None:
    without = run(2, train, scheme, 0.3)
    resumed = run(2, train, scheme, 0.3, 6)
    for (values, lengths, _), (others, found, _) in zip(without, resumed, strict=True):
        assert found == lengths
        assert_same(values, others)


def test_the_state_of_two_ranks_continues_in_one_process() -> None:
    """Earlier statistics lie with different ranks; the whole state has all of them."""
    expected, lengths, _ = run(1, train, "mem-opt", 0.3)[0]
    state = run(2, train, "mem-opt", 0.3, None, None, 6)[0]
    values, found, _ = run(1, train, "mem-opt", 0.3, 6, state)[0]
    assert found == lengths
    assert_near(values, expected, "resumed")


def test_fewer_statistics_travel() -> None:
    """What is stale is not sent: bytes follow the number of refreshes."""
    fresh, stale = (run(2, train, "mem-opt", tolerance)[0] for tolerance in (1e-9, 0.3))
    sent = [stats["bytes"]["reduce"] / (stats["refreshes"]) for _, _, stats in (fresh, stale)]
    assert sent[0] == sent[1]
    assert stale[2]["refreshes"] < fresh[2]["refreshes"]


def build_differently(rank: int) -> str:
    plain = mlp()
    rule = kronfac.StaleInterval(0.1 * (rank + 1))
    with pytest.raises(ValueError, match="refresh_every") as error:
        kronfac.KFAC(plain, SGD(plain.parameters(), lr=0.1), refresh_every=rule)
    return str(error.value)


def test_ranks_with_different_rules_are_refused() -> None:
    for message in run(2, build_differently):
        assert "do not agree" in message
