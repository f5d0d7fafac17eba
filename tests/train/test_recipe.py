"""Recipes: what is accepted, what is refused, and in which words."""

import copy
from pathlib import Path
from typing import Any

import pytest

from kronfac.runs.errors import UserError
from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.recipe import Recipe
from tests.train import small

OWN = [name for name in recipe_files.shipped() if not name.startswith("papers/")]


def test_every_shipped_recipe_has_every_kind_of_optimizer() -> None:
    assert set(OWN) >= {
        *("digits", "fashion-mnist", "mnist", "cifar10", "text", "vit-cifar10"),
        "imagefolder-resnet18",
    }
    for name in OWN:
        recipe = recipe_files.load(name)
        assert set(recipe.optimizers) >= {"sgd", "adamw", "muon", "soap", "kfac"}, name
        assert recipe.optimizer == "kfac"
        assert recipe.description


@pytest.mark.parametrize("name", recipe_files.shipped())
def test_a_recipe_survives_its_own_dictionary(name: str) -> None:
    recipe = recipe_files.load(name)
    assert Recipe.from_dict(recipe.name, recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.epoch", 3, "unknown key 'epoch' in \\[train\\]; did you mean 'epochs'"),
        ("modle.name", "mlp", "unknown key 'modle' in recipe 'small'; did you mean 'model'"),
        ("schedule.warm", 1, "unknown key 'warm' in \\[schedule\\]; did you mean 'warmup'"),
        ("optimizers.kfac.dampin", 1, "unknown key 'dampin'.*did you mean 'damping'"),
        ("optimizers.sgd.damping", 1, "unknown key 'damping' in \\[optimizers.sgd\\]"),
        ("optimizers.kfca.lr", 1, "unknown kind 'kfca'.*did you mean 'kfac'"),
        ("optimizers.kfac.base", "rmsprop", "optimizers.kfac.base = 'rmsprop'"),
        ("optimizers.kfac.betas", [0.9, 0.99], "an option of base 'adamw', not of 'sgd'"),
        ("optimizers.kfac.other", "adam", "optimizers.kfac.other = 'adam'.*did you mean 'adamw'"),
        ("optimizers.kfac.other_betas", [0.9, 0.99], "needs optimizers.kfac.other = 'adamw'"),
        ("optimizers.kfac.weight_decay", "x", "weight_decay = 'x' must be a number"),
        ("optimizers.adamw.betas", [0.9], "betas = \\[0.9\\] must be two numbers"),
        ("optimizers.muon.ns_steps", "x", "ns_steps = 'x' must be a whole number"),
        ("optimizers.sgd.weight_decay", True, "weight_decay = True must be a number"),
        ("optimizers.sgd.nesterov", 1, "nesterov = 1 must be true or false"),
        ("optimizers.kfac.lr", "fast", "optimizers.kfac.lr = 'fast' must be a number"),
        ("optimizers.kfac.train.bacth", 3, "unknown key 'bacth'.*did you mean 'batch'"),
        ("optimizer", "adam", "no optimizer 'adam'; did you mean 'adamw'"),
        ("train.batch", 0, "train.batch = 0 must be at least 1"),
        ("train.batch", "all", "train.batch = 'all' must be a whole number"),
        ("train.batch", 1.5, "train.batch = 1.5 must be a whole number"),
        ("train.compile", 1, "train.compile = 1 must be true or false"),
        ("train.target", 70, "train.target = 70.0 must be an accuracy"),
        ("train.seed", 2**32, "train.seed = 4294967296 must be at most 4294967295"),
        ("schedule.warmup_share", 1.0, "schedule.warmup_share = 1.0 must be in"),
        ("schedule.warmup", -1, "schedule.warmup = -1.0 must be 0 epochs or more"),
        ("data.holdout", 0, "data.holdout = 0 must be at least 1"),
        ("train.label_smoothing", 1.0, "train.label_smoothing = 1.0"),
        ("train.precision", "half", "train.precision = 'half' is not supported"),
        ("train.evaluate_every", 0.0, "train.evaluate_every = 0.0 must be a positive number"),
        ("data.train", 0, "data.train = 0 must be at least 1"),
        ("data.augment", "flip", "data.augment = 'flip' must be a list"),
        ("train", 3, "'train' of recipe 'small' is 3; it must be a table"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        small.recipe(**{key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("part", "wrong"), [("train", "epoch"), ("schedule", "warm")])
def test_a_key_is_looked_for_where_it_was_set(part: str, wrong: str) -> None:
    """Also if an optimizer has changes of its own in that part."""
    changes = {f"optimizers.sgd.{part}": {"seed": 1} if part == "train" else {"shape": "linear"}}
    with pytest.raises(UserError, match=rf"unknown key '{wrong}' in \[{part}\]"):
        small.recipe(**changes, **{f"{part}.{wrong}": 3})


def test_momentum_of_the_rest_is_no_option_of_adamw() -> None:
    options = {"optimizers.kfac.other_momentum": 0.9, "optimizers.kfac.other": "adamw"}
    with pytest.raises(UserError, match="other_momentum is an option of SGD"):
        small.recipe(**options)


@pytest.mark.parametrize("missing", ["model", "data", "train", "optimizers"])
def test_a_part_that_is_missing_is_named(missing: str) -> None:
    content = copy.deepcopy(small.CONTENT)
    del content[missing]
    with pytest.raises(UserError):
        Recipe.from_dict("small", content)


def test_an_optimizer_may_change_length_and_schedule_for_itself() -> None:
    recipe = small.recipe(
        **{
            "optimizers.sgd.epochs": 3,
            "optimizers.sgd.train.batch": 16,
            "optimizers.sgd.schedule.shape": "linear",
        }
    )
    sgd, kfac = recipe.job("sgd"), recipe.job()
    assert (sgd.train.epochs, sgd.train.steps, sgd.train.batch) == (3.0, None, 16)
    assert sgd.schedule.shape == "linear"
    assert (kfac.train.epochs, kfac.train.steps, kfac.train.batch) == (None, 12, 32)
    assert kfac.schedule.shape == "cosine"


def test_a_table_may_have_a_name_of_its_own() -> None:
    content = copy.deepcopy(small.CONTENT)
    content["optimizers"]["fast"] = {"kind": "sgd", "lr": 1.0}
    assert Recipe.from_dict("small", content).job("fast").optimizer.kind == "sgd"


def test_the_command_line_wins_over_an_optimizers_own_table() -> None:
    recipe = small.recipe(**{"optimizers.kfac.train.epochs": 9})
    assert recipe.job().train.epochs == 9
    changed = recipe_files.change(recipe, ["train.epochs=2"])
    assert changed.job().train.epochs == 2


def test_epochs_and_steps_replace_each_other() -> None:
    job = recipe_files.change(small.recipe(), ["train.epochs=2"]).job()
    assert (job.train.epochs, job.train.steps) == (2.0, None)


@pytest.mark.parametrize("first", ["optimizers.kfac.steps", "optimizers.kfac.train.steps"])
@pytest.mark.parametrize("then", ["optimizers.kfac.epochs", "optimizers.kfac.train.epochs"])
def test_they_do_so_in_the_table_of_an_optimizer(first: str, then: str) -> None:
    job = recipe_files.change(small.recipe(**{first: 5}), {then: 2}).job()
    assert (job.train.epochs, job.train.steps) == (2.0, None)


@pytest.mark.parametrize("table", ["schedule", "optimizers.kfac.schedule"])
def test_both_ways_to_say_a_warm_up_replace_each_other(table: str) -> None:
    shared = small.recipe(**{f"{table}.warmup_share": 0.1})
    assert (shared.job().schedule.warmup, shared.job().schedule.warmup_share) == (0.0, 0.1)
    part = recipe_files.change(shared, {f"{table}.warmup": 0.5}).job().schedule
    assert (part.warmup, part.warmup_share) == (0.5, 0.0)


def test_both_kinds_of_targets_replace_each_other() -> None:
    job = recipe_files.change(small.recipe(train__target=0.9), ["train.target_loss=0.5"]).job()
    assert (job.train.target, job.train.target_loss) == (None, 0.5)


@pytest.mark.parametrize(
    ("first", "words"),
    [("train", "\\[train\\] has both 'target'"), ("schedule", "\\[schedule\\] has both 'warmup'")],
)
def test_a_file_may_not_say_both(first: str, words: str) -> None:
    content = copy.deepcopy(small.CONTENT)
    content["train"] |= {"target": 0.9, "target_loss": 0.5} if first == "train" else {}
    content["schedule"] |= {"warmup_share": 0.1} if first == "schedule" else {}
    with pytest.raises(UserError, match=words):
        Recipe.from_dict("small", content)


@pytest.mark.parametrize("key", ["optimizers", "optimizers.kfac", "optimizers.kfac.train"])
def test_a_value_in_the_place_of_a_table_is_refused_whatever_follows(key: str) -> None:
    with pytest.raises(UserError, match="must be a table"):
        recipe_files.change(small.recipe(), [f"{key}=3", "train.log_every=5"])


@pytest.mark.parametrize("name_first", [True, False])
def test_another_model_or_data_set_starts_its_table_anew(name_first: bool) -> None:
    changes = ["model.name=mlp", "model.hidden=[8]", "data.name=mnist", "data.test=9"]
    changed = recipe_files.change(small.recipe(), changes if name_first else changes[::-1])
    assert changed.to_dict()["model"] == {"name": "mlp", "hidden": [8]}
    assert changed.to_dict()["data"] == {"name": "mnist", "test": 9}


def test_the_same_name_changes_nothing() -> None:
    names = ["model.name=cnn", "data.name=digits"]
    assert recipe_files.change(small.recipe(), names) == small.recipe()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 0.5", 0.5),
        ("a.b=true", True),
        ("a.b=linear", "linear"),
        ('a.b="linear"', "linear"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=2026-11-16", "2026-11-16"),
        (
            "a.b={ start = 1, factor = 0.5, epochs = [1] }",
            {"start": 1, "factor": 0.5, "epochs": [1]},
        ),
    ],
)
def test_values_of_changes_are_toml_or_plain_words(text: str, value: Any) -> None:
    assert recipe_files.parse(text) == ("a.b", value)


@pytest.mark.parametrize("text", ["train.epochs", "=3", "train.epochs=", ""])
def test_a_change_needs_key_and_value(text: str) -> None:
    with pytest.raises(UserError, match="must look like key=value"):
        recipe_files.parse(text)


def test_a_value_is_no_table() -> None:
    with pytest.raises(UserError, match="'batch' is a value"):
        recipe_files.change(small.recipe(), ["train.batch.size=3"])


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    path = small.write(tmp_path / "mine.toml")
    assert recipe_files.load(str(path)).name == "mine"
    assert recipe_files.load(str(path)).job().to_dict()["model"]["width"] == 4
    with pytest.raises(UserError, match="unknown recipe 'cifar'; did you mean 'cifar10'"):
        recipe_files.load("cifar")
    with pytest.raises(UserError, match="`kronfac recipes` lists"):
        recipe_files.load("nonsense")
    with pytest.raises(UserError, match="there is no recipe file"):
        recipe_files.load(str(tmp_path / "other.toml"))


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    for content in (b"[train\n", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="no valid TOML"):
            recipe_files.load(str(path))
