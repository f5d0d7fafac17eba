"""Lines: medians over runs, thinned."""

from pathlib import Path

import pytest

from kronfac.report.draw.curves import Point, curve, thin
from kronfac.report.read.find import load
from kronfac.report.read.summary import chapters
from tests.report.made_up import evaluation, start, write_events


def median_of(root: Path, *runs: list[tuple[int, float | None, float]]) -> list[Point]:
    """The median line of runs given as (step, accuracy, seconds)."""
    for seed, points in enumerate(runs):
        evals = [evaluation(step, accuracy, seconds) for step, accuracy, seconds in points]
        write_events(root / f"r-kfac-s{seed}", start(seed=seed), *evals)
    (group,) = chapters(load([root])[0])[0].groups
    return list(curve(group, "evals", "accuracy").median)


def test_median_of_values_and_of_seconds(tmp_path: Path) -> None:
    assert median_of(tmp_path, [(10, 0.1, 1.0)], [(10, 0.3, 5.0)], [(10, 0.2, 2.0)]) == [
        (10, 2.0, 0.2)
    ]


def test_runs_that_log_elsewhere_are_interpolated(tmp_path: Path) -> None:
    found = median_of(
        tmp_path, [(0, 0.0, 0.0), (20, 0.8, 4.0)], [(0, 0.0, 0.0), (10, 0.6, 1.0), (20, 1.0, 2.0)]
    )
    assert found == [(0, 0.0, 0.0), (10, 1.5, 0.5), (20, 3.0, 0.9)]


def test_the_line_ends_where_half_of_the_runs_have_ended(tmp_path: Path) -> None:
    whole = [(10, 0.5, 1.0), (20, 0.6, 2.0)]
    assert [p.step for p in median_of(tmp_path, whole, whole[:1])] == [10]
    assert [p.step for p in median_of(tmp_path, whole, whole[:1], whole)] == [10, 20]


def test_values_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    assert [p.step for p in median_of(tmp_path, [(10, None, 1.0), (20, 0.5, 2.0)])] == [20]


def test_thinning_keeps_ends_and_means() -> None:
    points = [Point(i, 2.0 * i, float(i % 2)) for i in range(1002)]
    found = thin(points, most=102)
    assert len(found) == 102
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert found[1] == Point(5.5, 11.0, 0.5)  # the mean of points 1 to 10
    assert thin(points[:50], most=102) == points[:50]


@pytest.mark.parametrize("length", [103, 150, 205])
def test_thinning_leaves_no_bucket_empty(length: int) -> None:
    assert len(thin([Point(i, None, 1.0) for i in range(length)], most=102)) == 102
