"""Shipped recipes have the settings that tuning chose, and benchmarks measured."""

import json
import sys
from pathlib import Path

import pytest

from kronfac.train.recipe import files as recipe_files

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted((BENCHMARKS / "results" / "tuning").glob("*.json"))


@pytest.fixture
def tasks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _tasks

    yield _tasks.TASKS
    del sys.modules["_tasks"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_has_what_tuning_chose(file, tasks):
    content = json.loads(file.read_text())
    task, name, chosen = tasks[content["task"]], content["optimizer"], content["chosen"]
    recipe = recipe_files.load(task.name)
    options = recipe.optimizers[name].options
    assert recipe.job(name).train.steps == chosen["steps"]
    for key, value in task.changes(name, chosen["lr"]):
        assert options[key] == pytest.approx(value)
    target = recipe.train.target if recipe.train.target is not None else recipe.train.target_loss
    assert content["target"] == target


def test_every_optimizer_was_tuned_in_the_same_space():
    spaces = {}
    for file in FILES:
        content = json.loads(file.read_text())
        spaces.setdefault(content["task"], set()).add(
            (len(content["rates"]), tuple(content["lengths"]), content["margin"])
        )
    assert spaces
    assert all(len(found) == 1 for found in spaces.values())
