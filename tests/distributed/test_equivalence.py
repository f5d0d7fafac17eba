"""N ranks with the batch split equal one process with the whole batch, under every scheme."""

from typing import Any

import pytest

from tests.distributed.equivalence import (
    SCHEMES,
    Outcome,
    alone,
    assert_equals_one_process,
    case,
    on_ranks,
)
from tests.distributed.ranks import run
from tests.training import differs

CASES = [case("mlp", steps=6), case("cnn", refresh_every=3)]
DEFERRED = case("mlp", factor_every=2, refresh_every=4, steps=9)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_equal_one_process(name: str, world_size: int) -> None:
    by_rank = run(world_size, on_ranks, name, SCHEMES[name], CASES)
    for one in CASES:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_without_curvature_have_the_same_steps(name: str) -> None:
    one = case("unseen", rescale="auto", momentum=0.9, nesterov=True, base="sgd", steps=4)
    by_rank = run(3, on_ranks, name, SCHEMES[name], [one])
    assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.parametrize("name", SCHEMES)
def test_statistics_of_several_steps_may_wait_for_a_refresh(name: str) -> None:
    by_rank = run(3, on_ranks, name, SCHEMES[name], [DEFERRED])
    assert_equals_one_process(DEFERRED, [outcomes[str(DEFERRED)] for outcomes in by_rank])


def test_the_runs_that_are_compared_do_use_statistics_and_refreshes() -> None:
    for one in [*CASES, DEFERRED]:
        outcome, raw = alone(one), alone(case(one.model, exclude="*", steps=one.steps))
        assert outcome.stats["factor_updates"] >= 4
        assert outcome.stats["refreshes"] >= 3 * 2
        assert differs(outcome.parameters, raw.parameters)


@pytest.mark.parametrize("name", ["layer-parallel", "layer-parallel without DDP", "comm-opt"])
def test_layers_that_share_a_bias_have_one_owner(name: str) -> None:
    one = case("across", rescale=None, damping=0.03, base="sgd", steps=3)
    by_rank = run(3, on_ranks, name, SCHEMES[name], [one])
    assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


# --- the ledger ------------------------------------------------------------------------------

#: Which phases send something, under graft.
SENDS = {
    "replicated": {"reduce"},
    "comm-opt": {"reduce", "share"},
    "mem-opt": {"reduce", "spread"},
    "hybrid": {"reduce", "share", "spread"},
    "local": {"spread"},
    "layer-parallel": {"reduce", "spread"},
    "layer-parallel without DDP": {"reduce", "spread"},
}
ALL_SCHEMES: dict[str, Any] = SCHEMES | {"local": "local"}


@pytest.mark.parametrize("name", [*SENDS, "spd"])
def test_the_ledger_shows_that_a_scheme_is_that_scheme(name: str) -> None:
    one = case("mlp", steps=3)
    for outcomes in run(4, on_ranks, name, ALL_SCHEMES[name], [one]):
        sent = phases_that_send(outcomes[str(one)])
        if name == "spd":
            assert {"reduce"} <= sent <= {"reduce", "share"}
        else:
            assert sent == SENDS[name]


@pytest.mark.parametrize("name", ALL_SCHEMES)
def test_one_rank_sends_nothing(name: str) -> None:
    one = case("mlp", steps=2)
    (outcomes,) = run(1, on_ranks, name, ALL_SCHEMES[name], [one])
    assert phases_that_send(outcomes[str(one)]) == set()


def phases_that_send(outcome: Outcome) -> set[str]:
    sizes, messages = outcome.stats["bytes"], outcome.stats["messages"]
    assert set(sizes) == set(messages) == {"reduce", "share", "spread", "rescale"}
    sends = {phase for phase, size in sizes.items() if size}
    assert sends == {phase for phase, number in messages.items() if number}
    return sends


def test_auto_chooses_a_scheme_that_gives_the_same_numbers() -> None:
    one = case("mlp", steps=1)
    schemes = {outcomes[str(one)].scheme for outcomes in run(3, on_ranks, "auto", "auto", [one])}
    assert len(schemes) == 1
    assert schemes.isdisjoint({"auto", "local"})
