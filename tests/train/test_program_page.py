"""docs/program.md: its commands are understood, its recipe is read, its Python runs."""

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from kronfac.cli import _parser
from kronfac.train.launch.ranks import Ranks
from kronfac.train.recipe.files import load
from kronfac.train.recipe.options import keys_of, method_keys
from kronfac.train.recipe.recipe import DataPart, Recipe, SchedulePart, TrainPart
from kronfac.train.run.setup import prepare

PAGE = (Path(__file__).parents[2] / "docs" / "program.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


COMMANDS = [
    line.removeprefix("kronfac ")
    for block in blocks("")
    for line in block.splitlines()
    if line.startswith("kronfac ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    _parser().parse_args(shlex.split(command, comments=True))


def test_the_run_that_is_shown_is_that_of_the_recipe() -> None:
    job = load("digits").job()
    setup = prepare(job, Ranks(), torch.device("cpu"), None)
    count = sum(p.numel() for p in setup.plain.parameters())
    train = job.train
    assert f"kfac, seed 0: {count:,} parameters, {setup.steps} steps of {train.batch} sa" in PAGE
    assert f"done: {setup.steps} steps in" in PAGE
    assert f"target {train.target:.2%} reached" in PAGE


def test_the_recipe_is_one() -> None:
    [text] = blocks("toml")
    recipe = Recipe.from_dict("page", tomllib.loads(text))
    assert recipe.job("sgd").train.epochs == 6
    assert recipe.job("sgd").schedule.shape == "cosine"


@pytest.mark.parametrize("part", [DataPart, TrainPart, SchedulePart])
def test_every_key_of_a_recipe_is_described(part: type) -> None:
    for field in dataclasses.fields(part):
        found = re.search(rf"`{field.name}`|^{field.name} = ", PAGE, flags=re.MULTILINE)
        assert found or field.name == "options", field.name


def test_every_key_of_kfac_that_only_recipes_have_is_described() -> None:
    for key in set(keys_of("kfac")) - set(method_keys("kfac")):
        assert re.search(rf"`{key}\b|^{key} = ", PAGE, flags=re.MULTILINE), key


def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [text] = blocks("python")
    exec(text, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("done 0.")
    assert len(lines) > 1
