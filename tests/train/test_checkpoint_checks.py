"""A checkpoint is resumed to the same numbers or refused in one sentence, whatever happened to it."""

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kronfac.cli import main
from kronfac.runs.errors import UserError
from kronfac.train.run import checkpointing
from kronfac.train.run.run import train
from tests.train import small

Content = dict[str, Any]
#: Settings with few tensors, so that a checkpoint is small.
MIXED = {"train__mixup": 0.4, "train__steps": 6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are half done, by optimizer."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("kfac", "sgd", "adamw", "muon"):
        train(small.recipe(), name, out=folder / name, listeners=[small.at_step(6, _interrupt)])
    mixed = small.recipe(**MIXED)
    train(mixed, "sgd", out=folder / "mixed", listeners=[small.at_step(3, _interrupt)])
    return folder


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def same(first: Any, second: Any) -> bool:
    """Whether two contents are equal to the bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and (
            first.dtype == second.dtype and torch.equal(first, second)
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("name", ["kfac", "adamw"])
def test_a_flipped_bit_is_refused_or_harmless(runs: Path, tmp_path: Path, name: str) -> None:
    """Harmless are dates, padding and the like, which hold nothing."""
    whole = (runs / name / "checkpoint.pt").read_bytes()
    content = checkpointing.load(runs / name / "checkpoint.pt")
    path, refused, tried = tmp_path / "checkpoint.pt", 0, 0
    for place in range(0, len(whole), 97):
        broken = bytearray(whole)
        broken[place] ^= 1 << (place % 8)
        path.write_bytes(broken)
        tried += 1
        try:
            found = checkpointing.load(path)
        except UserError:
            refused += 1
        else:
            assert same(found, content), f"byte {place} changed the content"
    assert refused > 0.3 * tried


def test_a_flipped_bit_in_a_tensor_is_named_damage(runs: Path, tmp_path: Path) -> None:
    content = bytearray((runs / "sgd" / "checkpoint.pt").read_bytes())
    weights = torch.load(runs / "sgd" / "checkpoint.pt", weights_only=True)["model"]["9.weight"]
    place = bytes(content).index(weights.numpy().tobytes())
    content[place] ^= 1
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged: .*data/\d+ in it is not as it was written"):
        checkpointing.load(path)


def test_a_tensor_that_is_marked_as_a_folder_is_refused(runs: Path, tmp_path: Path) -> None:
    """Torch takes it for one that is there, and hands out memory that was never written."""
    content = bytearray((runs / "sgd" / "checkpoint.pt").read_bytes())
    name = bytes(content).rindex(b"/data/3")  # in the list of entries at the end of the file
    header = bytes(content).rindex(b"PK\x01\x02", 0, name)
    content[header + 38] ^= 0x10
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data/3 in it is not as it was written"):
        checkpointing.load(path)


def entry(content: Content, key: str) -> dict[str, Any]:
    """The first entry of the optimizer's state that has such a key."""
    found: dict[str, Any] = next(
        one for one in content["optimizer"]["state"].values() if key in one
    )
    return found


def put(*keys: Any, value: Any) -> Callable[[Content], None]:
    """A change that sets what is found under these keys."""

    def change(content: Content) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[Content], None]:
    """A change that removes what is found under these keys."""

    def change(content: Content) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def forget(key: str) -> Callable[[Content], None]:
    """A change that removes a key of an entry of the optimizer's state."""
    return lambda content: drop(key)(entry(content, key))


def spoil(key: str, value: float = math.nan) -> Callable[[Content], None]:
    """A change that puts a number into a tensor of the optimizer's state."""
    return lambda content: entry(content, key)[key].view(-1)[:1].fill_(value)


ROWS: list[tuple[str, str, Callable[[Content], None], str]] = [
    ("no step", "kfac", drop("step"), "it has no 'step'"),
    ("a textual step", "kfac", put("step", value="six"), "its step is 'six' instead of a whole"),
    ("a step of true", "kfac", put("step", value=True), "its step is True instead of a whole"),
    ("half a step", "kfac", put("step", value=1.5), "its step is 1.5 instead of a whole"),
    ("a negative step", "kfac", put("step", value=-3), "its step is -3 instead of a whole"),
    ("a huge step", "kfac", put("step", value=10**6), "its step is 1000000, and its run has only"),
    ("an endless step", "kfac", put("step", value=10**30), "instead of a whole number"),
    ("another step", "kfac", put("step", value=5), "its K-FAC state is of step 7, and its step"),
    ("a step of K-FAC that is none", "kfac", lambda c: put("kronfac.step", value=torch.ones(2))(
        entry(c, "kronfac.step")), "its K-FAC state is of step a tensor"),
    ("no steps", "kfac", put("steps", value=0), "its steps is 0 instead of a whole number from 1"),
    ("seconds of text", "kfac", put("seconds", value="x"), "its seconds is 'x' instead of"),
    ("seconds that are no number", "sgd", put("seconds", value=math.nan), "its seconds is nan"),
    ("no world", "sgd", drop("world"), "it has no 'world'"),
    ("no job", "sgd", put("job", value=None), "its job is None instead of the settings of a run"),
    ("a job of tensors", "sgd", put("job", "x", value=torch.ones(1)), "its job is a dict"),
    ("no curve", "kfac", drop("curve"), "it has no 'curve'"),
    ("a curve of text", "kfac", put("curve", value="up"), "its curve is 'up' instead of a list"),
    ("a short evaluation", "kfac", put("curve", value=[[1, 2.0]]), "its curve is"),
    ("a nameless evaluation", "kfac", put("curve", value=[["a", 0.0, 0.0, 0.0]]), "its curve is"),
    ("a curve of later", "sgd", put("curve", value=[[9, 1.0, 1.0, 0.1]]), "its curve goes on to"),
    ("no model", "sgd", put("model", value=None), "its model is None instead of tensors"),
    ("a model of numbers", "sgd", put("model", "9.bias", value=1.0), "its model is"),
    ("a model without a layer", "sgd", drop("model", "9.bias"), "does not fit this model"),
    ("a weight of NaN", "sgd", put("model", "9.bias", value=torch.full((10,), math.nan)),
     "model '9.bias' holds numbers that are not finite"),
    ("no optimizer", "kfac", put("optimizer", value=None), "its optimizer is None instead of"),
    ("an empty optimizer", "kfac", put("optimizer", value={}), "its optimizer is {} instead of"),
    ("groups of text", "sgd", put("optimizer", "param_groups", value="x"), "its optimizer is"),
    ("no groups", "sgd", put("optimizer", "param_groups", value=[]), "has 0 groups of parameters"),
    ("a group of nothing", "sgd", put("optimizer", "param_groups", 0, "params", value=[]),
     "has 0 parameters instead of 8"),
    ("an empty state of K-FAC", "kfac", put("optimizer", "state", value={}), "has no kronfac."),
    ("an empty state of SGD", "sgd", put("optimizer", "state", value={}), "no momentum_buffer of"),
    ("an empty state of AdamW", "adamw", put("optimizer", "state", value={}), "no step of param"),
    ("an empty state of Muon", "muon", put("optimizer", "members", 0, "state", value={}),
     "no momentum_buffer of parameter 0"),
    ("one optimizer of two", "muon", drop("optimizer", "members", 1), "of 1 optimizer(s)"),
    ("no half of a pair", "muon", put("optimizer", "members", 1, value=None), "its optimizer is"),
    ("an entry of text", "sgd", put("optimizer", "state", 0, value="x"), "its optimizer is"),
    ("no initial rate", "kfac", drop("optimizer", "param_groups", 0, "initial_lr"),
     "has no 'initial_lr'"),
    ("a rate of NaN", "sgd", put("optimizer", "param_groups", 0, "lr", value=math.nan),
     "lr of its optimizer is nan"),
    ("no names", "kfac", drop("optimizer", "param_groups", 0, "kronfac.names"),
     "has no 'kronfac.names'"),
    ("a factor of NaN", "kfac", spoil("kronfac.A.sum"), "kronfac.A.sum of parameter 0 holds numb"),
    ("an infinite factor", "kfac", spoil("kronfac.G.sum", math.inf), "kronfac.G.sum of parameter"),
    ("a solution of NaN", "kfac", spoil("kronfac.solution.A.vectors"), "not finite"),
    ("a buffer of NaN", "sgd", spoil("momentum_buffer"), "momentum_buffer of parameter 0 holds"),
    ("no schedule", "kfac", forget("kronfac.schedule"), "has no kronfac.schedule of parameter"),
    ("no step of K-FAC", "kfac", forget("kronfac.step"), "has no kronfac.step of parameter"),
    ("a textual schedule", "kfac", lambda c: put("kronfac.schedule", value="x")(
        entry(c, "kronfac.schedule")), "does not fit this model or optimizer"),
    ("a short schedule", "kfac", lambda c: put("kronfac.schedule", value=torch.zeros(2))(
        entry(c, "kronfac.schedule")), "does not fit this model or optimizer"),
    ("a factor of text", "kfac", lambda c: put("kronfac.A.sum", value="x")(
        entry(c, "kronfac.A.sum")), "does not fit this model or optimizer"),
    ("a buffer of another shape", "adamw", lambda c: put("exp_avg", value=torch.zeros(2))(
        entry(c, "exp_avg")), "exp_avg of parameter 0 is [2] instead of [4, 1, 3, 3]"),
    ("phases of text", "sgd", put("phases", value={"data": "x"}), "its phases is"),
    ("layers of text", "kfac", put("layers", value="x"), "its layers is 'x' instead of"),
    ("stats of text", "kfac", put("stats", value="x"), "its stats is 'x' instead of"),
    ("a count of text", "kfac", put("stats", "steps", value="x"), "its stats.steps is 'x' instead"),
    ("a count for a table", "kfac", put("stats", "bytes", value=3), "its stats.bytes is 3 instead"),
    ("mixup of text", "sgd", put("mixup", value="x"), "its mixup is 'x' instead of tensors"),
    ("no mixed batch", "mixed", put("mixup", value={}), "has no inputs of the last mixed batch"),
    ("half a mixed batch", "mixed", put("mixup", "targets", value=torch.ones(3, 10)),
     "targets of its last mixed batch are [3, 10], not of 32 samples"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_what_cannot_be_resumed_is_one_sentence(
    runs: Path,
    tmp_path: Path,
    name: str,
    change: Callable[[Content], None],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / name, folder)
    path = folder / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert main(["train", "--resume", str(folder), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kronfac: {path} ")
    assert words in said
    assert said.count("\n") == 1
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["kfac", "sgd", "adamw", "muon", "mixed"])
def test_a_whole_checkpoint_is_resumed(runs: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(runs / name, tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0


def test_sgd_without_momentum_has_no_state_to_miss(tmp_path: Path) -> None:
    recipe = small.recipe(optimizers__sgd={"lr": 0.1})
    train(recipe, "sgd", out=tmp_path / "run", listeners=[small.at_step(6, _interrupt)])
    assert torch.load(tmp_path / "run/checkpoint.pt")["optimizer"]["state"] == {}
    assert train(recipe, "sgd", resume=tmp_path / "run").step == 12


def test_a_checkpoint_that_may_not_be_read_is_no_damage(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zipfile.ZipFile.__init__", refuse)
    with pytest.raises(UserError, match=r"checkpoint\.pt cannot be read: Permission denied"):
        checkpointing.load(runs / "sgd" / "checkpoint.pt")
