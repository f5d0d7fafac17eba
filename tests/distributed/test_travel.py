"""How things travel changes what is sent, and not the numbers unless they are rounded on purpose."""

from typing import Any

import pytest
import torch

import kronfac
from tests.distributed.equivalence import (
    Outcome,
    alone,
    assert_equals_one_process,
    case,
    double_precision,
    on_ranks,
)
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.training import differs, parameters

SWITCHES = ["overlap", "triangles", "deferred", "balanced", "split"]
CASES = [case("cnn", refresh_every=3, steps=5), case("wide", steps=3, solver="cholesky")]
WIDE = [case("wide", steps=3), case("wide", steps=3, solver="cholesky"), case("mlp", steps=3)]


def travel(name: str, world_size: int, cases: list[Any], **how: Any) -> list[dict[str, Outcome]]:
    scheme: Any = kronfac.Hybrid(0.5) if name == "hybrid" else name.partition(" ")[0]
    distribute = kronfac.Distribute(scheme, **how)
    by_rank: list[dict[str, Outcome]] = run(world_size, on_ranks, name, distribute, cases)
    return by_rank


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(("name", "world_size"), [("comm-opt", 3), ("mem-opt", 2), ("spd", 3)])
def test_switching_something_off_does_not_change_the_numbers(
    name: str, world_size: int, switch: str
) -> None:
    by_rank = travel(name, world_size, CASES, **{switch: False})
    for one in CASES:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.parametrize(
    "name", ["replicated", "hybrid", "layer-parallel", "layer-parallel without DDP"]
)
def test_switching_everything_off_does_not_change_the_numbers(name: str) -> None:
    by_rank = travel(name, 4, CASES, **dict.fromkeys(SWITCHES, False))
    for one in CASES:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.parametrize("name", ["comm-opt", "mem-opt", "hybrid", "layer-parallel", "spd"])
def test_one_factor_that_all_wait_for_gives_the_same_numbers(name: str) -> None:
    by_rank = travel(name, 4, WIDE)
    for one in WIDE:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


def reduced(**how: Any) -> dict[str, int]:
    """Bytes and messages of the reduce phase, of four factor steps and two refreshes."""
    one = case("cnn", refresh_every=3, steps=4)
    stats = travel("comm-opt", 2, [one], **how)[0][str(one)].stats
    return {"bytes": stats["bytes"]["reduce"], "messages": stats["messages"]["reduce"]}


def test_triangles_and_deferral_send_less_and_overlap_sends_the_same_bytes() -> None:
    usual = reduced()
    assert reduced(overlap=False)["bytes"] == usual["bytes"]
    assert reduced(triangles=False)["bytes"] > 1.5 * usual["bytes"]
    # Statistics of four steps instead of those of two refreshes.
    assert reduced(deferred=False)["bytes"] == 2 * usual["bytes"]


# --- a rounded wire --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("replicated", torch.bfloat16),
        ("comm-opt", torch.bfloat16),
        ("comm-opt", torch.float32),
        ("mem-opt", torch.bfloat16),
        ("hybrid", torch.bfloat16),
        ("spd", torch.bfloat16),
        ("local", torch.bfloat16),
        ("layer-parallel", torch.bfloat16),
        ("layer-parallel without DDP", torch.bfloat16),
    ],
)
def test_a_rounded_wire_trains_nearly_the_same_and_ranks_stay_together(
    name: str, dtype: torch.dtype
) -> None:
    one = case("cnn", steps=5)
    exact = travel(name, 4, [one])[0][str(one)] if name == "local" else alone(one)
    with double_precision():
        start = flat(parameters(KINDS[one.model].model()))
    for outcomes in travel(name, 4, [one], wire_dtype=dtype):
        outcome = outcomes[str(one)]
        assert outcome.differing_steps == []
        assert differs(outcome.parameters, exact.parameters)
        moved = (flat(exact.parameters) - start).norm()
        error = (flat(outcome.parameters) - flat(exact.parameters)).norm() / moved
        assert error < (0.05 if dtype is torch.bfloat16 else 1e-5)


def test_a_rounded_wire_sends_fewer_bytes() -> None:
    exact, rounded = reduced(), reduced(wire_dtype=torch.bfloat16)
    assert rounded["bytes"] < 0.4 * exact["bytes"]  # counts are not rounded


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values.values()])
