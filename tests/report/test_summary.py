"""Groups, targets, medians and spread, with numbers worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kronfac.report.read.find import load
from kronfac.report.read.summary import (
    Chapter,
    Group,
    Spread,
    best,
    chapters,
    final,
    median,
    memory,
    step_seconds,
    throughput,
)
from tests.report.made_up import evaluation, make_run, start, step, write_events


def only_chapter(root: Path) -> Chapter:
    (chapter,) = chapters(load([root])[0])
    return chapter


def group_of(root: Path) -> Group:
    (group,) = only_chapter(root).groups
    return group


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
        ([1.0, 2.0, math.inf], 2.0),
        ([1.0, math.inf], math.inf),  # one success of two is not half a success
        ([1.0, 2.0, math.inf, math.inf], math.inf),
        ([math.inf, math.inf], math.inf),
    ],
)
def test_the_median_counts_misses(values: list[float], expected: float) -> None:
    assert median(values) == expected


def test_the_target_is_met_at_the_first_evaluation_that_shows_it(tmp_path: Path) -> None:
    # Three seeds: reached at 30 (3 s), at 10 (1 s, lost again later), and never.
    for seed, accuracies in enumerate([[0.5, 0.9, 0.98], [0.99, 0.9, 0.9], [0.5, 0.6, 0.97]]):
        evals = [evaluation(10 * i, a) for i, a in enumerate(accuracies, 1)]
        write_events(tmp_path / f"r-kfac-s{seed}", start(seed=seed), *evals)
    group = group_of(tmp_path)
    assert [(r.step, r.seconds) for r in group.reached] == [(30, 3), (10, 1), (math.inf, math.inf)]
    assert group.num_reached == 2
    assert (group.steps_to_target, group.seconds_to_target) == (30, 3)


def test_a_target_of_loss_is_met_from_above(tmp_path: Path) -> None:
    evals = [evaluation(10, None, loss=2.0), evaluation(20, None, loss=1.8)]
    write_events(tmp_path / "r", start(metric="loss", target=1.9), *evals)
    assert group_of(tmp_path).steps_to_target == 20


def test_missing_values_are_not_met(tmp_path: Path) -> None:
    evals = [evaluation(10, None), {"event": "eval", "step": 20, "accuracy": 0.99}]
    write_events(tmp_path / "r", start(), *evals)
    group = group_of(tmp_path)
    assert group.steps_to_target == 20
    assert math.isinf(group.seconds_to_target)  # its clock is unknown


def test_without_a_target_nothing_is_reached(tmp_path: Path) -> None:
    write_events(tmp_path / "r", start(target=None), evaluation(10, 1.0))
    assert group_of(tmp_path).num_reached == 0


def test_numbers_of_one_run(tmp_path: Path) -> None:
    write_events(
        tmp_path / "r",
        start(),
        step(10, memory=5, samples_per_second=100.0),
        evaluation(10, 0.9),
        step(20, memory=7, samples_per_second=300.0, seconds=4.0),
        evaluation(20, 0.8, seconds=4.0),
    )
    (run,) = group_of(tmp_path).runs
    assert (final(run, "accuracy"), best(run)) == (0.8, 0.9)
    assert (memory(run), throughput(run), step_seconds(run)) == (7, 200.0, 0.2)


def test_the_end_of_a_run_tells_what_no_evaluation_did(tmp_path: Path) -> None:
    write_events(tmp_path / "r", start(), {"event": "finish", "status": "done", "accuracy": 0.7})
    (run,) = group_of(tmp_path).runs
    assert final(run, "accuracy") == 0.7


def test_spread() -> None:
    assert Spread.of([3.0, None, 1.0, 8.0]) == Spread(3.0, 1.0, 8.0, (3.0, 1.0, 8.0))
    assert Spread.of([None]) is None


def test_seeds_are_one_group_and_kfac_comes_first(tmp_path: Path) -> None:
    for optimizer in ("sgd", "adamw", "kfac"):
        for seed in (10, 2):
            make_run(tmp_path, optimizer, seed, steps=20)
    groups = only_chapter(tmp_path).groups
    assert [group.label for group in groups] == ["K-FAC", "SGD", "AdamW"]
    assert [run.seed for run in groups[0].runs] == ["2", "10"]


def test_other_settings_are_another_group(tmp_path: Path) -> None:
    for lr in (0.05, 0.1):
        make_run(tmp_path / str(lr), "kfac", steps=20, lr=lr)
    groups = only_chapter(tmp_path).groups
    assert [group.label for group in groups] == ["K-FAC (lr 0.05)", "K-FAC (lr 0.1)"]
    assert [group.variant for group in groups] == [0, 1]


def test_other_ranks_are_another_group(tmp_path: Path) -> None:
    for world in (1, 4):
        make_run(tmp_path / str(world), "sgd", steps=20, world=world)
    labels = [group.label for group in only_chapter(tmp_path).groups]
    assert labels == ["SGD (world 1)", "SGD (world 4)"]


def test_two_tables_of_one_kind_keep_their_names(tmp_path: Path) -> None:
    make_run(tmp_path, "kfac", steps=20)
    make_run(tmp_path, "kfac-slow", steps=20, kind="kfac")
    groups = only_chapter(tmp_path).groups
    assert [(g.label, g.kind, g.variant) for g in groups] == [
        ("K-FAC", "kfac", 0), ("kfac-slow", "kfac", 1),
    ]  # fmt: skip


def test_recipes_are_not_mixed(tmp_path: Path) -> None:
    make_run(tmp_path, "kfac", steps=20)
    make_run(tmp_path, "kfac", steps=20, recipe="text", text=True)
    found = chapters(load([tmp_path])[0])
    assert [(chapter.recipe, chapter.metric) for chapter in found] == [
        ("digits", "accuracy"), ("text", "loss"),
    ]  # fmt: skip


def change_settings(folder: Path, **tables: dict[str, Any]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, table in tables.items():
        config["settings"][name] |= table
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "titles"),
    [
        ({"model": {"name": "mlp"}}, ["model mlp", "model resnet8"]),
        ({"model": {"width": 8}}, ["width 16", "width 8"]),
        ({"model": {"groups": 2}}, ["", "groups 2"]),
        ({"data": {"name": "mnist"}}, ["data digits", "data mnist"]),
        ({"data": {"augment": []}}, ["augment ['flip']", "augment []"]),
        ({"train": {"batch": 128}}, ["batch 128", "batch 64"]),
        (
            {"train": {"batch": [[0.0, 64], [2.5, 128], [4.0, 256]]}},
            ["batch 64", "batch 64, 128 from epoch 2.5, 256 from epoch 4"],
        ),
        ({"train": {"batch": [3, 4]}}, ["batch 64", "batch [3, 4]"]),
        (
            {"model": {"name": "mlp"}, "train": {"batch": 128}},
            ["model mlp, batch 128", "model resnet8, batch 64"],
        ),
    ],
)
def test_other_tasks_are_chapters_of_their_own(
    tmp_path: Path, changes: dict[str, dict[str, Any]], titles: list[str]
) -> None:
    make_run(tmp_path, "kfac", steps=20)
    change_settings(make_run(tmp_path, "sgd", steps=20), **changes)
    found = chapters(load([tmp_path])[0])
    assert [len(chapter.groups) for chapter in found] == [1, 1]
    assert sorted(chapter.apart for chapter in found) == titles


def test_options_tell_apart_what_names_do_not(tmp_path: Path) -> None:
    make_run(tmp_path, "kfac", steps=20)
    change_settings(make_run(tmp_path, "sgd", steps=20), model={"name": "mlp"})
    change_settings(make_run(tmp_path, "adamw", steps=20), model={"width": 8})
    found = [chapter.title for chapter in chapters(load([tmp_path])[0])]
    assert found == [
        "digits (model mlp, width 16)",
        "digits (model resnet8, width 16)",
        "digits (model resnet8, width 8)",
    ]


def test_what_does_not_change_the_task_stays_together(tmp_path: Path) -> None:
    make_run(tmp_path, "kfac", steps=20)
    change_settings(make_run(tmp_path, "sgd", steps=20), train={"epochs": 3.0}, data={"workers": 4})
    assert len(only_chapter(tmp_path).groups) == 2


def test_kinds_without_a_colour_of_their_own_get_different_ones() -> None:
    groups = [Group(str(number), f"kind{number}", (), other=number) for number in range(12)]
    hues = sorted(group.hue for group in groups if group.hue is not None)
    gaps = [after - before for before, after in zip(hues, [*hues[1:], hues[0] + 360], strict=True)]
    assert min(gaps) >= 15
    assert Group("K-FAC", "kfac", ()).hue is None
