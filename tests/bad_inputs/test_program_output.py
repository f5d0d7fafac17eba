"""Output that nobody can take: one sentence where errors go, and no run is lost for it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from kronfac.cli import main
from kronfac.runs.events import read
from tests.train import small

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
SENTENCE = "kronfac: standard output cannot be written: No space left on device"


@pytest.fixture(autouse=True)
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Standard output is a full device."""
    monkeypatch.chdir(tmp_path)
    small.write(tmp_path / "small.toml")
    with FULL.open("w") as device:
        monkeypatch.setattr(sys, "stdout", device)
        yield device


@pytest.mark.parametrize("command", [["recipes"], ["data"], ["recipes", "digits"]])
def test_a_full_device_is_one_sentence(
    command: list[str], capsys: pytest.CaptureFixture[str], full: TextIO
) -> None:
    sys.stdout = full  # capsys has put its own there
    assert main(command) == 2
    assert capsys.readouterr().err == f"{SENTENCE}; send it elsewhere.\n"


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["train", "--help"]])
def test_help_to_a_full_device_is_one_sentence(
    command: list[str], capsys: pytest.CaptureFixture[str], full: TextIO
) -> None:
    sys.stdout = full
    assert main(command) == 2
    assert capsys.readouterr().err == f"{SENTENCE}; send it elsewhere.\n"


def test_a_run_goes_on_without_progress(capsys: pytest.CaptureFixture[str], full: TextIO) -> None:
    sys.stdout = full
    assert main(["train", "small.toml", "--optimizer", "sgd"]) == 0
    assert capsys.readouterr().err == f"{SENTENCE}; the run goes on without progress.\n"
    assert read(Path("runs/small-sgd-s0/events.jsonl"))[-1]["status"] == "done"


def test_errors_that_cannot_be_written_keep_their_code(
    monkeypatch: pytest.MonkeyPatch, full: TextIO
) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    assert main(["train", "nonsense"]) == 2
