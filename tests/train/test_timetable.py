"""Step, epoch and batch: against a run through all steps, one by one."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Place, Timetable, sizes_of

TABLES: dict[str, tuple[int, Any]] = {
    "one": (100, 32),
    "whole epochs": (128, ((0.0, 16), (1.0, 32), (3.0, 64))),
    "smaller again": (100, ((0.0, 10), (1.0, 50), (2.0, 7))),
    "within epochs": (100, ((0.0, 10), (0.25, 20), (1.5, 30), (2.1, 9))),
    "within one epoch": (100, ((0.0, 2), (0.1, 5), (0.2, 10), (0.5, 20))),
    "nothing fits the rest": (100, ((0.0, 10), (0.95, 60), (2.0, 40))),
}


def walk(table: Timetable, samples: int) -> Iterator[tuple[int, int, bool]]:
    """Epoch and first sample of each step, and whether it ends its epoch, one step after the other.

    An epoch ends when what is left of it fills no further batch, neither of this size nor the next.
    """
    epoch = seen = 0
    for step in range(80):
        size = table.batch(step)
        ends = samples - seen - size < max(size, table.batch(step + 1))
        yield epoch, seen, ends
        epoch, seen = (epoch + 1, 0) if ends else (epoch, seen + size)


@pytest.mark.parametrize("name", TABLES)
def test_samples_follow_each_other_through_every_epoch(name: str) -> None:
    table = Timetable(*TABLES[name])
    for step, (epoch, first, ends) in enumerate(walk(table, TABLES[name][0])):
        assert table.place(step) == Place(epoch, first, table.batch(step))
        assert epoch <= table.epoch(step) < table.epoch(step + 1) <= epoch + 1
        if ends:
            assert table.epoch(step + 1) == pytest.approx(epoch + 1, abs=1e-9)


@pytest.mark.parametrize("name", TABLES)
def test_a_size_holds_from_the_first_step_at_or_after_its_epoch(name: str) -> None:
    samples, sizes = TABLES[name]
    table = Timetable(samples, sizes)
    for step in range(80):
        wanted = [size for start, size in sizes_of(sizes) if start <= table.epoch(step) + 1e-9]
        assert table.batch(step) == wanted[-1]


@pytest.mark.parametrize("name", TABLES)
def test_steps_and_epochs_are_inverse(name: str) -> None:
    table = Timetable(*TABLES[name])
    for step in range(80):
        assert table.step(table.epoch(step)) == pytest.approx(step, abs=1e-9)
        assert table.step(table.epoch(step + 0.5)) == pytest.approx(step + 0.5, abs=1e-9)
    assert table.step(-1.0) < 0


@pytest.mark.parametrize("name", TABLES)
def test_samples_are_counted(name: str) -> None:
    table = Timetable(*TABLES[name])
    for steps in range(80):
        assert table.samples(steps) == sum(table.batch(step) for step in range(steps))


@pytest.mark.parametrize("per_epoch", [1, 3, 7, 10, 100, 390])
def test_one_size_is_a_division_to_the_last_bit(per_epoch: int) -> None:
    """What runs with one batch size have always computed: their numbers must stay."""
    table = Timetable(per_epoch * 8 + 5, 8)
    for step in range(2000):
        assert table.epoch(step) == step / per_epoch
        assert table.epoch(step + 0.5) == (step + 0.5) / per_epoch
        place = table.place(step)
        assert (place.epoch, place.first) == (step // per_epoch, step % per_epoch * 8)
    for epoch in (0.07, 0.1, 0.25, 1 / 3, 1.1, 35.0):
        assert table.step(epoch) == epoch * per_epoch
    assert Timetable(per_epoch * 8, ((0.0, 8),)).spans == Timetable(per_epoch * 8, 8).spans


@pytest.mark.parametrize("per_epoch", [1, 3, 7, 20, 390])
@pytest.mark.parametrize("every", [0.01, 0.1, 0.25, 0.3, 1 / 3, 1.0, 1.7])
def test_evaluations_of_one_size_come_when_they_did(per_epoch: int, every: float) -> None:
    table, per = Timetable(per_epoch, 1), max(1.0, every * per_epoch)
    for step in range(1, 1000):
        before = math.floor((step - 1) / per + 1e-9) < math.floor(step / per + 1e-9)
        epochs = (table.epoch(step - 1), table.epoch(step))
        now, then = (math.floor(epoch / every + 1e-9) for epoch in epochs)
        assert (now < then) == before


def test_sizes_are_named_as_far_as_a_run_goes() -> None:
    table = Timetable(100, ((0.0, 10), (0.25, 20), (2.0, 10)))
    assert [table.sizes(steps) for steps in (1, 3, 4, 99)] == [[10], [10], [10, 20], [10, 20, 10]]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            (),
            r"train.batch = \[\]: it must begin at epoch 0; a schedule looks like \[\[0, 64\], \[",
        ),
        (((1.0, 8),), r"= \[\[1, 8\]\]: it must begin at epoch 0"),
        (((0.0, 8), (2.0, 16), (1.5, 32)), "epoch 1.5 must come after epoch 2"),
        (((0.0, 8), (0.0, 16)), "epoch 0 must come after epoch 0"),
        (((0.0, 8), (math.inf, 16)), "epoch inf must be a number of epochs"),
        (((0.0, 8), (math.nan, 16)), "epoch nan must be a number of epochs"),
        (((0.0, 8), (2.0, 0)), "batch 0 must be from 1 to"),
        (((0.0, 8), (2.0, -4)), "batch -4 must be from 1 to"),
        (((0.0, 8), (2.0, 10**13)), "batch 10000000000000 must be from 1 to"),
        (((0.0, 8), (2.0, 8)), "the batch is 8 before and after epoch 2"),
        (((0.0, 8), (0.1, 16), (0.2, 24)), "16 from epoch 0.1 on has no step before epoch 0.2"),
        (((0.0, 8), (0.6, 16), (0.9, 8)), "16 from epoch 0.6 on has no step before epoch 0.9"),
    ],
)
def test_what_is_no_schedule_is_refused(sizes: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Timetable(24, sizes)
