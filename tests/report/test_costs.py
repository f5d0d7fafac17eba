"""Where time goes: by phase, layer and rank."""

from pathlib import Path
from typing import Any

import pytest

from kronfac.report.page.hyperparameters import clips, hyperparameters
from kronfac.report.read import layers, phases
from kronfac.report.read.find import load
from kronfac.report.read.layers import LayerCost
from kronfac.report.read.summary import Group, chapters
from tests.report.made_up import start, step, write_events


def group_of(root: Path, *events: dict[str, Any], seed: int = 0) -> Group:
    write_events(root / f"r-kfac-s{seed}", start(seed=seed), *events)
    (group,) = chapters(load([root])[0])[0].groups
    return group


def layer(ranks: str, shape: tuple[int, ...] = (2, 1), **changes: Any) -> LayerCost:
    fields = {
        "name": "a",
        "kind": "Linear",
        "parameters": 2,
        "bytes": 8.0,
        "seconds": {"refresh": 9.0},
    }
    return LayerCost(shape=shape, ranks=ranks, **{**fields, **changes})


def test_seconds_of_a_mean_step_by_phase(tmp_path: Path) -> None:
    # 20 steps in 4 s: 2 s of forward + backward, 1 s of refresh, and 1 s that nobody claims.
    group = group_of(
        tmp_path,
        step(1, seconds=0.5, phases={"forward_backward": 0.5, "refresh": 0.0}),
        step(20, seconds=4.0, phases={"refresh": 1.0, "forward_backward": 1.5}),
    )
    assert phases.split(group) == {"forward_backward": 0.1, "refresh": 0.05, "other": 0.05}


def test_phases_are_medians_over_runs(tmp_path: Path) -> None:
    for seed, seconds in enumerate((1.0, 3.0, 5.0)):
        group = group_of(
            tmp_path, step(10, seconds=seconds, phases={"optimizer": seconds}), seed=seed
        )
    assert phases.split(group) == {"optimizer": 0.3}


def test_unknown_phases_are_shown_and_nothing_timed_is_empty(tmp_path: Path) -> None:
    timed = group_of(tmp_path / "a", step(10, seconds=1.0, phases={"new_one": 1.0, "bad": None}))
    assert phases.split(timed) == {"new_one": 0.1}
    assert phases.split(group_of(tmp_path / "b", step(10), step(20, phases=[]))) == {}


def test_layers_are_medians_over_runs(tmp_path: Path) -> None:
    for seed, seconds in enumerate((1.0, 3.0, 8.0)):
        entry = {"name": "fc", "kind": "Linear", "shape": [4, 5], "parameters": 20, "bytes": 10}
        entries = [{**entry, "seconds": {"refresh": seconds}}, {"name": "bare"}]
        skipped = [{"name": "scale", "why": "no layer owns it"}]
        event = {"event": "layers", "layers": entries, "skipped": skipped, "scheme": "spd"}
        group = group_of(tmp_path, event, seed=seed)
    first, second = layers.layers(group)
    assert (first.name, first.shape, first.seconds) == ("fc", (4, 5), {"refresh": 3.0})
    assert (second.shape, second.bytes, second.ranks, second.total) == ((), None, "all", 0)
    assert layers.skipped(group) == [("scale", "no layer owns it")]
    assert layers.scheme(group) == "spd"


@pytest.mark.parametrize(("batches", "drawn"), [((64, 128, 512), True), ((64, 64, 64), False)])
def test_a_batch_that_changes_is_drawn(
    tmp_path: Path, batches: tuple[int, ...], drawn: bool
) -> None:
    group_of(tmp_path, *(step(1 + i, batch=size, lr=0.1) for i, size in enumerate(batches)))
    _, content = hyperparameters(chapters(load([tmp_path])[0])[0])
    assert ("Batch" in content) == drawn


@pytest.mark.parametrize("event", [{}, {"layers": None}, {"layers": [3]}, {"layers": "none"}])
def test_layers_that_are_none(tmp_path: Path, event: dict[str, Any]) -> None:
    group = group_of(tmp_path, {"event": "layers", **event})
    assert (layers.layers(group), layers.skipped(group)) == ([], [])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ("1", {1: 9.0}),
        ("0,2", {0: 1.0, 2: 8.0}),  # sides 1 (inputs, first) and 2: their cubes share 9 seconds
        ("0+2", {0: 4.5, 2: 4.5}),
        ("0+2,1", {0: 0.5, 2: 0.5, 1: 8.0}),
        ("all", {0: 9.0, 1: 9.0, 2: 9.0}),
        ("3 ranks", {0: 3.0, 1: 3.0, 2: 3.0}),
        ("", {0: 9.0, 1: 9.0, 2: 9.0}),
    ],
)
def test_cost_on_ranks(ranks: str, expected: dict[int, float]) -> None:
    assert layers.loads(layer(ranks), world=3) == expected


def test_load_of_ranks() -> None:
    assert layers.balance([layer("0"), layer("1"), layer("0,1")], world=2) == [10.0, 17.0]


def test_the_sides_tell_the_work() -> None:
    assert layer("0", (3, 2)).work == 35  # seconds are those of one rank
    assert layer("0", (4, 3, 2)).work == 4 * 35  # four groups
    assert layer("0", ()).work == 8  # its bytes


@pytest.mark.parametrize(
    ("shares", "stats", "used"),
    [
        ([], {}, False),
        ([0.0, 0.0], {"kl_clip_steps": 0}, False),
        ([0.0, 0.0], {"kl_clip_steps": 20}, True),
        ([0.0, 0.0], {}, True),
        ([0.0, 0.5], None, True),
    ],
)
def test_whether_a_kl_clip_was_in_use(
    tmp_path: Path, shares: list[float], stats: dict[str, int] | None, used: bool
) -> None:
    events = [step(10 * i, kl_clip=share) for i, share in enumerate(shares, 1)]
    finish = {"event": "finish", "status": "done", "stats": stats}
    (run,) = group_of(tmp_path, *events, finish).runs
    assert clips(run) is used
