"""The ``kronfac`` command: what it prints, writes and returns."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kronfac
from kronfac.cli import main
from kronfac.placement.costs import Compute
from kronfac.protocol import registry
from kronfac.report.read.find import load
from kronfac.report.read.summary import chapters
from kronfac.runs.events import read
from kronfac.train import comparison, planning
from kronfac.train.recipe import files as recipe_files
from kronfac.train.run.stepping import Stepper
from tests.methods import toys
from tests.train import small


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test, with a recipe in it."""
    monkeypatch.chdir(tmp_path)
    small.write(tmp_path / "small.toml")
    return tmp_path


#: A config.json that is as it should be, apart from what is kept for a resume.
KEPT = json.dumps(
    {
        **{"recipe": "small", "optimizer": "kfac", "seed": 0, "changes": []},
        **{"settings": {"train": {}}, "resume": {"log": "tensorboard"}},
    }
)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a command that is refused; nothing else is printed or changed."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kronfac: ")
    assert printed.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    return printed.err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    real = Stepper.take

    def take(self: Stepper, now: int, *args: Any) -> torch.Tensor:
        if now == step:
            os.kill(os.getpid(), number)
        return real(self, now, *args)

    monkeypatch.setattr(Stepper, "take", take)


# --- train ---------------------------------------------------------------------------------------


def test_train_leaves_a_folder_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small with kfac, seed 0")
    assert lines[-1] == "runs/small-kfac-s0"
    config = json.loads(Path("runs/small-kfac-s0/config.json").read_text())
    assert config["changes"] == []


def test_a_second_run_gets_a_folder_of_its_own() -> None:
    for _ in range(2):
        assert main(["train", "small.toml", "--optimizer", "sgd", "--quiet"]) == 0
    assert sorted(os.listdir("runs")) == ["small-sgd-s0", "small-sgd-s0-2"]


def test_flags_change_the_recipe() -> None:
    flags = ["--epochs", "2", "--batch", "16", "--lr", "0.5", "--seed", "3", "--optimizer", "sgd"]
    changes = ["--set", "model.width=2", "--set", "train.log_every=1"]
    assert main(["train", "small.toml", *flags, *changes, "--out", "here", "--quiet"]) == 0
    config = json.loads(Path("here/config.json").read_text())
    settings = config["settings"]
    assert (settings["train"]["epochs"], settings["train"]["batch"]) == (2.0, 16)
    assert (settings["optimizer"]["lr"], config["seed"], settings["model"]["width"]) == (0.5, 3, 2)
    start = read(Path("here/events.jsonl"))[0]
    assert (start["steps"], start["seed"], start["optimizer"]) == (16, 3, "sgd")


def test_the_default_recipe_is_there_without_any_data() -> None:
    assert main(["train", "--set", "train.steps=1", "--set", "schedule.warmup=0", "--quiet"]) == 0
    assert os.listdir("runs") == ["digits-kfac-s0"]


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_and_resume_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    assert main(["train", "small.toml", "--out", "whole", "--set", "train.clip=9.0"]) == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, number)
        assert main(["train", "small.toml", "--set", "train.clip=9.0"]) == code
    assert "stopped; a checkpoint is saved: 6 steps" in capsys.readouterr().out
    assert main(["train", "small.toml", "--resume"]) == 0  # the change is remembered
    assert "resumed at step 6" in capsys.readouterr().out
    assert os.listdir("runs") == ["small-kfac-s0"]
    assert small.same(small.weights(Path("whole")), small.weights(Path("runs/small-kfac-s0")))


def test_the_folder_is_enough_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--optimizer", "sgd", "--seed", "3", "--lr", "0.2"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, signal.SIGINT)
        assert main(["train", "small.toml", *flags]) == 130
    capsys.readouterr()
    assert main(["train", "--resume", "runs/small-sgd-s3"]) == 0
    assert "small with sgd, seed 3" in capsys.readouterr().out


def stopped(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """A run that was interrupted after six steps."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, signal.SIGINT)
        assert main(arguments) == 130


@pytest.mark.slow
def test_a_folder_is_resumed_from_anywhere_without_the_recipes_file(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "sub").mkdir()
    small.write(place / "sub" / "mine.toml", optimizers__sgd__lr=0.3)
    monkeypatch.chdir("sub")
    flags = ["--set", "train.clip=9.0", "--optimizer", "sgd"]
    stopped(monkeypatch, "train", "mine.toml", *flags, "--out", "run")
    compared = ["compare", "mine.toml", "--optimizers", "sgd,adamw", "--seeds", "2"]
    stopped(monkeypatch, *compared, "--out", "runs")
    monkeypatch.chdir(place)
    (place / "sub" / "mine.toml").unlink()
    capsys.readouterr()
    assert main(["train", "--resume", "sub/run"]) == 0
    assert "mine with sgd, seed 0" in capsys.readouterr().out
    assert main(["compare", "--resume", "sub/runs", "--quiet", "--no-report"]) == 0
    config = json.loads(Path("sub/runs/mine-adamw-s1/config.json").read_text())
    assert (config["file"], config["recipe"]) == ("mine.toml", "mine")


@pytest.mark.slow
def test_flags_are_remembered_and_may_be_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("here").mkdir()
    Path("here/text").write_bytes(bytes(range(64)) * 100)
    small.write(
        Path("gpt.toml"),
        model={"name": "gpt", "dim": 8, "depth": 1, "heads": 2},
        data={"name": "text", "path": "text", "length": 16},
        schedule__warmup=0.0,
        train__target_loss=0.01,
    )
    made: list[str] = []
    monkeypatch.setattr("kronfac.train.record.loggers.check", lambda names: made.extend(names))
    monkeypatch.setattr("kronfac.train.record.loggers.make", lambda *args: lambda event: None)
    flags = ["--data-dir", "here", "--stop-at-target", "--log", "tensorboard", "--optimizer", "sgd"]
    for folder in ("one", "two"):
        stopped(monkeypatch, "train", "gpt.toml", *flags, "--out", folder)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    made.clear()
    reached = ["--set", "train.target_loss=100.0", "--set", "train.evaluate_every=0.5"]
    assert main(["train", "--resume", "../one", *reached]) == 0
    assert made == ["tensorboard"]
    assert read(Path("../one/events.jsonl"))[-1]["step"] < 12
    made.clear()
    assert main(["train", "--resume", "../two", *reached, "--no-stop-at-target", "--log", ""]) == 0
    assert made == []
    assert read(Path("../two/events.jsonl"))[-1]["step"] == 12


@pytest.mark.slow
def test_a_folder_without_the_recipes_content_is_resumed_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("one", "two"):
        stopped(monkeypatch, "train", "small.toml", "--set", "train.clip=9.0", "--out", folder)
        config = json.loads(Path(folder, "config.json").read_text())
        del config["resume"]
        Path(folder, "config.json").write_text(json.dumps(config))
    assert main(["train", "--resume", "one", "--quiet"]) == 0
    Path("small.toml").unlink()
    capsys.readouterr()
    assert "there is no recipe file 'small.toml'" in complaint(capsys, "train", "--resume", "two")


def test_the_last_run_is_found_by_what_the_command_line_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    change = ["--set", "train.seed=3", "--set", "optimizer=sgd"]
    assert main(["train", "small.toml", *change]) == 0
    assert main(["train", "small.toml", *change, "--resume"]) == 0
    assert capsys.readouterr().out.endswith("runs/small-sgd-s3\n")


def test_a_finished_run_is_told_and_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.toml", "--set", "train.target=0.01"]) == 0
    done = capsys.readouterr().out.splitlines()[-2]
    before = {path: path.read_bytes() for path in Path("runs/small-kfac-s0").iterdir()}
    assert main(["train", "--resume", "runs/small-kfac-s0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [done.replace("done", "finished already"), "runs/small-kfac-s0"]
    assert "target 1.00% reached at step 4" in lines[0]
    assert {path: path.read_bytes() for path in Path("runs/small-kfac-s0").iterdir()} == before


@pytest.mark.parametrize("content", ["[]", "{}", "{", '{"settings": 3}', KEPT, "\udcff"])
def test_a_damaged_config_is_one_sentence(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/small-kfac-s0")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert "damaged" in complaint(capsys, "train", "small.toml", "--resume", str(folder))


def test_a_loss_that_is_not_finite_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--optimizer", "sgd", "--lr", "1e20", "--set", "schedule.shape=constant"]
    assert main(["train", "small.toml", *flags, "--set", "schedule.warmup=0.0", "--quiet"]) == 1
    printed = capsys.readouterr()
    assert "kronfac: the loss was not finite at step" in printed.err
    assert printed.err.count("\n") == 1


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "digts"], "unknown recipe 'digts'; did you mean 'digits'?"),
        (["train", "small.toml", "--set", "train.epoch=3"], "did you mean 'epochs'?"),
        (["train", "small.toml", "--set", "train.batch=many"], "must be a whole number"),
        (["train", "small.toml", "--set", "epochs"], "must look like key=value"),
        (["train", "small.toml", "--optimizer", "kfca"], "did you mean 'kfac'?"),
        (["train", "small.toml", "--out", "."], "exists already"),
        (["train", "small.toml", "--resume"], "there is no run runs/small-kfac-s0"),
        (["train", "small.toml", "--resume", "nowhere"], "is no run folder"),
        (["train", "--resume", "small.toml"], "is no run folder"),
        (["train", "--resume", "digits"], "write `kronfac train digits --resume`"),
        (["train", "small.toml", "--resume", "x", "--out", "y"], "give one of them"),
        (["compare", "small.toml", "--resume", "x", "--out", "y"], "give one of them"),
        (["compare", "small.toml", "--optimizers", ","], "--optimizers ',' names none"),
        (["train", "small.toml", "--seed", "99999999999"], "train.seed = 99999999999"),
        (["train", "small.toml", "--device", "meta"], "--device 'meta' is unknown"),
        (["plan", "small.toml", "--ranks", "4", "--gbit", "nan"], "--gbit nan must be positive"),
        (["train", "small.toml", "--nproc", "0"], "--nproc 0 must be at least 1"),
        (["train", "small.toml", "--log", "paper"], "unknown logger 'paper'"),
        (["train", "small.toml", "--device", "toaster"], "--device 'toaster' is unknown"),
        (["compare", "small.toml", "--optimizers", "sgd,kfca"], "did you mean 'kfac'?"),
        (["compare", "small.toml", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["compare", "small.toml", "--resume", "nowhere"], "holds no runs"),
        (["recipes", "cifar"], "did you mean 'cifar10'?"),
        (["data", "cifar"], "did you mean 'cifar10'?"),
        (["plan", "small.toml", "--ranks", "1"], "--ranks 1 must be at least 2"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(capsys, *arguments)


LONG = "a" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "small.toml", "--out", LONG],
        ["train", "small.toml", "--runs", LONG],
        ["train", "small.toml", "--runs", LONG, "--resume"],
        ["train", "--resume", LONG],
        ["train", f"{LONG}.toml"],
        ["train", "mnist", "--data-dir", LONG],
        ["train", "text", "--set", f"data.path={LONG}"],
        ["compare", "small.toml", "--out", LONG],
        ["compare", "small.toml", "--runs", LONG],
        ["compare", "--resume", LONG],
        ["recipes", f"{LONG}.toml"],
        ["data", "mnist", "--data-dir", LONG],
        ["report", LONG],
    ],
)
def test_a_name_that_is_too_long_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *arguments)
    assert LONG in said
    assert "cannot be used: File name too long." in said


def test_a_folder_of_somebody_else_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        assert main(["train", "small.toml", "--out", "theirs/run"]) == 2
    said = capsys.readouterr().err
    assert said == "kronfac: theirs/run cannot be used: Permission denied.\n"


def test_an_error_about_no_path_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise OSError("something else")

    monkeypatch.setattr("kronfac.train.recipe.files.text", fail)
    with pytest.raises(OSError, match="something else"):
        main(["recipes", "digits"])


def test_data_that_cannot_be_had_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: Any, **kwargs: Any) -> Any:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    assert main(["train", "cifar10", "--data-dir", "here"]) == 2
    said = capsys.readouterr().err
    assert "CIFAR-10" in said
    assert "here" in said
    assert said.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--epochs", "many"], "invalid float value: 'many'"),
        (["train", "small.toml", "--lr"], "expected one argument"),
        (["train", "small.toml", "--optimiser", "sgd"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_are_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("kronfac: ")
    assert words in said
    assert said.count("\n") == 1


def test_another_runs_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "small.toml", "--quiet"])
    capsys.readouterr()
    small.write(Path("other.toml"), model__width=8)
    said = complaint(capsys, "train", "other.toml", "--resume", "runs/small-kfac-s0")
    assert "belongs to another run" in said
    said = complaint(
        capsys, "train", "small.toml", "--resume", "runs/small-kfac-s0", "--set", "model.width=8"
    )
    assert "its model.width is 4, and here it is 8" in said


def test_a_corrupt_data_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("data/mnist")
    folder.mkdir(parents=True)
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for part in parts:
        (folder / f"{part}-ubyte").write_bytes(b"not an image")
    said = complaint(capsys, "train", "mnist", "--data-dir", "data")
    assert "sha256" in said or "damaged" in said


# --- the other commands --------------------------------------------------------------------------


def test_compare_runs_everything_and_writes_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "small.toml", "--optimizers", "sgd,kfac", "--seeds", "2"]
    assert main([*arguments, "--set", "train.target=0.05", "--quiet"]) == 0
    folder = Path("runs/small-compare")
    names = {f"small-{name}-s{seed}" for name in ("sgd", "kfac") for seed in (0, 1)}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == names
    assert (folder / "report.html").is_file()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["optimizer", "runs", "final", "reached", "steps", "seconds"]
    assert [line.split()[:2] for line in lines[1:3]] == [["sgd", "2"], ["kfac", "2"]]
    assert lines[-1] == "runs/small-compare/report.html"


def test_compare_all_runs_every_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those without a table of the recipe have the line to start with."""
    known = {"KFAC": kronfac.KFAC, "RankOne": toys.RankOne}
    monkeypatch.setattr(registry, "_OPTIMIZERS", known)
    arguments = ["compare", "small.toml", "--optimizers", "all", "--out", "all", "--quiet"]
    changes = ["--set", "train.steps=4", "--set", "model.norm=false"]
    assert main([*arguments, *changes]) == 0
    table = capsys.readouterr().out.splitlines()[1:-2]
    assert [line.split()[0] for line in table] == ["sgd", "adamw", "muon", "kfac", "rankone"]
    (chapter,) = chapters(load([Path("all")])[0])
    assert [group.label for group in chapter.groups][-1] == "RankOne"
    config = json.loads(Path("all/small-rankone-s0/config.json").read_text())
    assert config["settings"]["optimizer"]["lr"] == toys.RankOneMethod.line["lr"]


def test_a_method_needs_no_table() -> None:
    changes = ["--set", "optimizers.rankone.decay=0.25", "--set", "model.norm=false"]
    assert main(["train", "small.toml", "--optimizer", "rankone", *changes, "--quiet"]) == 0
    config = json.loads(Path("runs/small-rankone-s0/config.json").read_text())
    chosen = config["settings"]["optimizer"]
    assert (chosen["decay"], chosen["momentum"]) == (0.25, toys.RankOneMethod.line["momentum"])


def test_compare_leaves_out_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    small.write(Path("soap.toml"), optimizers__soap__lr=0.01, train__steps=4)
    assert main(["compare", "soap.toml", "--no-report", "--quiet"]) == 0
    note, _, *table = capsys.readouterr().out.splitlines()
    package = "pytorch_optimizer"
    assert note == f"soap is left out: it needs the package {package} (pip install {package})"
    assert [line.split()[0] for line in table[:-1]] == ["sgd", "adamw", "muon", "kfac"]
    arguments = ["compare", "soap.toml", "--optimizers", "sgd,soap", "--out", "named"]
    assert "optimizer 'soap' needs the package" in complaint(capsys, *arguments)


def test_an_optimizer_that_is_alone_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    small.write(Path("soap.toml"), optimizer="soap", optimizers={"soap": {"lr": 0.01}})
    assert "optimizer 'soap' needs the package" in complaint(capsys, "compare", "soap.toml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizers.kfac.damping=-1", "damping=-1 must be a positive"),
        ("optimizers.kfac.schedule.shape=cosin", "schedule shape='cosin' is unknown"),
        ("optimizers.kfac.schedule.warmup=9", "schedule.warmup = 9 epochs is not shorter"),
        ("optimizers.kfac.train.batch=1000", "128 training samples"),
        ("optimizers.kfac.train.micro_batches=3", "choose a multiple of 3"),
    ],
)
def test_compare_finds_mistakes_before_the_first_run(
    change: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", "small.toml", "--optimizers", "sgd,kfac", "--set", change]
    assert words in complaint(capsys, *arguments)


@pytest.mark.slow
def test_runs_of_a_comparison_are_the_same_as_alone() -> None:
    assert (
        main(["compare", "small.toml", "--optimizers", "sgd,kfac", "--no-report", "--quiet"]) == 0
    )
    for name in ("sgd", "kfac"):
        assert main(["train", "small.toml", "--optimizer", name, "--out", name, "--quiet"]) == 0
        compared = small.weights(Path(f"runs/small-compare/small-{name}-s0"))
        assert small.same(compared, small.weights(Path(name)))


def test_a_finished_comparison_needs_no_data() -> None:
    Path("text").write_bytes(bytes(range(64)) * 100)
    changes = {
        "model": {"name": "gpt", "dim": 8, "depth": 1, "heads": 2},
        "data": {"name": "text", "path": "text", "length": 16},
    }
    small.write(Path("gpt.toml"), **changes, schedule__warmup=0.0)
    flags = ["--no-report", "--quiet"]
    assert main(["compare", "gpt.toml", "--optimizers", "sgd", *flags]) == 0
    Path("text").unlink()
    assert main(["compare", "--resume", "runs/gpt-compare", *flags]) == 0


@pytest.mark.parametrize(("names", "code"), [("sgd", 1), ("sgd,adamw", 0)])
def test_a_comparison_fails_if_all_its_runs_do(
    names: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["optimizers.sgd.lr=1e20", "schedule.shape=constant", "schedule.warmup=0.0"]
    flags = ["--no-report", "--quiet"]
    arguments = ["compare", "small.toml", "--optimizers", names, *flags]
    assert main([*arguments, *(word for one in changes for word in ("--set", one))]) == code
    assert "kronfac: the loss was not finite at step" in capsys.readouterr().err
    assert main(["compare", "--resume", "runs/small-compare", *flags]) == code


def test_an_interrupted_comparison_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", "small.toml", "--optimizers", "sgd,kfac", "--no-report", "--quiet"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, signal.SIGINT)
        assert main(arguments) == 130
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "continue with: kronfac compare --resume runs/small-compare"
    assert main(["compare", "--resume", "runs/small-compare", "--no-report", "--quiet"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:-1]] == ["sgd", "kfac"]
    sgd, kfac = (
        read(Path(f"runs/small-compare/small-{n}-s0/events.jsonl")) for n in ("sgd", "kfac")
    )
    assert [e["resumed"] for e in sgd if e["event"] == "start"] == [None, 6]
    assert [e["resumed"] for e in kfac if e["event"] == "start"] == [None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.steps=15", "small-sgd-s0 belongs to a run of 12 steps, and this one has 15"),
        ("train.epochs=2", "belongs to a run of 12 steps, and this one has 8"),
        ("optimizers.sgd.lr=0.001", "its optimizer.lr is 0.1, and here it is 0.001"),
        ("optimizers.sgd.dampening=0.1", "its optimizer.dampening is not set, and here it is 0.1"),
        ("train.clip=1.0", "its train.clip is 0.0, and here it is 1.0"),
        ("train.target=0.5", "its train.target is not set, and here it is 0.5"),
    ],
)
@pytest.mark.parametrize("optimizers", ["sgd,adamw", "adamw"])
def test_runs_of_other_settings_are_not_mixed(
    change: str, words: str, optimizers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even if the finished run is not asked for: it stays in the report."""
    folder = "runs/small-compare"
    assert main(["compare", "small.toml", "--optimizers", "sgd", "--no-report", "--quiet"]) == 0
    capsys.readouterr()
    flags = ["--resume", folder, "--seeds", "2", "--optimizers", optimizers, "--set", change]
    assert words in complaint(capsys, "compare", *flags)
    small.write(Path("other.toml"))
    said = complaint(capsys, "compare", "other.toml", "--resume", folder)
    assert "small-sgd-s0 is of recipe 'small', and here it is 'other'" in said


@pytest.mark.slow
def test_a_comparison_can_be_given_more_optimizers_and_seeds() -> None:
    flags = ["--no-report", "--quiet"]
    assert main(["compare", "small.toml", "--optimizers", "sgd", *flags]) == 0
    sgd = Path("runs/small-compare/small-sgd-s0/events.jsonl")
    before = sgd.read_text()
    more = ["--optimizers", "sgd,adamw", "--seeds", "2", "--set", "optimizers.adamw.lr=0.02"]
    assert main(["compare", "--resume", "runs/small-compare", *more, *flags]) == 0
    assert sgd.read_text() == before
    names = {f"small-{name}-s{seed}" for name in ("sgd", "adamw") for seed in (0, 1)}
    assert set(os.listdir("runs/small-compare")) == names


def test_the_table_counts_each_run_once_by_its_last_end(tmp_path: Path) -> None:
    for name, ends in (("kfac", (0.1, 0.9)), ("my-kfac", (0.5,))):
        folder = tmp_path / f"small-{name}-s0"
        folder.mkdir()
        events: list[dict[str, Any]] = []
        for resumed, end in zip((None, 4), ends, strict=False):
            events += [
                {"event": "start", "metric": "accuracy", "target": 0.05, "resumed": resumed},
                {"event": "eval", "step": 4, "seconds": 1.0, "accuracy": 0.1},
                {"event": "finish", "accuracy": end, "loss": 1.0},
            ]
        (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    lines = comparison.table(tmp_path, "small", ["kfac", "my-kfac"])
    assert lines[1].split() == ["kfac", "1", "90.00%", "1/1", "4", "1.0"]
    assert lines[2].split() == ["my-kfac", "1", "50.00%", "1/1", "4", "1.0"]


def test_a_target_that_most_runs_miss_has_no_median(tmp_path: Path) -> None:
    for seed in range(3):
        folder = tmp_path / f"small-sgd-s{seed}"
        folder.mkdir()
        events = [
            {"event": "start", "metric": "accuracy", "target": 0.5},
            {"event": "eval", "step": 4, "seconds": 1.0, "accuracy": 0.1 if seed else 0.6},
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    [_, line, _] = comparison.table(tmp_path, "small", ["sgd"])
    assert line.split() == ["sgd", "3", "-", "1/3", "-", "-"]


def test_the_target_of_now_counts_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that was aimed at, and reached, before the comparison was interrupted."""
    arguments = ["compare", "--no-report", "--quiet"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, signal.SIGINT)
        easy = ["--optimizers", "sgd", "--set", "train.target=0.01"]
        assert main([*arguments, "small.toml", *easy]) == 130
    capsys.readouterr()
    hard = ["--resume", "runs/small-compare", "--set", "train.target=1.0"]
    assert main([*arguments, *hard]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[3:] == ["0/1", "-", "-"]


@pytest.mark.slow
def test_seeds_that_are_added_later_are_of_the_same_group() -> None:
    arguments = ["compare", "--no-report", "--quiet"]
    assert main([*arguments, "small.toml", "--optimizers", "sgd"]) == 0
    assert main([*arguments, "--resume", "runs/small-compare", "--seeds", "2"]) == 0
    assert main(["train", "small.toml", "--optimizer", "sgd", "--seed", "2", "--quiet"]) == 0
    [chapter] = chapters(load([Path("runs")])[0])
    assert [(group.label, len(group.runs)) for group in chapter.groups] == [("SGD", 3)]


def test_report_reads_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "small.toml", "--quiet"])
    capsys.readouterr()
    assert main(["report", "runs/small-kfac-s0", "--out", "pictures"]) == 0
    assert capsys.readouterr().out == "pictures/report.html\n"
    assert Path("pictures/report.html").is_file()


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "digits\n    Handwritten digits" in listed
    assert max(map(len, listed.splitlines())) <= 80
    assert main(["recipes", "digits"]) == 0
    assert "\n[optimizers.kfac]\n" in capsys.readouterr().out


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"kronfac \S+\n", capsys.readouterr().out)


def test_data_sets_are_listed_and_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--data-dir", "here"]) == 0
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) <= 80
    assert [line.split()[0] for line in listed.splitlines()[:2]] == ["digits", "fashion-mnist"]
    assert main(["data", "digits"]) == 0


def test_plan_compares_schemes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "small.toml", "--ranks", "4"]) == 0
    table = capsys.readouterr().out
    assert {"comm-opt", "mem-opt", "replicated"} <= {line.split()[0] for line in table.splitlines()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if "osawa" in name else name
        for name in recipe_files.shipped()
    ],
)
def test_plan_needs_no_data(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "measure", lambda: Compute(1e10, 1e11))
    assert main(["plan", name, "--ranks", "8", "--data-dir", "nowhere"]) == 0
    assert "comm-opt" in capsys.readouterr().out
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    "command", [[], ["train"], ["compare"], ["report"], ["recipes"], ["data"], ["plan"]]
)
def test_help_fits_a_terminal(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


# --- the real program ----------------------------------------------------------------------------


#: Where the package is, for processes that start in another folder.
SOURCE = str(Path(kronfac.__file__).parents[1])


def program(
    *arguments: str, prelude: str = "", starter: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the program in processes of its own; Python runs the prelude first in each of them.

    ``starter`` is a module that starts them, with its arguments.
    """
    Path("sitecustomize.py").write_text(prelude)
    path = os.pathsep.join([str(Path.cwd()), SOURCE])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", *starter, "kronfac", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_python_m_kronfac_is_the_program() -> None:
    done = program("recipes", "digits")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[train]" in done.stdout
    wrong = program("train", "nonsense")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def signal_in_step(number: int, step: int) -> str:
    """A prelude that sends a signal to the second rank in the middle of a step."""
    return f"""
import os
from kronfac.train.run import stepping
real = stepping.Stepper.take
def take(self, step, *args):
    if step == {step} and self.setup.ranks.rank == 1:
        os.kill(os.getpid(), {number})
    return real(self, step, *args)
stepping.Stepper.take = take
"""


@pytest.mark.slow
def test_nproc_starts_ranks_that_stop_and_resume_together() -> None:
    flags = ("--nproc", "2", "--set", "train.mixup=0.4")
    assert program("train", "small.toml", *flags, "--out", "whole").returncode == 0
    prelude = signal_in_step(signal.SIGTERM, 5)
    stopped = program("train", "small.toml", *flags, "--out", "part", prelude=prelude)
    assert (stopped.returncode, stopped.stderr) == (143, "")
    rest = program("train", "small.toml", "--nproc", "2", "--resume", "part")
    assert (rest.returncode, rest.stderr) == (0, "")
    assert small.same(small.weights(Path("whole")), small.weights(Path("part")))


@pytest.mark.slow
def test_torchrun_starts_ranks_that_train_together() -> None:
    """``--standalone`` takes a free port."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    flags = ("train", "digits", "--set", "train.steps=5", "--out", "run")
    done = program(*flags, starter=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "run"
    events = read(Path("run/events.jsonl"))
    assert (events[0]["event"], events[0]["world"]) == ("start", 2)
    assert [(e["status"], e["step"]) for e in events if e["event"] == "finish"] == [("done", 5)]
    again = program(*flags, starter=torchrun)
    assert again.returncode != 0
    assert "kronfac: run exists already and is left as it is" in again.stderr


@pytest.mark.slow
def test_a_killed_rank_ends_the_program_with_one_sentence() -> None:
    prelude = signal_in_step(signal.SIGKILL, 6)
    ended = program("train", "small.toml", "--nproc", "2", "--out", "run", prelude=prelude)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("kronfac: rank 1 was ended by SIGKILL")
    assert torch.load("run/checkpoint.pt", weights_only=True)["step"] == 4
    assert read(Path("run/events.jsonl"))[-1]["event"] == "failure"
