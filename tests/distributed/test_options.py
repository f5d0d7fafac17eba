"""Every option gives the same numbers on ranks as in one process."""

import pytest

from tests.distributed.equivalence import (
    SCHEMES,
    Case,
    assert_equals_one_process,
    assert_near,
    case,
    on_ranks,
)
from tests.distributed.ranks import run

CASES = [
    case("mlp", solver="cholesky", steps=5),
    case("cnn", solver="newton-schulz", steps=5),
    case("mlp", fisher="exact", steps=5),
    case("cnn", fisher="forward", steps=5),
    case("cnn", sharing="reduce", steps=5),
    case("mlp", base="sgd", momentum=0.9, steps=5),
    case("cnn", base="sgd", momentum=0.9, nesterov=True, steps=5),
    case("cnn", rescale=None, damping=0.3, steps=5),
    case("mlp", rescale="kl-clip", steps=5),
    case("cnn", rescale="kl-clip", kl_clip=1e-5, base="adamw", steps=5),
    case("cnn", rescale="unit", steps=5),
    case("cnn", rescale="auto", steps=5),
    case("mlp", rescale="orthogonal", momentum=0.9, steps=5),
    case("mlp", base="adamw", steps=5),
    case("transformer", steps=5),
    case("transformer", base="adamw", solver="cholesky", sharing="reduce", steps=5),
    case("transformer", loss_average="token", steps=5),
    case("transformer", rescale="auto", base="sgd", momentum=0.9, nesterov=True, steps=5),
    case("shared", steps=5),
    case("shared", base="adamw", momentum=0.9, steps=5),
    case("mlp", uneven=True, steps=5),
    case("transformer", uneven=True, fisher="exact", steps=5),
    case("mlp", micro=2, samples=24, steps=5),
    case("cnn", micro=2, samples=24, steps=5, fisher="exact", factor_every=2, refresh_every=4),
    case("cnn", micro=2, samples=24, steps=5, syncs=True),
    case("mlp", stagger=True, refresh_every=3, steps=7),
    case("cnn", max_dim=11, steps=5),
    case("mlp", refresh_every=20, steps=6),
    case("mlp", decay=0.5, wrap={"gradient_as_bucket_view": True}, steps=5),
    case("cnn", wrap={"static_graph": True}, steps=5),
    case("mlp", wrap={"bucket_cap_mb": 1e-4, "find_unused_parameters": True}, steps=5),
    case("cnn", rescale="trust-region", trust_radius=1e-5, base="sgd", momentum=0.9, steps=5),
    case("cnn", solver="separable", steps=5),
    case("mlp", block_dim=3, steps=5),
    case("transformer", block_dim=2, rescale="auto", base="sgd", momentum=0.9, steps=5),
]

#: Each case runs under three of these; `-m slow` runs them all.
PLACES = [
    ("comm-opt", 2),
    ("mem-opt", 3),
    ("layer-parallel", 3),
    ("replicated", 2),
    ("hybrid", 4),
    ("layer-parallel without DDP", 2),
    ("spd", 3),
    ("auto", 2),
]
CHOSEN = {
    place: [
        one for index, one in enumerate(CASES) if (number - 3 * index) % len(PLACES) in (0, 1, 2)
    ]
    for number, place in enumerate(PLACES)
}


def fits(name: str, one: Case) -> bool:
    """Whether a case means anything under a scheme."""
    return "without DDP" not in name or not (one.wrap or one.syncs)


#: The others run with ``-m slow``.
QUICK = {"mem-opt", "layer-parallel without DDP", "auto"}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [pytest.param(*one, marks=[] if one[0] in QUICK else [pytest.mark.slow]) for one in PLACES],
)
def test_options_give_the_numbers_of_one_process(name: str, world_size: int) -> None:
    check(name, world_size, CHOSEN[name, world_size])


def test_every_case_runs_somewhere() -> None:
    for one in CASES:
        places = [place for place, cases in CHOSEN.items() if one in cases]
        assert len(places) == 3
        assert sum(fits(name, one) for name, _ in places) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_all_options_under_all_schemes(name: str, world_size: int) -> None:
    check(name, world_size, CASES)


def check(name: str, world_size: int, cases: list[Case]) -> None:
    cases = [one for one in cases if fits(name, one)]
    by_rank = run(world_size, on_ranks, name, SCHEMES[name], cases, limit=600)
    for one in cases:
        assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


# --- options with a meaning of their own on ranks --------------------------------------------


@pytest.mark.parametrize("name", ["mem-opt", "layer-parallel", "layer-parallel without DDP"])
def test_the_norm_of_gradients_is_clipped_as_in_one_process(name: str) -> None:
    one = case("cnn", max_grad_norm=0.1, steps=4)
    by_rank = run(3, on_ranks, name, SCHEMES[name], [one])
    assert_equals_one_process(one, [outcomes[str(one)] for outcomes in by_rank])


@pytest.mark.parametrize("name", ["replicated", "mem-opt", "layer-parallel"])
def test_ranks_stay_together_when_each_draws_its_own_labels(name: str) -> None:
    one = case("mlp", fisher="mc", steps=4)
    for outcomes in run(3, on_ranks, name, SCHEMES[name], [one]):
        assert outcomes[str(one)].differing_steps == []


@pytest.mark.parametrize("name", ["comm-opt", "mem-opt", "layer-parallel without DDP"])
def test_uneven_shards_without_a_number_leave_the_gradient_as_ddp_averages_it(name: str) -> None:
    # Both runs average over ranks first; only the statistics know how many samples each has.
    one = case("mlp", uneven=True, steps=1, base="sgd", rescale=None, loss_average="batch")
    first, *others = run(2, on_ranks, name, SCHEMES[name], [one])
    for other in others:
        assert_near(other[str(one)].parameters, first[str(one)].parameters, str(one))


@pytest.mark.parametrize("rescale", ["kl-clip", "trust-region"])
def test_one_number_is_all_that_a_bound_sends(rescale: str) -> None:
    one = case("mlp", rescale=rescale, steps=2)
    sent = {}
    for name in ("replicated", "comm-opt", "mem-opt", "layer-parallel"):
        outcome = run(2, on_ranks, name, SCHEMES[name], [one])[0][str(one)]
        sent[name] = outcome.stats["bytes"]["rescale"]
    assert sent["replicated"] == sent["comm-opt"] == 0
    assert sent["mem-opt"] <= 2 * 8  # its owners may rescale before or after gradients travel
    assert sent["layer-parallel"] == 2 * 8
