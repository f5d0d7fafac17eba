"""Folders to resume that are not as the program left them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kronfac.cli import main
from kronfac.runs.events import read
from tests.train import small
from tests.train.answers import ask, check


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a comparison with one run, which is done."""
    place = tmp_path_factory.mktemp("finished")
    recipe = str(small.write(place / "small.toml"))
    flags = ["--optimizers", "sgd", "--out", str(place / "runs"), "--no-report", "--quiet"]
    assert main(["compare", recipe, *flags]) == 0
    return place / "runs"


@pytest.fixture
def runs(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to break."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "compared")
    return Path("compared")


@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["progress", "quiet"])
def test_a_checkpoint_that_is_gone_is_told(
    runs: Path, quiet: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "small-sgd-s0"
    (run / "checkpoint.pt").unlink()
    assert main(["train", "--resume", str(run), *quiet]) == 0
    printed = capsys.readouterr()
    sentence = f"{run}/checkpoint.pt of step 12 is gone: the run starts again at step 0."
    assert f"warning: {sentence}" in (printed.err if quiet else printed.out)
    warned = [e["message"] for e in read(run / "events.jsonl") if e["event"] == "warning"]
    assert warned == [sentence]


def test_a_run_that_never_saved_starts_without_a_warning(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "small-sgd-s0"
    (run / "checkpoint.pt").unlink()
    (run / "events.jsonl").unlink()
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


CONFIGS: list[tuple[str, Any]] = [
    ("recipe", 3),
    ("optimizer", None),
    ("seed", "x"),
    ("settings", []),
    ("changes", {}),
    ("file", 3),
    ("comparison", 3),
    ("comparison", {"optimizers": 3}),
    ("comparison", {"optimizers": [3]}),
    ("comparison", {"optimizers": ["sgd"], "seeds": "x"}),
    ("resume", 3),
    ("resume", {"log": [3]}),
    ("resume", {"recipe": 3}),
]


@pytest.mark.parametrize(("key", "value"), CONFIGS, ids=[f"{k}={v}" for k, v in CONFIGS])
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_config_with_a_wrong_value_is_one_sentence(
    runs: Path, command: str, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "small-sgd-s0/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    folder = runs if command == "compare" else path.parent
    answer = ask([command, "--resume", str(folder)], capsys)
    check(answer, "refused", f"{path} is damaged or no config.json of a run")


def test_a_recipe_that_was_kept_and_is_broken_is_one_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "small-sgd-s0/config.json"
    config = json.loads(path.read_text())
    config["resume"]["recipe"]["train"] = 3
    path.write_text(json.dumps(config))
    check(ask(["train", "--resume", str(path.parent)], capsys), "refused", "must be a table")
