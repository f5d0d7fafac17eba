"""What goes wrong on one rank is dealt with on all of them, in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.options.errors import UnsolvableError
from tests.distributed.equivalence import (
    Case,
    Parameters,
    alone,
    assert_near,
    bounds,
    case,
    double_precision,
    same_bits,
    take_step,
)
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.distributed.scenarios import NAMES, PLACES
from tests.training import layers, parameters

# --- a decomposition that fails on one rank ---------------------------------------------------

SOLVERS = {"eigen": "eigh", "cholesky": "cholesky_ex"}


@contextmanager
def failing_solver(solver: str, fails: bool) -> Iterator[None]:
    """Let every decomposition in this process fail, on every rung of the ladder."""

    def eigh(matrix: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    def cholesky_ex(matrix: torch.Tensor, *_: Any, **__: Any) -> Any:
        return matrix, torch.ones(matrix.shape[:-2], dtype=torch.int32)

    broken = {"eigen": eigh, "cholesky": cholesky_ex}[solver]
    if fails:
        with mock.patch.object(torch.linalg, SOLVERS[solver], broken):
            yield
    else:
        yield


def train_with_failures(
    rank: int, one: Case, name: str, scheme: Any, bad_steps: list[int]
) -> list[dict[str, Any]]:
    """What rank 1 cannot solve at the bad steps: state of this rank after each step."""
    with double_precision():
        kind, solver = KINDS[one.model], dict(one.options)["solver"]
        plain = kind.model()
        model = plain if "without DDP" in name else DistributedDataParallel(plain)
        base = BASES[one.base](plain)
        optimizer = kronfac.KFAC(model, base, distribute=scheme, **dict(one.options))
        world_size = torch.distributed.get_world_size()
        start, end = bounds(one.samples, world_size)[rank]
        seen = []
        for number in range(one.steps):
            x, y = kind.batch(number, one.samples)
            with failing_solver(solver, rank == 1 and number in bad_steps):
                take_step(model, optimizer, (x[start:end], y[start:end]), one)
            stats = optimizer.stats()
            seen.append(
                {
                    "same": same_bits(plain),
                    "parameters": parameters(plain),
                    "failures": stats["failures"],
                    "without_solution": sorted(stats["without_solution"]),
                }
            )
        return seen


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", [*NAMES, "local"])
def test_a_first_solution_that_fails_leaves_the_raw_gradient_on_all_ranks(
    name: str, solver: str
) -> None:
    one = case("mlp", solver=solver, base="sgd", steps=4)
    by_rank = run(2, train_with_failures, one, name, scheme_of(name), [0])
    first = by_rank[0]
    raw = alone(case("mlp", exclude="*", base="sgd", steps=1)).parameters
    usual = alone(case("mlp", solver=solver, base="sgd", steps=1)).parameters
    failed = first[0]["without_solution"]
    assert failed
    for seen in by_rank:
        assert all(step["same"] for step in seen)
        # The next refresh is due at step 2.
        assert [step["without_solution"] for step in seen] == [failed, failed, [], []]
        assert [step["failures"] for step in seen] == [step["failures"] for step in first]
        for key, value in seen[0]["parameters"].items():
            layer = key.rpartition(".")[0]
            if layer in failed or name != "local":
                expected = raw if layer in failed else usual
                assert_near({key: value}, {key: expected[key]}, f"{name}, failed: {failed}")


@pytest.mark.parametrize("name", NAMES)
def test_a_later_failure_keeps_the_last_good_solution_on_all_ranks(name: str) -> None:
    one = case("mlp", solver="eigen", base="sgd", steps=4)
    by_rank = run(2, train_with_failures, one, name, scheme_of(name), [2])
    failed = {layer for layer, number in by_rank[0][2]["failures"].items() if number}
    assert failed
    expected = without_refreshing(one, failed, 2)
    for seen in by_rank:
        assert all(step["same"] for step in seen)
        assert all(step["without_solution"] == [] for step in seen)
        assert seen[-1]["failures"] == by_rank[0][-1]["failures"]
        for number, step in enumerate(seen):
            assert_near(step["parameters"], expected[number], f"step {number}, failed: {failed}")


def without_refreshing(one: Case, failed: set[str], bad_step: int) -> list[Parameters]:
    """One process in which the solutions of some layers cannot be renewed at one step."""
    kind = KINDS[one.model]
    with double_precision():
        model = kind.model()
        optimizer = kronfac.KFAC(model, BASES[one.base](model), **dict(one.options))
        history = []
        for number in range(one.steps):
            with ExitStack() as stack:
                for name in failed if number == bad_step else ():
                    block = layers(optimizer)[name].block
                    for method in ("batch_key", "refresh"):
                        stack.enter_context(mock.patch.object(block, method, return_value=None))
                take_step(model, optimizer, kind.batch(number, one.samples), one)
            history.append(parameters(model))
        assert {name for name, n in optimizer.stats()["failures"].items() if n} == failed
        return history


@pytest.mark.parametrize("name", ["replicated", "comm-opt", "mem-opt", "layer-parallel"])
def test_failing_again_and_again_stops_all_ranks_with_the_same_error(name: str) -> None:
    one = case("mlp", solver="eigen", refresh_every=1, steps=10)
    bad_steps = list(range(1, 10))
    errors = run(3, train_with_failures, one, name, scheme_of(name), bad_steps, expect_errors=True)
    assert [type(error) for error in errors] == [UnsolvableError] * 3
    assert len({str(error) for error in errors}) == 1
    assert "could not be solved 5 times" in str(errors[0])


def scheme_of(name: str) -> Any:
    return "local" if name == "local" else next(place[1] for place in PLACES if place[0] == name)


# --- mistakes ---------------------------------------------------------------------------------


def forget_ddp(rank: int, scheme: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), distribute=scheme)
    torch.manual_seed(rank)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "scheme", ["auto", "replicated", "comm-opt", "mem-opt", kronfac.Hybrid(0.5), "local", "spd"]
)
def test_forgetting_ddp_is_an_error_on_all_ranks_at_the_first_step(scheme: Any) -> None:
    errors = run(3, forget_ddp, scheme, expect_errors=True)
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "DistributedDataParallel" in str(error)


def differ(rank: int, what: str) -> None:
    """The last rank differs from the others in one thing."""
    odd = rank == torch.distributed.get_world_size() - 1
    options: dict[str, Any] = {"distribute": "comm-opt"}
    changes: dict[str, dict[str, Any]] = {
        "damping": {"damping": 0.5},
        "interval": {"refresh_every": 7},
        "solver": {"solver": "cholesky"},
        "scheme": {"distribute": "mem-opt"},
        "wire": {"distribute": kronfac.Distribute("comm-opt", wire_dtype=torch.bfloat16)},
        "layers": {"exclude": "0"},
    }
    if odd:
        options |= changes.get(what, {})
    width = 6 if odd and what == "width" else 5
    layers = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)]
    if odd and what == "depth":
        layers.append(nn.Linear(3, 3))
    bias = not (odd and what == "bias")
    layers.append(nn.Linear(3, 3, bias=bias))
    version = "0.0.1" if odd and what == "version" else kronfac.__version__
    model = nn.Sequential(*layers)
    base = SGD(model.parameters(), lr=0.1)
    with (
        mock.patch.object(kronfac, "__version__", version),
        mock.patch("importlib.metadata.version", return_value=version),
        mock.patch("kronfac.optimizer.base.version", return_value=version, create=True),
    ):
        kronfac.KFAC(model, base, **options)


@pytest.mark.parametrize(
    "what",
    [
        "damping",
        "interval",
        "solver",
        "scheme",
        "wire",
        "layers",
        "width",
        "depth",
        "bias",
        "version",
    ],
)
def test_ranks_that_differ_are_told_so_at_construction(what: str) -> None:
    errors = run(3, differ, what, expect_errors=True)
    for error in errors:
        assert isinstance(error, ValueError | RuntimeError), error
        assert "rank" in str(error)


def test_ranks_that_do_not_differ_are_not_told_anything() -> None:
    assert run(3, differ, "nothing") == [None] * 3
