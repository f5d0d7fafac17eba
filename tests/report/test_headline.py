"""The result in a sentence: honest whoever won."""

from pathlib import Path
from typing import Any

import pytest

from kronfac.report.page.headline import headline, remarks
from kronfac.report.read.find import load
from kronfac.report.read.summary import Chapter, chapters
from tests.report.made_up import evaluation, start, step, write_events

DONE = {"event": "finish", "status": "done"}


@pytest.fixture
def runs(tmp_path: Path) -> "Runs":
    return Runs(tmp_path)


class Runs:
    """Runs that reach 98 % at a given step and second, or never."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, optimizer: str, *reached: tuple[int, float] | None, **changes: Any) -> None:
        for seed, at in enumerate(reached):
            begin = start(optimizer=optimizer, kind=optimizer, seed=seed, **changes)
            evals = [] if at is None else [evaluation(at[0], 0.99, at[1])]
            evals.append(evaluation(400, 0.95, 40.0))
            write_events(self.root / f"digits-{optimizer}-s{seed}", begin, *evals, DONE)

    @property
    def chapter(self) -> Chapter:
        return chapters(load([self.root])[0])[0]


def test_kfac_won(runs: Runs) -> None:
    runs.add("kfac", (118, 7.0), (110, 6.5), (130, 8.0))
    runs.add("sgd", (200, 10.0), (190, 9.0), (220, 12.0))
    assert headline(runs.chapter) == (
        "K-FAC reached 98 % in 41 % fewer steps and 30 % less time than SGD (median of 3 seeds)."
    )
    assert remarks(runs.chapter) == []


def test_fewer_steps_but_more_time(runs: Runs) -> None:
    runs.add("kfac", (100, 12.0))
    runs.add("sgd", (200, 10.0))
    assert headline(runs.chapter) == (
        "K-FAC reached 98 % in 50 % fewer steps but 20 % more time than SGD (one run each)."
    )


def test_kfac_lost(runs: Runs) -> None:
    runs.add("kfac", (300, 20.0))
    runs.add("sgd", (200, 10.0))
    assert headline(runs.chapter) == (
        "K-FAC needed 50 % more steps and 100 % more time than SGD to reach 98 % (one run each)."
    )


def test_a_draw_in_steps(runs: Runs) -> None:
    runs.add("kfac", (200, 9.0))
    runs.add("sgd", (200, 10.0))
    assert headline(runs.chapter) == (
        "K-FAC reached 98 % in as many steps as and 10 % less time than SGD (one run each)."
    )


def test_only_kfac_reached_it(runs: Runs) -> None:
    runs.add("kfac", (100, 6.0))
    runs.add("sgd", None)
    assert headline(runs.chapter) == (
        "K-FAC reached 98 % in 100 steps and 6 s; SGD did not reach it in 400 steps "
        "(best 95 %; one run each)."
    )


def test_kfac_missed_it(runs: Runs) -> None:
    runs.add("kfac", None, None, (100, 6.0))
    runs.add("sgd", (200, 10.0), (200, 10.0), (200, 10.0))
    assert headline(runs.chapter) == (
        "K-FAC did not reach 98 % in 400 steps (best 95 %); SGD reached it in 200 steps and 10 s "
        "(median of 3 seeds; K-FAC reached it in 1 of 3)."
    )


def test_some_seeds_missed_it(runs: Runs) -> None:
    runs.add("kfac", (100, 5.0), (100, 5.0), None)
    runs.add("sgd", (200, 10.0), (200, 10.0), (200, 10.0))
    assert headline(runs.chapter).endswith(
        "than SGD (median of 3 seeds; K-FAC reached it in 2 of 3)."
    )


def test_nobody_reached_it(runs: Runs) -> None:
    runs.add("kfac", None)
    runs.add("sgd", None)
    assert headline(runs.chapter) == (
        "Neither K-FAC (best 95 %) nor SGD (best 95 %) reached 98 % (one run each)."
    )


def test_another_one_was_faster(runs: Runs) -> None:
    runs.add("kfac", (100, 6.0))
    runs.add("sgd", (200, 10.0))
    runs.add("muon", (110, 5.0))
    assert "than SGD" in headline(runs.chapter)
    assert remarks(runs.chapter) == ["The fastest was Muon: 110 steps and 5 s."]


def test_kfac_was_faster_than_all(runs: Runs) -> None:
    runs.add("kfac", (100, 4.0))
    runs.add("sgd", (200, 10.0))
    runs.add("muon", (110, 5.0))
    assert remarks(runs.chapter) == ["K-FAC was the fastest of all 3."]


def test_without_kfac_the_fastest_is_told(runs: Runs) -> None:
    runs.add("adamw", (100, 5.0))
    runs.add("sgd", (200, 10.0))
    assert headline(runs.chapter).startswith("AdamW reached 98 % in 50 % fewer steps and 50 % less")


def test_one_optimizer(runs: Runs) -> None:
    runs.add("kfac", (100, 5.0), (120, 7.0))
    assert headline(runs.chapter) == "K-FAC reached 98 % in 110 steps and 6 s (median of 2 seeds)."


def test_no_target(runs: Runs) -> None:
    runs.add("kfac", (100, 5.0), target=None)
    runs.add("sgd", (100, 5.0), target=None)
    assert headline(runs.chapter) == (
        "No target was set; K-FAC at 95 % and SGD at 95 % after 400 steps (one run each)."
    )


def test_no_evaluation(tmp_path: Path) -> None:
    write_events(tmp_path / "r", start(), step(10, loss=0.25), DONE)
    (chapter,) = chapters(load([tmp_path])[0])
    assert headline(chapter) == "No evaluation was recorded; the last training loss: K-FAC 0.25."


def test_nothing_but_a_start(tmp_path: Path) -> None:
    write_events(tmp_path / "r", start())
    (chapter,) = chapters(load([tmp_path])[0])
    assert headline(chapter) == "No step was recorded, so there is nothing to compare yet."
    assert remarks(chapter) == ["1 run did not say how it ended (killed, or still running)."]


def test_failed_runs_are_told(tmp_path: Path) -> None:
    failed = {"event": "finish", "status": "failed", "step": 10}
    write_events(tmp_path / "a", start(), evaluation(10, 0.5), failed)
    write_events(tmp_path / "b", start(seed=1), evaluation(10, 0.99), DONE)
    (chapter,) = chapters(load([tmp_path])[0])
    assert remarks(chapter) == ["1 of 2 K-FAC runs failed."]
