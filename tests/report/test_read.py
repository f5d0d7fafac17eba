"""Run folders are read leniently: killed, resumed, failed, incomplete."""

import json
from pathlib import Path

import pytest

from kronfac.report.read.find import load
from kronfac.report.read.read import Notice, Run, number, read_run
from kronfac.runs.errors import UserError
from tests.report.made_up import evaluation, make_run, start, step, write_events


def read(folder: Path) -> Run:
    run = read_run(folder)
    assert run is not None
    return run


def test_a_whole_run(tmp_path: Path) -> None:
    run = read(make_run(tmp_path, "kfac", seed=2, steps=40))
    assert (run.recipe, run.optimizer, run.kind, run.seed) == ("digits", "kfac", "kfac", "2")
    assert (run.metric, run.target, run.world, run.status) == ("accuracy", 0.98, 1, "done")
    assert [record["step"] for record in run.steps] == [10, 20, 30, 40]
    assert [record["step"] for record in run.evals] == [20, 40]
    assert run.last_step == 40
    assert run.environment["torch"] == "2.13.0"
    assert run.summary.startswith("KFAC over SGD")


def test_what_is_kept_for_a_resume_is_no_setting(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "run", start())
    kept = {"recipe": {"train": {"steps": 3}}, "stop_at_target": True}
    (folder / "config.json").write_text(json.dumps({"recipe": "digits", "resume": kept}))
    assert read(folder).config == {"recipe": "digits"}


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "run", start(), step(10))
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    run = read(folder)
    assert [record["step"] for record in run.steps] == [10]
    assert run.broken_lines == 1
    assert run.status == "unfinished"


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "run", start())
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'[1, 2]\n\n{"step": 3}\n\xff\xfe\n')
    assert read(folder).broken_lines == 3


def test_a_resumed_run_counts_every_step_once(tmp_path: Path) -> None:
    # Killed after step 30 with a checkpoint of step 20: the third ten steps are done again.
    folder = write_events(
        tmp_path / "run",
        start(),
        *(step(number, loss=1.0) for number in (10, 20, 30)),
        evaluation(30, 0.5),
        start(resumed=20),
        *(step(number, loss=2.0) for number in (30, 40)),
    )
    run = read(folder)
    assert [(record["step"], record["loss"]) for record in run.steps] == [
        (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0),
    ]  # fmt: skip
    assert run.evals == []
    assert run.resumed == [20]


def test_a_clock_that_began_again_goes_on(tmp_path: Path) -> None:
    folder = write_events(
        tmp_path / "run",
        start(),
        step(10, seconds=1.0),
        step(20, seconds=2.0),
        start(resumed=20),
        step(30, seconds=1.5),
        step(40, seconds=3.0),
    )
    assert [record["seconds"] for record in read(folder).steps] == [1.0, 2.0, 3.5, 5.0]


def test_a_clock_that_went_on_is_kept(tmp_path: Path) -> None:
    folder = write_events(
        tmp_path / "run", start(), step(10, seconds=1.0), start(resumed=10), step(20, seconds=2.5)
    )
    assert [record["seconds"] for record in read(folder).steps] == [1.0, 2.5]


def test_a_second_beginning_forgets_the_first(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "run", start(), step(10), start(), step(5))
    assert [record["step"] for record in read(folder).steps] == [5]


def test_a_failure_that_was_resumed_is_no_longer_the_end(tmp_path: Path) -> None:
    failure = {"event": "failure", "step": 12, "message": "disk full"}
    failed = write_events(tmp_path / "failed", start(), step(10), failure)
    assert read(failed).status == "failed"
    resumed = write_events(tmp_path / "resumed", start(), step(10), failure, start(resumed=10))
    assert read(resumed).status == "unfinished"
    assert read(resumed).notices == [Notice("warning", 12, "disk full")]


def test_without_a_start_the_folder_name_tells(tmp_path: Path) -> None:
    run = read(write_events(tmp_path / "text-adamw-s3-2", evaluation(10, None)))
    assert (run.recipe, run.optimizer, run.seed) == ("text", "adamw", "3")
    assert (run.metric, run.target) == ("loss", None)


@pytest.mark.parametrize(
    "value", [None, "3", True, float("nan"), float("inf"), 10**400, 1e308, -2e100, [1]]
)
def test_what_is_no_number_of_a_sensible_size_is_missing(value: object) -> None:
    assert number(value) is None


@pytest.mark.parametrize("value", [5e-324, -1e-101, 0, -0.0])
def test_what_is_smaller_than_any_quantity_is_zero(value: float) -> None:
    assert number(value) == 0


@pytest.mark.parametrize("value", [1e100, -1e-100, 3, 2**63])
def test_numbers_are_kept(value: float) -> None:
    assert number(value) == value


def test_deep_nesting_is_a_broken_line(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "run", start())
    with (folder / "events.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert read(folder).broken_lines == 1


def test_events_without_a_step_are_left_out(tmp_path: Path) -> None:
    folder = write_events(
        tmp_path / "run", start(), {"event": "step", "loss": 1.0}, {"event": "new"}
    )
    assert read(folder).steps == []


def test_damaged_json_beside_the_events_is_ignored(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "run", start())
    (folder / "config.json").write_text("{")
    (folder / "environment.json").write_text("[]")
    assert (read(folder).config, read(folder).environment) == ({}, {})


def test_runs_are_found_in_folders_of_folders_and_once(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / "digits-compare", "sgd", seed, steps=20)
    inner = tmp_path / "digits-compare" / "digits-sgd-s0"
    runs, empty = load([tmp_path, inner, inner / "events.jsonl"])
    assert [run.name for run in runs] == ["digits-sgd-s0", "digits-sgd-s1"]
    assert empty == []


def test_a_run_that_never_began_is_told(tmp_path: Path) -> None:
    make_run(tmp_path, "sgd", steps=20)
    silent = make_run(tmp_path, "kfac", steps=20)
    (silent / "events.jsonl").unlink()
    runs, empty = load([tmp_path])
    assert ([run.optimizer for run in runs], empty) == (["sgd"], [silent])


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load([tmp_path / "nothing"])


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match="is no run"):
        load([tmp_path])
    with pytest.raises(UserError, match="is a file"):
        load([tmp_path / "notes.txt"])


def test_no_path_at_all() -> None:
    with pytest.raises(UserError, match="name at least one"):
        load([])


@pytest.mark.parametrize("content", ["", "\n", "{", json.dumps({"step": 1})])
def test_a_run_without_events(tmp_path: Path, content: str) -> None:
    (tmp_path / "events.jsonl").write_text(content)
    with pytest.raises(UserError, match="has no events"):
        load([tmp_path])
