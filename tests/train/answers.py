"""What the program answers: refused with one sentence, or accepted; nothing is trained for it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kronfac.cli import main
from kronfac.placement.costs import Compute
from kronfac.train import planning
from kronfac.train.launch import launch
from kronfac.train.run.result import Result


@dataclass(frozen=True)
class Answer:
    """Exit code, and what was printed where results and errors go."""

    code: int
    out: str
    err: str


def without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs end where they would begin to train, and no rank start."""

    def end(self: object) -> Result:
        self.file.close()  # type: ignore[attr-defined]
        return Result(folder=self.folder.path)  # type: ignore[attr-defined]

    def refuse(*args: object) -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("kronfac.train.run.run._Run.go", end)
    monkeypatch.setattr(launch, "launch", refuse)
    monkeypatch.setattr(planning, "measure", lambda: Compute(1e10, 1e11))


def ask(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command in this process."""
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = main(arguments)
        except SystemExit as end:  # how argparse ends
            code = int(end.code or 0)
    printed = capsys.readouterr()
    return Answer(code, printed.out, printed.err)


def check(answer: Answer, kind: str, phrase: str) -> None:
    """Assert that it is an answer of this kind which contains this phrase."""
    if kind == "accepted":
        assert (answer.code, answer.err) == (0, "")
        assert phrase in answer.out
        return
    assert kind == "refused"
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("kronfac: ")
    assert answer.err.count("\n") == 1
    assert answer.err.rstrip("\n").endswith((".", "?", "!"))
    assert "= ." not in answer.err, "an example is cut off"
    assert phrase in answer.err
    assert not Path("runs").exists(), "a refused command leaves nothing behind"
