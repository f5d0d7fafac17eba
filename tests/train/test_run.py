"""A run in one process: its result, its folder, its events, and how it goes on."""

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kronfac.runs import disk
from kronfac.runs.errors import UserError
from kronfac.runs.events import read
from kronfac.train import models
from kronfac.train.recipe.files import change
from kronfac.train.run.run import train
from tests.train import small
from tests.train.small import Events, at_step


def interrupt(number: int = signal.SIGTERM) -> Any:
    return lambda: os.kill(os.getpid(), number)


# --- the result ----------------------------------------------------------------------------------


def test_a_run_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(small.recipe())
    assert (result.status, result.step, result.folder) == ("done", 12, None)
    assert [point.step for point in result.curve] == [4, 8, 12]
    assert result.accuracy == result.curve[-1].accuracy
    assert list(tmp_path.iterdir()) == []


def test_random_numbers_of_others_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(small.recipe())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "kfac"])
def test_the_loss_falls(optimizer: str) -> None:
    events = Events()
    train(small.recipe(train__steps=24), optimizer, listeners=[events])
    losses = [event["loss"] for event in events.of("step")]
    assert losses[-1] < losses[0]


def test_seeds_make_a_difference_and_equal_seeds_none() -> None:
    losses = [train(small.recipe(), "sgd", seed).loss for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_micro_batches_change_nothing_for_a_model_without_batch_norm(
    optimizer: str, micro: int
) -> None:
    recipe = small.recipe(
        model={"name": "mlp", "hidden": [16]}, train__micro_batches=micro, train__steps=4
    )
    one = train(small.recipe(model={"name": "mlp", "hidden": [16]}, train__steps=4), optimizer)
    assert train(recipe, optimizer).loss == pytest.approx(one.loss, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__precision": "bfloat16"},
        {"train__channels_last": True},
        {"train__clip": 0.01},
        {"train__label_smoothing": 0.1, "train__mixup": 0.4},
        {"train__weight_rescaling": True, "schedule__tied_momentum": True},
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_options_of_training_work(optimizer: str, changes: dict[str, Any]) -> None:
    plain = train(small.recipe(train__steps=4), optimizer)
    changed = train(small.recipe(train__steps=4, **changes), optimizer)
    assert changed.status == "done"
    if "train__channels_last" not in changes:
        assert changed.loss != plain.loss


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__mixup": 0.4},
        {"train__micro_batches": 2},
        {"train__precision": "bfloat16"},
        {"optimizers__kfac__other": "adamw", "optimizers__kfac__nesterov": False},
    ],
)
@pytest.mark.parametrize("fisher", ["mc", "exact", "forward"])
def test_every_fisher_trains(fisher: str, changes: dict[str, Any]) -> None:
    plain = train(small.recipe(train__steps=4, **changes), "kfac")
    changes = {"optimizers__kfac__fisher": fisher, **changes}
    changed = train(small.recipe(train__steps=4, **changes), "kfac")
    assert changed.status == "done"
    assert changed.stats["factor_updates"] == plain.stats["factor_updates"] > 0
    assert changed.loss != plain.loss


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_numbers() -> None:
    """For one optimizer after the other, in one process."""
    for optimizer in ("sgd", "kfac"):
        plain = train(small.recipe(train__steps=6), optimizer)
        compiled = train(small.recipe(train__steps=6, train__compile=True), optimizer)
        assert compiled.loss == pytest.approx(plain.loss, rel=1e-3)


def test_text_is_measured_by_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(64)) * 100)
    recipe = small.recipe(
        model={"name": "gpt", "dim": 16, "depth": 1, "heads": 2},
        data={"name": "text", "path": str(path), "length": 16},
        train={"batch": 16, "steps": 6, "target_loss": 100.0},
        schedule={"shape": "constant"},
    )
    result = train(recipe, "kfac")
    assert train(change(recipe, {"optimizers.kfac.fisher": "mc"}), "kfac").loss != result.loss
    assert result.accuracy is not None
    assert result.loss is not None
    assert result.target is not None


@pytest.mark.parametrize("holdout", [None, 16])
def test_the_text_is_known_by_its_checksum(tmp_path: Path, holdout: int | None) -> None:
    content = bytes(range(64)) * 100
    (tmp_path / "text").write_bytes(content)
    recipe = small.recipe(
        model={"name": "gpt", "dim": 16, "depth": 1, "heads": 2},
        data={"name": "text", "path": str(tmp_path / "text"), "length": 16, "size": 6000},
        train={"batch": 16, "steps": 1},
        schedule={"shape": "constant"},
        **({} if holdout is None else {"data.holdout": holdout}),
    )
    train(recipe, "sgd", out=tmp_path / "run")
    around = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert around["data_sha256"] == hashlib.sha256(content[:6000]).hexdigest()


def test_a_target_is_recorded_and_may_end_the_run() -> None:
    events = Events()
    recipe = small.recipe(train__target=0.01)
    whole = train(recipe, "sgd", listeners=[events])
    assert whole.target is not None
    assert (whole.step, whole.target.step) == (12, 4)
    assert [one["step"] for one in events.of("target")] == [4]
    assert train(recipe, "sgd", stop_at_target=True).step == 4


def test_seconds_are_those_of_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only evaluations move shows no time at all."""
    from kronfac.train.run import clock, loop

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    real = loop.evaluate

    def slow(*args: Any) -> Any:
        now[0] += 1000.0
        return real(*args)

    monkeypatch.setattr(loop, "evaluate", slow)
    result = train(small.recipe(), "sgd")
    assert now[0] == 3000.0
    assert result.seconds == 0.0


# --- events and folder ---------------------------------------------------------------------------


def test_the_folder_holds_everything(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    result = train(small.recipe(), out=out)
    assert result.folder == out
    names = {"config.json", "environment.json", "events.jsonl", "checkpoint.pt", "summary.txt"}
    assert {path.name for path in out.iterdir()} == names
    config = json.loads((out / "config.json").read_text())
    assert (config["recipe"], config["optimizer"], config["seed"]) == ("small", "kfac", 0)
    assert config["settings"]["optimizer"]["lr"] == 0.05
    assert json.loads((out / "environment.json").read_text())["torch"] == torch.__version__
    assert "KFAC over SGD" in (out / "summary.txt").read_text()


def test_events_tell_the_whole_story(tmp_path: Path) -> None:
    train(small.recipe(train__target=0.01), out=tmp_path / "run")
    events = read(tmp_path / "run" / "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-2:] == ["layers", "finish"]
    start, step = events[0], next(event for event in events if event["event"] == "step")
    assert (start["steps"], start["epochs"], start["batch"]) == (12, 3.0, 32)
    assert (start["kind"], start["metric"], start["resumed"]) == ("kfac", "accuracy", None)
    fields = {"step", "epoch", "loss", "lr", "seconds", "samples_per_second", "memory", "phases"}
    assert fields | {"batch", "damping", "kl_clip", "momentum"} <= set(step)
    phases = {"data", "forward_backward", "optimizer", "observe", "refresh", "precondition"}
    assert phases <= set(step["phases"])
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 3, 6, 9, 12]
    assert [e["step"] for e in events if e["event"] == "eval"] == [4, 8, 12]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [4, 8, 12]
    assert (events[-1]["status"], events[-1]["stats"]["steps"]) == ("done", 12)


def test_a_target_may_be_a_loss(tmp_path: Path) -> None:
    events = Events()
    result = train(small.recipe(train__target_loss=100.0), listeners=[events])
    assert result.target is not None
    assert result.accuracy is not None
    [start] = events.of("start")
    assert (start["metric"], start["target"], start["samples"]) == ("loss", 100.0, "image")


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        ({}, {"train__target": 0.5}, r"train.target = 0.5 is an accuracy.*train.target_loss"),
        ({}, {"train__mixup": 0.5}, r"train.mixup = 0.5 mixes images"),
        ({"augment": ["flip"]}, {}, r"data.augment = \['flip'\] changes images"),
    ],
)
def test_what_is_for_images_is_refused_for_text(
    tmp_path: Path, more: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "text").write_text("to be or not to be " * 20)
    data = {"name": "text", "path": str(tmp_path / "text"), "length": 8}
    recipe = small.recipe(data={**data, **more}, model={"name": "gpt"}, **changes)
    with pytest.raises(UserError, match=words):
        train(recipe)


def test_a_warm_up_may_be_a_share_of_the_run() -> None:
    events = Events()
    recipe = small.recipe(schedule={"shape": "constant", "warmup_share": 0.5}, train__log_every=1)
    train(recipe, "sgd", listeners=[events])
    rates = [event["lr"] / 0.1 for event in events.of("step")]
    assert rates == pytest.approx([min(1.0, (step + 0.5) / 6) for step in range(12)])


def test_layers_are_listed_with_what_they_cost(tmp_path: Path) -> None:
    events = Events()
    train(small.recipe(), listeners=[events])
    [found] = events.of("layers")
    names = [layer["name"] for layer in found["layers"]]
    assert names == ["0", "4", "9"]
    first = found["layers"][0]
    assert (first["kind"], first["shape"], first["parameters"]) == ("Conv2d", [4, 9], 36)
    for layer in found["layers"]:
        assert set(layer["seconds"]) == {"observe", "refresh", "precondition"}
    assert {one["name"] for one in found["skipped"]} == {"1.weight", "1.bias", "5.weight", "5.bias"}
    assert all(one["why"] for one in found["skipped"])


def test_phases_add_up_to_the_seconds_of_the_run() -> None:
    result = train(small.recipe())
    assert 0 < sum(result.phases.values()) <= result.seconds


def test_waiting_for_data_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the making of batches moves shows that phase alone."""
    from kronfac.train.data import Batches
    from kronfac.train.run import clock

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def slow(self: Batches, start: int, stop: int) -> Iterator[Any]:
        for step in range(start, stop):
            now[0] += 2.0
            yield self.get(step)

    monkeypatch.setattr(Batches, "iterate", slow)
    result = train(small.recipe(), "sgd")
    assert result.phases == {"data": 24.0, "forward_backward": 0.0, "optimizer": 0.0}
    assert result.seconds == 24.0


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        train(small.recipe(), out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_data_that_is_missing_leaves_no_folder(tmp_path: Path) -> None:
    recipe = small.recipe(data={"name": "text", "path": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match="nothing"):
        train(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- going on ------------------------------------------------------------------------------------


class Forgetful(nn.Sequential):
    """A model with dropout, whose random numbers must be the same after a resume."""

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        size = sample_shape[0] * sample_shape[1] * sample_shape[2]
        super().__init__(
            nn.Flatten(), nn.Linear(size, 16), nn.Dropout(), nn.Linear(16, num_classes)
        )


@pytest.mark.parametrize(
    "optimizer",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("sgd", "adamw", "muon")), "kfac"],
)
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, forgetful: bool
) -> None:
    """Momentum, BatchNorm, statistics of K-FAC, schedule, dropout, augmentation and mixup."""
    monkeypatch.setitem(models._MODELS, "forgetful", Forgetful)
    changes: dict[str, Any] = {"model": {"name": "forgetful"}} if forgetful else {}
    recipe = small.recipe(train__mixup=0.4, **changes)
    whole = train(recipe, optimizer, out=tmp_path / "whole")
    stop = [at_step(6, interrupt())]
    part = train(recipe, optimizer, out=tmp_path / "part", listeners=stop)
    assert (part.status, part.signal) == ("stopped", signal.SIGTERM)
    assert part.step < 12
    rest = train(recipe, optimizer, resume=tmp_path / "part")
    assert (rest.status, rest.step) == ("done", 12)
    assert small.same(small.weights(tmp_path / "whole"), small.weights(tmp_path / "part"))
    assert [p.loss for p in rest.curve] == [p.loss for p in whole.curve]


def test_kfac_with_adamw_beside_it_resumes_with_the_same_bits(tmp_path: Path) -> None:
    recipe = small.recipe(**{"optimizers.kfac.other": "adamw"})
    train(recipe, out=tmp_path / "whole")
    train(recipe, out=tmp_path / "part", listeners=[at_step(6, interrupt())])
    train(recipe, resume=tmp_path / "part")
    assert small.same(small.weights(tmp_path / "whole"), small.weights(tmp_path / "part"))
    summary = (tmp_path / "whole" / "summary.txt").read_text()
    assert "KFAC over SGD" in summary
    assert "Stepped by AdamW: 24 parameters." in summary
    layers = next(e for e in read(tmp_path / "whole" / "events.jsonl") if e["event"] == "layers")
    assert len(layers["skipped"]) == 4


@pytest.mark.slow
def test_soap_resumes_with_the_same_bits(tmp_path: Path) -> None:
    recipe = small.recipe(**{"optimizers.soap.lr": 0.003})
    train(recipe, "soap", out=tmp_path / "whole")
    train(recipe, "soap", out=tmp_path / "part", listeners=[at_step(6, interrupt())])
    train(recipe, "soap", resume=tmp_path / "part")
    assert small.same(small.weights(tmp_path / "whole"), small.weights(tmp_path / "part"))


def test_events_go_on_where_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small.recipe(), out=folder, listeners=[at_step(6, interrupt(signal.SIGINT))])
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "ste')  # what a killed process may leave
    train(small.recipe(), resume=folder)
    events = read(folder / "events.jsonl")
    starts = [event["resumed"] for event in events if event["event"] == "start"]
    statuses = [event["status"] for event in events if event["event"] == "finish"]
    seconds = [event["seconds"] for event in events if "seconds" in event]
    assert starts == [None, 7]  # the step during which the signal came is finished
    assert statuses == ["stopped", "done"]
    assert seconds == sorted(seconds)
    assert all(line.startswith("{") for line in (folder / "events.jsonl").read_text().splitlines())


def test_the_target_of_now_is_looked_for_in_the_whole_curve(tmp_path: Path) -> None:
    for name, target in (("easy", 0.01), ("hard", 1.0)):
        recipe, stop = small.recipe(train__target=target), [at_step(6, interrupt())]
        train(recipe, "sgd", out=tmp_path / name, listeners=stop)
    easy, hard = small.recipe(train__target=0.01), small.recipe(train__target=1.0)
    missed = train(hard, "sgd", resume=tmp_path / "easy", stop_at_target=True)
    assert (missed.target, missed.step) == (None, 12)
    events = Events()
    found = train(easy, "sgd", resume=tmp_path / "hard", stop_at_target=True, listeners=[events])
    assert found.target is not None
    assert (found.target.step, found.step) == (4, 7)
    assert [one["step"] for one in events.of("target")] == [4]


def test_counters_of_kfac_go_on_where_they_were(tmp_path: Path) -> None:
    """Also if the run was killed after a step that no checkpoint knows, so that it is taken again."""

    def kill() -> None:
        raise RuntimeError("killed")

    recipe = small.recipe(**{"optimizers.kfac.rescale": "kl-clip"})
    whole = train(recipe)
    stop = [at_step(3, interrupt())]
    assert train(recipe, out=tmp_path / "run", listeners=stop).status == "stopped"
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, resume=tmp_path / "run", listeners=[at_step(9, kill)])
    train(recipe, resume=tmp_path / "run")
    stats = read(tmp_path / "run" / "events.jsonl")[-1]["stats"]
    assert (stats["steps"], stats["kl_clip_steps"]) == (12, 12)
    assert stats == whole.stats


def test_the_share_of_clipped_steps_is_that_of_the_last_ones(tmp_path: Path) -> None:
    """Steps are far too long up to the sixth and far too short later, before and after a resume."""
    recipe = small.recipe(
        train__log_every=2,
        schedule={"shape": "steps", "milestones": [1.5], "gamma": 1e-12},
        **{"optimizers.kfac.rescale": "kl-clip", "optimizers.kfac.kl_clip": 1e-9},
    )
    train(recipe, out=tmp_path / "run", listeners=[at_step(8, interrupt())])
    train(recipe, resume=tmp_path / "run")
    events = read(tmp_path / "run" / "events.jsonl")
    shares = {event["step"]: event["kl_clip"] for event in events if event["event"] == "step"}
    assert shares == {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0, 8: 0.0, 10: 0.0, 12: 0.0}


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    train(small.recipe(), out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    events = Events()
    again = train(small.recipe(), resume=tmp_path / "run", listeners=[events])
    assert (again.step, again.was_finished, again.status) == (12, True, "done")
    assert events == []
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_the_result_of_a_finished_run_is_the_same_again(tmp_path: Path) -> None:
    recipe = small.recipe(train__target=0.01)
    first = train(recipe, out=tmp_path / "run")
    again = train(recipe, resume=tmp_path / "run")
    assert again.stats["steps"] == 12
    assert dataclasses.replace(again, was_finished=False, stats={}, memory=0) == (
        dataclasses.replace(first, stats={}, memory=0)
    )


def test_a_run_that_ended_at_its_target_goes_on_to_another(tmp_path: Path) -> None:
    easy, hard = small.recipe(train__target=0.01), small.recipe(train__target=1.0)
    assert train(easy, out=tmp_path / "run", stop_at_target=True).step == 4
    assert train(easy, resume=tmp_path / "run", stop_at_target=True).was_finished
    rest = train(hard, resume=tmp_path / "run", stop_at_target=True)
    assert (rest.step, rest.was_finished) == (12, False)


def test_a_run_whose_end_was_not_written_is_ended(tmp_path: Path) -> None:
    train(small.recipe(), out=tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert not train(small.recipe(), resume=tmp_path / "run").was_finished
    assert read(path)[-1]["status"] == "done"


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    train(small.recipe(), out=tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    assert train(small.recipe(), resume=tmp_path / "run").curve[0].step == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__width": 8}, "its model.width is 4, and here it is 8"),
        ({"train__batch": 16}, "its train.batch is 32, and here it is 16"),
        ({"optimizers__kfac__lr": 1.0}, "its optimizer.lr is 0.05, and here it is 1.0"),
        ({"train__seed": 3}, "its train.seed is 0, and here it is 3"),
        ({"train__clip": 1.0}, "its train.clip is 0.0, and here it is 1.0"),
        ({"data__holdout": 9}, "its data.holdout is not set, and here it is 9"),
        ({"train__steps": 20}, "belongs to a run of 12 steps, and this one has 20"),
        ({"train__epochs": 2.0}, "belongs to a run of 12 steps, and this one has 8"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    train(small.recipe(), out=tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    with pytest.raises(UserError, match=words):
        train(small.recipe(**changes), resume=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


def test_a_length_may_be_told_in_another_way(tmp_path: Path) -> None:
    train(small.recipe(), out=tmp_path / "run", listeners=[at_step(6, interrupt())])
    assert train(small.recipe(train__epochs=3.0), resume=tmp_path / "run").step == 12


def test_a_folder_that_knows_the_steps_of_an_epoch_keeps_its_length(tmp_path: Path) -> None:
    """As older ones do, instead of the samples."""
    train(small.recipe(data__train=130), out=tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    start, *rest = path.read_text().splitlines(keepends=True)
    fields = json.loads(start)
    assert fields.pop("train_samples") == 130
    path.write_text(json.dumps({**fields, "steps_per_epoch": 4}) + "\n" + "".join(rest))
    recipe = small.recipe(data__train=130, train__epochs=3.0)
    assert train(recipe, resume=tmp_path / "run").was_finished
    with pytest.raises(UserError, match="a run of 12 steps, and this one has 16"):
        train(small.recipe(data__train=130, train__epochs=4.0), resume=tmp_path / "run")


def test_a_run_that_never_began_keeps_its_length(tmp_path: Path) -> None:
    train(small.recipe(), out=tmp_path / "run")
    for name in ("checkpoint.pt", "events.jsonl"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(UserError, match=r"its train\.steps is 12, and here it is 20"):
        train(small.recipe(train__steps=20), resume=tmp_path / "run")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Even if somebody has copied it into the folder and made it look alike."""
    train(small.recipe(), out=tmp_path / "run", listeners=[at_step(6, interrupt())])
    path = tmp_path / "run" / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    content["model"] = {"other.weight": torch.zeros(3)}
    torch.save(content, path)
    with pytest.raises(UserError, match="does not fit this model or optimizer"):
        train(small.recipe(), resume=tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    train(small.recipe(), out=tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    if content is None:
        torch.save({"format": 99}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match="checkpoint"):
        train(small.recipe(), resume=tmp_path / "run")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        train(small.recipe(), resume=tmp_path)


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_fails_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    recipe = small.recipe(
        **{"optimizers.sgd.lr": 1e20, "schedule.shape": "constant", "schedule.warmup": 0.0}
    )
    result = train(recipe, "sgd", out=tmp_path / "run")
    assert result.status == "failed"
    assert "the loss was not finite at step" in result.message
    events = read(tmp_path / "run" / "events.jsonl")
    assert [e["event"] for e in events if e["event"] in ("failure", "finish")] == [
        "failure",
        "finish",
    ]
    assert events[-1]["status"] == "failed"


def test_parameters_of_the_last_checkpoint_stay_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronfac.train.run.stepping import Stepper

    real = Stepper.take

    def break_later(self: Stepper, step: int, *args: Any) -> torch.Tensor:
        loss = real(self, step, *args)
        return loss * float("nan") if step >= 5 else loss

    monkeypatch.setattr(Stepper, "take", break_later)
    result = train(small.recipe(), "sgd", out=tmp_path / "run")
    assert (result.status, result.step) == ("failed", 6)
    assert "the checkpoint of step 4 stays" in result.message
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 4


def test_curvature_that_cannot_be_solved_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronfac.methods.kfac.block import KFACBlock

    for name in ("solve", "solve_batch"):
        monkeypatch.setattr(KFACBlock, name, lambda *args: None)
    result = train(
        small.recipe(**{"optimizers.kfac.factor_every": 1, "optimizers.kfac.refresh_every": 1})
    )
    assert result.status == "failed"
    assert "could not be solved 5 times in a row; raise damping" in result.message


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fill() -> None:
        (folder / "checkpoint.pt.part").symlink_to("/dev/full")

    with pytest.raises(UserError, match="the disk is full; what was saved before is still there"):
        train(small.recipe(), out=folder, listeners=[at_step(6, fill)])
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == 4
    assert read(folder / "events.jsonl")[-1]["event"] == "failure"
    assert train(small.recipe(), resume=folder).status == "done"


def test_a_full_disk_while_events_are_written_is_one_sentence(tmp_path: Path) -> None:
    train(small.recipe(), out=tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"events\.jsonl cannot be written: the disk is full"):
        train(small.recipe(), resume=tmp_path / "run")


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.replace

    def replace(path: Path, write: Any) -> None:
        if path.name == "environment.json":
            raise UserError("the disk is full")
        real(path, write)

    monkeypatch.setattr(disk, "replace", replace)
    with pytest.raises(UserError, match="the disk is full"):
        train(small.recipe(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_whatever_ends_a_run_leaves_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronfac.train.run.stepping import Stepper

    def burst(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Stepper, "take", burst)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(small.recipe(), out=tmp_path / "run")
    last = read(tmp_path / "run" / "events.jsonl")[-1]
    assert (last["event"], last["message"]) == ("failure", "out of memory")


@pytest.mark.filterwarnings("default")
def test_warnings_become_events(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    from kronfac.train.run.stepping import Stepper

    real = Stepper.take

    def warn(self: Stepper, step: int, *args: Any) -> torch.Tensor:
        if step == 2:
            warnings.warn("something is odd", stacklevel=1)
        return real(self, step, *args)

    monkeypatch.setattr(Stepper, "take", warn)
    events = Events()
    train(small.recipe(), "sgd", listeners=[events])
    assert [(e["step"], e["message"]) for e in events.of("warning")] == [(2, "something is odd")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__batch": 33, "train__micro_batches": 2}, "choose a multiple of 2"),
        ({"train__batch": 1000}, "128 training samples"),
        ({"schedule__warmup": 9.0}, "schedule.warmup = 9 epochs is not shorter than the run"),
        ({"model__name": "resent20"}, "unknown model 'resent20'"),
        ({"data__name": "digit"}, "unknown data set 'digit'"),
        ({"optimizers__kfac__damping": -1.0}, "damping=-1.0 must be a positive"),
        ({"optimizers__kfac__include": [1]}, "include holds 1; give name patterns such as"),
        (
            {"optimizers__kfac__rescale": "quadratic"},
            "rescale = 'quadratic' runs each batch several",
        ),
    ],
)
def test_values_that_cannot_be_used_are_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(small.recipe(**changes))
