"""What people see of a run."""

import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from kronfac.train.run import progress
from kronfac.train.run.run import train
from tests.train import small
from tests.train.small import at_step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, optimizer: str = "kfac", **changes: Any) -> str:
    train(small.recipe(**changes), optimizer, listeners=[progress.make(stream)])
    return stream.getvalue()


def test_plain_lines_for_evaluations_elsewhere() -> None:
    lines = shown(io.StringIO(), train__target=0.01).splitlines()
    assert lines[0].startswith("small with kfac, seed 0: 438 parameters, ")
    assert lines[0].endswith("12 steps of 32 samples")
    assert len(lines) == 5
    assert re.match(
        r"step 12/12  epoch 3\.00/3\.00  loss \d\.\d+  test \d+\.\d\d%  [\d,]+ images/s  0:00 left  "
        r"K-FAC \d+ % \(\w+ \d+, \w+ \d+\)",
        lines[3],
    )
    assert "target 1.00% reached at step 4, after" in lines[-1]


def test_a_test_between_logged_steps_is_shown_at_its_own_step() -> None:
    lines = shown(io.StringIO(), train__log_every=6).splitlines()
    places = [re.match(r"step (\d+)/12  epoch (\d)", line) for line in lines[1:-1]]
    assert [place and place.groups() for place in places] == [("4", "1"), ("8", "2"), ("12", "3")]


def test_other_optimizers_have_no_share_of_kfac() -> None:
    assert "K-FAC" not in shown(io.StringIO(), "sgd")


def test_a_missed_target_is_said() -> None:
    assert "target not reached" in shown(io.StringIO(), train__target=1.0)


def test_a_target_that_was_reached_before_a_resume_is_said(tmp_path: Path) -> None:
    recipe = small.recipe(train__target=0.01)
    stop = at_step(6, lambda: os.kill(os.getpid(), signal.SIGINT))
    train(recipe, out=tmp_path / "run", listeners=[stop])
    stream = io.StringIO()
    train(recipe, resume=tmp_path / "run", listeners=[progress.make(stream)])
    assert "target 1.00% reached at step 4, after" in stream.getvalue().splitlines()[-1]


def test_a_target_that_is_a_loss_is_said() -> None:
    assert "target loss 100 reached at step 4" in shown(io.StringIO(), train__target_loss=100.0)


def test_shares_of_phases_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    show = progress.Screen(stream)
    show.start = {"steps": 12000, "batch": 32, "train_samples": 3200, "epochs": 120.0}
    show.start["metric"] = "accuracy"
    phases = {"forward_backward": 5.0, "precondition": 1.2, "refresh": 1.0}
    step = {"step": 6000, "epoch": 1.0, "loss": 1.0, "samples_per_second": 12345.0}
    show({"event": "step", "phases": phases, **step})
    line = stream.getvalue().splitlines()[-1]
    assert len(line) < 80
    assert line.startswith("[###")
    assert line.endswith("left  K-FAC 31 % (precondition 17, refresh 14)")


@pytest.mark.parametrize(("waited", "said"), [(0.0, ""), (0.3, ""), (2.0, "data 25 %")])
def test_waiting_for_data_is_said_if_it_counts(waited: float, said: str) -> None:
    phases = {"data": waited, "forward_backward": 5.0, "refresh": 1.0}
    assert progress.data_share(phases) == said
    assert progress.kfac_share(phases).startswith(f"K-FAC {100 / (6 + waited):.0f} % (refresh")


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    assert train(small.recipe(), listeners=[progress.make(Gone())]).status == "done"


def test_lines_are_drawn_again_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    text = shown(Terminal())
    assert "\x1b[2A\x1b[J" in text
    drawn = text.split("\n")[1:-2]
    assert all(len(line.replace("\x1b[2A\x1b[J", "")) < 60 for line in drawn)
    assert "[################]" in text
    assert text.count("done: 12 steps") == 1


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(Terminal())


def test_warnings_and_failures_are_shown() -> None:
    stream = io.StringIO()
    show = progress.Lines(stream)
    show({"event": "warning", "step": 1, "message": "odd"})
    assert stream.getvalue() == "warning: odd\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text
