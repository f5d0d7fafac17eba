"""Axes with round ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kronfac.report.draw.scale import Scale, accuracy, along, linear, log

# What the report takes for a number; see kronfac.report.read.read.number.
drawable = st.floats(-1e100, 1e100).filter(lambda value: value == 0 or abs(value) >= 1e-100)
floats = st.lists(st.floats(-1e6, 1e6) | drawable, min_size=1, max_size=20)


def labels(scale: Scale) -> list[str]:
    return [label for _, label in scale.ticks]


def test_linear_ticks_are_round() -> None:
    assert labels(linear([0.13, 0.87])) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert labels(linear([0.0, 1.0], percent=True)) == [
        "0 %",
        "20 %",
        "40 %",
        "60 %",
        "80 %",
        "100 %",
    ]


def test_steps_begin_at_zero_and_end_at_the_last() -> None:
    scale = along([20, 300])
    assert labels(scale) == ["0", "50", "100", "150", "200", "250", "300"]
    assert (scale.place(0), scale.place(300)) == (0, 1)
    assert labels(along([60000]))[-1] == "60k"


def test_logarithmic_places() -> None:
    scale = log([0.01, 1.0])
    assert scale.place(0.1) == pytest.approx(0.5)
    assert labels(scale) == ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]
    assert scale.place(-1) == 0  # below everything


def test_good_accuracies_are_spaced_by_their_error() -> None:
    scale = accuracy([0.5, 0.99])
    assert labels(scale) == ["50 %", "80 %", "90 %", "95 %", "98 %", "99 %"]
    first, second = scale.place(0.98) - scale.place(0.9), scale.place(0.96) - scale.place(0.8)
    assert first == pytest.approx(second)  # both are a fifth of the error


def test_no_error_at_all_stays_on_the_axis() -> None:
    assert accuracy([0.5, 1.0]).place(1.0) == 1
    assert accuracy([1.0]).place(1.0) == 1


def test_low_accuracies_are_linear() -> None:
    assert accuracy([0.1, 0.7]).kind == "linear"


@given(floats)
def test_every_value_has_a_place(values: list[float]) -> None:
    for scale in (linear(values), along([abs(v) for v in values]), log(values)):
        assert all(0 <= scale.place(value) <= 1 for value in values)
        assert 1 <= len(scale.ticks) <= 12 or scale.kind == "log"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_every_accuracy_has_a_place(values: list[float]) -> None:
    scale = accuracy(values)
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
