"""The matrix: every kind of method under every scheme, on one and several ranks, and resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.equivalence import SCHEMES, double_precision, same_bits
from tests.distributed.ranks import run
from tests.methods.toys import KINDS

STEPS, SAMPLES = 5, 12
OPTIONS = {"decay": 0.5, "factor_every": 1, "refresh_every": 2, "damping": 0.1, "rescale": None}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def make(kind: str, model: nn.Module, **options: Any) -> Any:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    base = torch.optim.SGD(plain.parameters(), lr=0.01)
    return KINDS[kind](model, base, **{**OPTIONS, **options})


def step(model: nn.Module, optimizer: Any, number: int, start: int = 0, end: int = SAMPLES) -> None:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SAMPLES, 5, generator=generator)[start:end]
    y = torch.randint(3, (SAMPLES,), generator=generator)[start:end]
    optimizer.zero_grad()
    outputs = model(x)
    if optimizer.needs_observe:
        optimizer.observe(outputs)
    F.cross_entropy(outputs, y).backward()
    optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(kind: str) -> Tensor:
    with double_precision():
        model = make_model()
        optimizer = make(kind, model)
        for number in range(STEPS):
            step(model, optimizer, number)
        return weights(model)


def on_rank(rank: int, kinds: list[str], scheme: Any, wrapped: bool) -> dict[str, Any]:
    """Weights after some steps on this rank's shard, and whether ranks had the same bits."""
    size = dist.get_world_size()
    start, end = rank * SAMPLES // size, (rank + 1) * SAMPLES // size
    found: dict[str, Any] = {}
    with double_precision():
        for kind in kinds:
            plain = make_model()
            model: nn.Module = DistributedDataParallel(plain) if wrapped else plain
            optimizer = make(kind, model, distribute=scheme)
            for number in range(STEPS):
                step(model, optimizer, number, start, end)
            found[kind] = (weights(plain), same_bits(plain), optimizer.stats()["without_solution"])
    return found


#: Kinds that run under every scheme by default. The others take turns; all of them run with `-m slow`.
ALWAYS = [
    "matrices",
    "vectors",
    "gathered rows",
    "gradients",
    "previous solution",
    "moments of samples",
]


def in_turn(scheme: str) -> list[str]:
    """The kinds of the default run: each of the others is there under two schemes or more."""
    number = list(SCHEMES).index(scheme)
    others = [kind for kind in KINDS if kind not in ALWAYS]
    return ALWAYS + [kind for index, kind in enumerate(others) if (index - number) % 4 == 0]


def check_kinds(kinds: list[str], name: str, size: int) -> None:
    expected = {kind: alone(kind) for kind in kinds}
    for found in run(size, on_rank, kinds, SCHEMES[name], "without DDP" not in name):
        assert list(found) == kinds
        for kind, (value, same, without) in found.items():
            assert same, kind
            assert without == [], kind
            torch.testing.assert_close(
                value, expected[kind], rtol=1e-9, atol=1e-11, msg=lambda m, k=kind: f"{k}: {m}"
            )


def test_every_kind_has_its_turn() -> None:
    turns = [kind for name in SCHEMES for kind in in_turn(name)]
    assert all(turns.count(kind) >= 2 for kind in KINDS)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", SCHEMES)
def test_kinds_under_every_scheme(name: str, size: int) -> None:
    check_kinds(in_turn(name), name, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_kind_under_every_scheme(name: str, size: int) -> None:
    check_kinds(list(KINDS), name, size)


def bytes_on_rank(rank: int, kind: str, scheme: Any) -> dict[str, int]:
    with double_precision():
        model = DistributedDataParallel(make_model())
        optimizer = make(kind, model, distribute=scheme)
        for number in range(STEPS):
            step(model, optimizer, number, 4 * rank, 4 * rank + 4)
        found: dict[str, int] = optimizer.stats()["bytes"]
        return found


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt", "replicated"])
def test_statistics_of_gradients_do_not_travel(scheme: str) -> None:
    """DDP has made gradients equal already."""
    for found in run(3, bytes_on_rank, "gradients", scheme):
        assert found["reduce"] == 0
    for found in run(3, bytes_on_rank, "vectors", scheme):
        assert found["reduce"] > 0


def resumed_on_rank(rank: int, kinds: list[str], scheme: Any) -> dict[str, bool]:
    """Whether a run that was saved and loaded on the way has the same bits."""
    size = dist.get_world_size()
    start, end = rank * SAMPLES // size, (rank + 1) * SAMPLES // size
    found = {}
    with double_precision():
        for kind in kinds:
            model = make_model()
            wrapped = DistributedDataParallel(model)
            optimizer = make(kind, wrapped, distribute=scheme)
            for number in range(3):
                step(wrapped, optimizer, number, start, end)
            optimizer.consolidate()
            saved = (model.state_dict(), optimizer.state_dict())
            saved = torch.utils._pytree.tree_map(_copied, saved)
            again = make_model()
            rewrapped = DistributedDataParallel(again)
            other = make(kind, rewrapped, distribute=scheme)
            again.load_state_dict(saved[0])
            other.load_state_dict(saved[1])
            for number in range(3, STEPS):
                step(wrapped, optimizer, number, start, end)
                step(rewrapped, other, number, start, end)
            found[kind] = torch.equal(weights(model), weights(again))
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


ALL = [
    pytest.param(name, marks=[] if name == "comm-opt" else [pytest.mark.slow]) for name in SCHEMES
]


@pytest.mark.parametrize("name", [one for one in ALL if "without" not in one.values[0]])
def test_every_kind_resumes_bit_for_bit(name: str) -> None:
    for found in run(2, resumed_on_rank, list(KINDS), SCHEMES[name]):
        assert found == dict.fromkeys(KINDS, True)
