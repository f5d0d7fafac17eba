"""A batch that changes during training: the run by hand, statistics, rates, ranks, resuming."""

import io
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronfac
from kronfac.runs.errors import UserError
from kronfac.runs.events import Recorder, read
from kronfac.train import data, models
from kronfac.train.data.batches import seeded
from kronfac.train.launch.ranks import Ranks
from kronfac.train.recipe.options import methods
from kronfac.train.run import progress
from kronfac.train.run.checkpointing import collect, restore
from kronfac.train.run.loop import Loop
from kronfac.train.run.run import train
from kronfac.train.run.setup import prepare
from tests.distributed.ranks import run
from tests.oracles import kfac_factors
from tests.train import small
from tests.train.small import Events, at_step
from tests.training import counts, factors

#: 128 samples: 5 steps of 12, then the 68 that are left, an epoch of 24 and one of 48.
SIZES = [[0, 12], [0.5, 24], [2, 48]]
#: What that is, by hand: epoch, first sample and batch of each step.
STEPS = [(0, 12 * i, 12) for i in range(5)] + [(0, 60, 24), (0, 84, 24)]
STEPS += [(1, 24 * i, 24) for i in range(5)] + [(2, 0, 48), (2, 48, 48)]
#: BatchNorm and augmentation aside.
PLAIN: dict[str, Any] = {"model": {"name": "mlp", "hidden": [16]}, "data__augment": []}
CHANGING: dict[str, Any] = {"train": {"batch": SIZES, "epochs": 3.0, "log_every": 1}}


def batch_of(source: Any, number: int) -> tuple[Tensor, Tensor]:
    """The batch of a step by hand, with seed 0."""
    epoch, first, size = STEPS[number]
    order = torch.randperm(128, generator=seeded(0, 0, epoch))
    inputs, targets = source.train_batch(order[first : first + size])
    return inputs, targets


def network(source: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.build(
        "mlp", num_classes=10, sample_shape=source.sample_shape, hidden=PLAIN["model"]["hidden"]
    )


# --- the run -------------------------------------------------------------------------------------


def test_a_run_is_the_plain_loop_over_these_batches(tmp_path: Path) -> None:
    """To the bit, with a learning rate that follows the batch."""
    rule = {"schedule": {"shape": "constant", "batch_scaling": "linear"}}
    own = {"lr": 0.01, "damping": 0.1, "factor_every": 2, "refresh_every": 3}
    recipe = small.recipe(**PLAIN, **CHANGING, **rule, optimizers={"kfac": own})
    assert train(recipe, out=tmp_path / "run").step == len(STEPS)
    source = data.load("digits", train=128, test=64)
    model = network(source)
    options = {key: own[key] for key in own if key != "lr"}
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    for number, (_, _, size) in enumerate(STEPS):
        inputs, targets = batch_of(source, number)
        optimizer.param_groups[0]["lr"] = 0.01 * (size / 12)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert small.same(small.weights(tmp_path / "run"), model.state_dict())


def rows(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs with a column of ones and gradients of the outputs of each linear layer, [N, 1, ...]."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def keep(module: Any, args: Any, output: Tensor, name: str = name) -> None:
                seen[name] = args[0].detach(), output

            handles.append(layer.register_forward_hook(keep))
    loss = F.cross_entropy(model(inputs), targets)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(loss, [output for _, output in seen.values()])
    return {
        name: (torch.cat([a, torch.ones(len(a), 1)], dim=1)[:, None], g[:, None])
        for (name, (a, _)), g in zip(seen.items(), gradients, strict=True)
    }


def test_statistics_follow_the_batch() -> None:
    """Every sample counts alike, and G has the N of its own batch: weights stand still, decay = 1."""
    recipe = small.recipe(
        **PLAIN, **CHANGING, optimizers={"kfac": {"lr": 0.0, "decay": 1.0, "factor_every": 1}}
    )
    setup = prepare(recipe.job(), Ranks(), torch.device("cpu"), None)
    Loop(setup, Recorder(()), signal=lambda: 0).run()
    optimizer: Any = setup.optimizer
    model, sums = network(setup.source), dict[str, tuple[Tensor, Tensor]]()
    for number, (_, _, size) in enumerate(STEPS):
        for name, (a, g) in rows(model, *batch_of(setup.source, number)).items():
            A, G = kfac_factors(a, g)
            before = sums.get(name, (torch.zeros_like(A), torch.zeros_like(G)))
            sums[name] = before[0] + size * A, before[1] + size * G
    total = sum(size for _, _, size in STEPS)
    assert set(counts(optimizer, "G").values()) == {float(total)}
    for name, (A, G) in sums.items():
        torch.testing.assert_close(factors(optimizer, "A")[name], A / total)
        torch.testing.assert_close(factors(optimizer, "G")[name], G / total)


def test_everything_that_counts_epochs_follows() -> None:
    events = Events()
    recipe = small.recipe(
        **{**CHANGING, "train.evaluate_every": 0.5},
        optimizers__kfac__damping={"start": 0.1, "factor": 0.5, "epochs": [0.5, 1, 2]},
        schedule={"shape": "steps", "milestones": [1, 2], "gamma": 0.5, "warmup": 0.5},
    )
    train(recipe, listeners=[events])
    [start] = events.of("start")
    assert (start["steps"], start["epochs"], start["train_samples"]) == (14, 3.0, 128)
    steps = events.of("step")
    assert [one["batch"] for one in steps] == [size for _, _, size in STEPS]
    epochs = [0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3]
    assert [one["epoch"] for one in steps] == pytest.approx(epochs)
    rates = [0.1, 0.3, 0.5, 0.7, 0.9, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert [one["lr"] for one in steps] == pytest.approx([0.05 * rate for rate in rates])
    dampings = [0.1] * 4 + [0.05] * 2 + [0.025] * 5 + [0.0125] * 3  # of the step that follows
    assert [one["damping"] for one in steps] == pytest.approx(dampings)
    assert [one["step"] for one in events.of("eval")] == [5, 7, 10, 12, 13, 14]


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("linear", 1.0), ("sqrt", 0.5)])
def test_the_learning_rate_follows_by_a_rule(rule: str, power: float) -> None:
    """Momentum that is tied to it does not: it would leave [0, 1)."""
    events = Events()
    shape = {"shape": "linear", "tied_momentum": True, "batch_scaling": rule}
    train(small.recipe(**CHANGING, schedule=shape), listeners=[events])
    for event, (_, _, size) in zip(events.of("step"), STEPS, strict=True):
        share = event["momentum"] / 0.9
        assert 0 < share < 1
        assert event["lr"] == pytest.approx(0.05 * share * (size / 12) ** power)


def test_without_a_rule_the_learning_rate_stays() -> None:
    assert small.recipe().schedule.batch_scaling == "none"


# --- resuming ------------------------------------------------------------------------------------

_ALL = {"train.mixup": 0.4, "schedule.tied_momentum": True, "schedule.batch_scaling": "sqrt"}


def loop_of(stop_after: int = 100) -> Loop:
    job = small.recipe(**CHANGING, **_ALL).job()
    setup = prepare(job, Ranks(), torch.device("cpu"), None)
    loop = Loop(setup, Recorder(()), signal=lambda: 15 if loop.step >= stop_after else 0)
    return loop


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    loop = loop_of()
    loop.run()
    return loop.setup.plain.state_dict()


@pytest.mark.parametrize("step", [3, 5, 12])
def test_a_run_resumes_bit_for_bit_across_changes(
    step: int, whole: dict[str, Tensor], tmp_path: Path
) -> None:
    """In an epoch, and where the batch changes; with augmentation, mixup and BatchNorm."""
    first, second = loop_of(step), loop_of()
    assert first.run().step == step
    restore(second, collect(first), tmp_path)
    assert second.run().step == 14
    assert small.same(second.setup.plain.state_dict(), whole)


def test_a_folder_resumes_bit_for_bit(whole: dict[str, Tensor], tmp_path: Path) -> None:
    recipe, out = small.recipe(**CHANGING, **_ALL), tmp_path / "run"
    stop = at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(recipe, out=out, listeners=[stop]).step == 5
    assert train(recipe, resume=out).step == 14
    assert small.same(small.weights(out), whole)


def test_another_schedule_is_not_resumed(tmp_path: Path) -> None:
    train(small.recipe(**CHANGING), "sgd", out=tmp_path / "run")
    other = {"train.batch": [[0, 12], [0.5, 24], [2, 64]]}
    with pytest.raises(
        UserError, match=r"its train.batch is \[\[0.0, 12\], \[0.5, 24\], \[2.0, 48"
    ):
        train(small.recipe(**{**CHANGING, **other}), "sgd", resume=tmp_path / "run")
    with pytest.raises(UserError, match="belongs to a run of 14 steps, and this one has 16"):
        train(small.recipe(**{**CHANGING, "train.epochs": 4.0}), "sgd", resume=tmp_path / "run")
    same = small.recipe(**{**CHANGING, "train.steps": 14})
    assert train(same, "sgd", resume=tmp_path / "run").was_finished


# --- ranks ---------------------------------------------------------------------------------------


def run_whole(rank: int, out: str, optimizer: str, changes: dict[str, Any]) -> float | None:
    return train(small.recipe(**changes), optimizer, out=out).loss


def assert_close(first: Path, second: Path, names: str = "") -> None:
    one, other = small.weights(first), small.weights(second)
    for name in one:
        if re.search(names, name):
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "kfac"])
def test_the_same_batches_on_more_ranks_are_the_same_run(
    tmp_path: Path, world: int, optimizer: str
) -> None:
    changes = {**PLAIN, **CHANGING, **_ALL, "data__augment": ["crop:1"]}
    run_whole(0, str(tmp_path / "one"), optimizer, changes)
    losses = run(world, run_whole, str(tmp_path / "more"), optimizer, changes)
    assert len(set(losses)) == 1
    assert_close(tmp_path / "one", tmp_path / "more")
    one, more = (read(tmp_path / name / "events.jsonl") for name in ("one", "more"))
    assert [e.get("batch") for e in one] == [e.get("batch") for e in more]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_micro_batches_of_one_size_are_the_same_run_on_any_ranks(
    tmp_path: Path, world: int
) -> None:
    """Even BatchNorm, which sees a micro-batch, does not see how many ranks there are."""
    changes = {**CHANGING, "train.micro_batch_size": 2}
    run_whole(0, str(tmp_path / "one"), "kfac", changes)
    run(world, run_whole, str(tmp_path / "more"), "kfac", changes)
    assert_close(tmp_path / "one", tmp_path / "more", names="weight|bias")


@pytest.mark.parametrize(("size", "parts"), [(None, 1), (4, 3), (5, 3), (12, 1), (100, 1)])
def test_a_share_is_cut_into_micro_batches_of_at_most_a_size(size: int | None, parts: int) -> None:
    assert small.recipe(**{"train.micro_batch_size": size}).train.num_parts(12) == parts


# --- methods -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_takes_batches_of_all_sizes(tmp_path: Path, method: str) -> None:
    recipe = small.recipe(**PLAIN, **CHANGING)
    whole = train(recipe, method, out=tmp_path / "whole")
    assert (whole.status, whole.step) == ("done", 14)
    stop = at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    train(recipe, method, out=tmp_path / "part", listeners=[stop])
    train(recipe, method, resume=tmp_path / "part")
    assert small.same(small.weights(tmp_path / "whole"), small.weights(tmp_path / "part"))


@pytest.mark.slow
def test_a_compiled_model_takes_batches_of_all_sizes() -> None:
    for optimizer in ("sgd", "kfac"):
        plain = train(small.recipe(**CHANGING), optimizer)
        compiled = train(small.recipe(**CHANGING, **{"train.compile": True}), optimizer)
        assert compiled.loss == pytest.approx(plain.loss, rel=1e-3)


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.batch=[]"], "it must begin at epoch 0"),
        (["train.batch=[[0, 12], [2, 0]]"], "batch 0 must be from 1 to"),
        (["train.batch=[[0, 12], [2, 24], [1, 48]]"], "epoch 1 must come after epoch 2"),
        (["train.batch=[[0, 12], [2]]"], r"\[2\] must have 2 members: a number, a whole number"),
        (["train.batch=[0, 12]"], "train.batch = 0 must be a list"),
        (["train.batch=[[0, 12.5]]"], "train.batch = 12.5 must be a whole number"),
        (["train.batch=[['one', 12]]"], "train.batch = 'one' must be a number"),
        (["schedule.batch_scaling=linaer"], "did you mean 'linear'"),
        (["train.micro_batch_size=0"], "train.micro_batch_size = 0 must be at least 1"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(changes: list[str], words: str) -> None:
    from kronfac.train.recipe.files import change

    with pytest.raises(UserError, match=words):
        change(small.recipe(), changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.batch": [[0, 12], [1, 129]]}, "train.batch = 129 does not fit: digits has 128"),
        (
            {"train.batch": [[0, 12], [1, 15]], "train.micro_batches": 2},
            "15 cannot be divided over",
        ),
        (
            {"train.batch": 14, "train.micro_batch_size": 3},
            "14 cannot be divided over 1 rank.* 5 m",
        ),
        ({"train.batch": [[0, 12], [0.01, 24], [0.02, 48]]}, "24 from epoch 0.01 on has no step"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(small.recipe(**changes), "sgd")


def test_every_batch_is_divided_over_ranks() -> None:
    with pytest.raises(UserError, match=r"train\.batch = 9 cannot be shared by 2 ranks"):
        data.Batches(data.load("digits"), ((0.0, 8), (1.0, 9)), seed=0, world=2)


def test_numbers_of_micro_batches_and_their_size_exclude_each_other() -> None:
    numbered = small.recipe(**{"train.micro_batches": 2})
    assert numbered.train.micro_batches == 2
    with pytest.raises(UserError, match="both 'micro_batches' and 'micro_batch_size'"):
        small.recipe(train={"batch": 8, "steps": 1, "micro_batches": 2, "micro_batch_size": 2})


def test_a_schedule_survives_its_file(tmp_path: Path) -> None:
    from kronfac.train.recipe.files import load

    path = small.write(tmp_path / "some.toml", **CHANGING)
    assert load(str(path)).train == small.recipe(**CHANGING).train


# --- what people see -----------------------------------------------------------------------------


def test_lines_name_the_batch_where_it_changes() -> None:
    stream = io.StringIO()
    train(small.recipe(**CHANGING), "sgd", listeners=[progress.make(stream)])
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("14 steps of 12, 24, 48 samples")
    assert [line.split("  ")[:3] for line in lines[1:-1]] == [
        ["step 7/14", "epoch 1.00/3.00", "batch 24"],
        ["step 12/14", "epoch 2.00/3.00", "batch 24"],
        ["step 14/14", "epoch 3.00/3.00", "batch 48"],
    ]


def event(step: int, **fields: Any) -> dict[str, Any]:
    return {"event": "step", "step": step, "loss": 1.0, "phases": {}, **fields}


def screen(batch: Any, steps: int, samples: int = 1_281_167) -> progress.Lines:
    show = progress.Lines(io.StringIO())
    show.start = {"recipe": "big", "optimizer": "kfac", "seed": 0, "parameters": 1, "world": 1}
    show.start |= {"steps": steps, "batch": batch, "train_samples": samples, "resumed": None}
    show.start |= {"epochs": 55.0, "metric": "accuracy"}
    return show


def test_what_is_left_counts_the_batches_to_come() -> None:
    show = screen([[0, 10], [1, 50]], steps=14, samples=100)
    show(event(8, epoch=0.8, samples_per_second=10.0))
    assert math.isclose(show._times.samples(14) - show._times.samples(8), 20 + 200)
    assert "0:22 left" in show.speed()


def test_many_sizes_are_not_all_named() -> None:
    sizes = [[i, 1000 * 2**i] for i in range(6)]
    assert screen(sizes, steps=10**5)._title().endswith("of 1,000, 2,000, ..., 32,000 samples")
    assert screen(sizes[:4], 10**5)._title().endswith("of 1,000, 2,000, 4,000, 8,000 samples")


def test_a_line_that_is_too_long_leaves_out_the_number_of_epochs() -> None:
    show = progress.Screen(io.StringIO())
    show.start = screen([[0, 256], [1, 32768]], steps=120_000).start
    show.tested = {"step": 100_000, "epoch": 40.0, "accuracy": 0.75}
    show.step = event(100_000, epoch=40.0, samples_per_second=1000.0)
    assert len(show.where()) == 79
    assert show._first(79) == show.where()
    line = show._first(78)
    assert line == "step 100,000/120,000  epoch 40.00  batch 32,768  loss 1.0000  test 75.00%"
