"""Recipes of the papers say what their sources say, and take their first steps on tiny images."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kronfac
from kronfac.runs.errors import UserError
from kronfac.runs.events import Recorder
from kronfac.runs.timetable import Timetable
from kronfac.train import models
from kronfac.train.launch.ranks import Ranks
from kronfac.train.optim import build as optimizers
from kronfac.train.optim.kfac_schedules import as_callable
from kronfac.train.recipe.files import change, load, shipped
from kronfac.train.recipe.recipe import Recipe
from kronfac.train.run.checkpointing import collect, restore
from kronfac.train.run.loop import Loop
from kronfac.train.run.run import train
from kronfac.train.run.setup import prepare
from tests.training import assert_same

PAPERS = [name for name in shipped() if name.startswith("papers/")]
OSAWA = ["4k", "8k", "16k", "32k", "65k", "131k"]
#: Batch, GPUs, mixup's α, power, e_start, e_end, η₀, m₀, λ, epochs, iterations (docs/large-batch.md).
TABLE: dict[str, tuple[float, ...]] = {
    "4k": (4096, 128, 0.4, 11, 1, 53, 8.18e-3, 0.997, 2.5e-4, 35, 10_948),
    "8k": (8192, 256, 0.4, 8, 1, 53.5, 1.25e-2, 0.993, 2.5e-4, 35, 5_474),
    "16k": (16384, 512, 0.4, 8, 1, 53.5, 2.5e-2, 0.985, 2.5e-4, 35, 2_737),
    "32k": (32768, 1024, 0.6, 3.5, 1.5, 49.5, 3.0e-2, 0.97, 2.0e-4, 45, 1_759),
    "65k": (65536, 2048, 0.6, 2.9, 2, 64.5, 4.0e-2, 0.95, 1.5e-4, 60, 1_173),
    "131k": (131072, 4096, 1.0, 3.0, 1, 95.0, 7.0e-2, 0.93, 1.0e-4, 80, 782),
}


def jobs() -> list[tuple[str, str]]:
    return [(name, optimizer) for name in PAPERS for optimizer in load(name).optimizers]


def test_all_of_them_are_there() -> None:
    names = ["sc20-cifar10-resnet32", "sc20-imagenet-resnet50", "kaisa-imagenet-resnet50"]
    names += [f"osawa-imagenet-{size}" for size in OSAWA]
    assert sorted(PAPERS) == sorted(f"papers/{name}" for name in names)


@pytest.mark.parametrize("name", PAPERS)
def test_each_names_its_source(name: str) -> None:
    recipe = load(name)
    assert "et al." in recipe.source
    assert recipe.description
    assert "\n" not in recipe.description + recipe.source


@pytest.mark.parametrize("size", OSAWA)
def test_osawa_is_the_table(size: str) -> None:
    batch, gpus, mixup, power, start, end, rate, momentum, damping, epochs, steps = TABLE[size]
    job = load(f"papers/osawa-imagenet-{size}").job()
    found = job.schedule
    assert (job.train.batch, job.train.mixup, job.train.epochs) == (batch, mixup, epochs)
    assert (found.shape, found.power, found.start, found.end) == ("polynomial", power, start, end)
    options = job.optimizer.options
    chosen = (options["lr"], options["base_momentum"], options["damping"])
    assert chosen == (rate, momentum, damping)
    assert batch == 32 * gpus
    assert 1_281_167 * epochs / batch == pytest.approx(steps, abs=1)
    assert found.tied_momentum
    assert job.train.weight_rescaling
    assert job.data.augment == ("flip", "erase")


@pytest.mark.parametrize("name", ["sc20-cifar10-resnet32", "sc20-imagenet-resnet50"])
def test_only_convolutions_and_the_head_are_preconditioned_in_sc20(name: str) -> None:
    """The papers of Pauloski et al. leave norm layers to SGD."""
    job = load(f"papers/{name}").job()
    model = models.build(job.model.name, num_classes=10, sample_shape=(3, 32, 32))
    optimizer: Any = optimizers.build(
        job.optimizer, model, timetable=Timetable(100, 1), kind="image"
    )
    kinds = [type(layer.module) for layer in optimizer._preconditioner.watched()]
    wanted = [type(m) for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert sorted(map(str, kinds)) == sorted(map(str, wanted))


def test_damping_and_intervals_of_sc20_follow_the_epochs() -> None:
    name = "papers/sc20-imagenet-resnet50"
    options = load(name).job().optimizer.options
    assert options["damping"] == {"start": 0.001, "factor": 0.5, "epochs": [40, 80]}
    model = models.build("resnet18", num_classes=3, sample_shape=(3, 32, 32), width=4)
    part = load(name, ["optimizers.kfac.refresh_every.epochs=[25]"]).job().optimizer
    optimizer: Any = optimizers.build(part, model, timetable=Timetable(10, 1), kind="image")
    assert [optimizer.damping(step) for step in (0, 399, 400)] == [0.001, 0.001, 0.0005]
    assert [optimizer.refresh_every(step) for step in (0, 249, 250)] == [100, 100, 1000]
    assert [optimizer.factor_every(step) for step in (0, 249, 250)] == [10, 10, 10]


STALE: list[tuple[Any, kronfac.StaleInterval]] = [
    ("stale", kronfac.StaleInterval()),
    ({"stale": 0.2, "maximum": 7, "share": 1.0}, kronfac.StaleInterval(0.2, maximum=7, share=1.0)),
]


@pytest.mark.parametrize(("value", "rule"), STALE)
def test_intervals_of_a_recipe_may_adapt_themselves(
    value: Any, rule: kronfac.StaleInterval
) -> None:
    assert as_callable("refresh_every", value, Timetable(10, 1)) == rule


@pytest.mark.parametrize("value", [{"stale": 0.1, "maxmum": 7}, {"stale": -1.0}])
def test_a_wrong_interval_is_a_sentence(value: Any) -> None:
    with pytest.raises(UserError, match=r"refresh_every.*maximum|tolerance=-1"):
        as_callable("refresh_every", value, Timetable(10, 1))


# --- first steps --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of tiny images, as ImageNet is usually kept."""
    pillow = pytest.importorskip("PIL.Image")
    root = tmp_path_factory.mktemp("imagenet")
    generator = torch.Generator().manual_seed(0)
    for part, number in (("train", 8), ("val", 2)):
        for label, name in enumerate(["n01", "n02", "n03"]):
            (root / part / name).mkdir(parents=True)
            for index in range(number):
                pixels = torch.randint(
                    80 * label, 80 * label + 90, (40, 40, 3), generator=generator
                )
                image = pillow.frombytes("RGB", (40, 40), bytes(pixels.flatten().tolist()))
                image.save(root / part / name / f"{index}.png")
    return root


def tiny(name: str, images: Path) -> Recipe:
    """The recipe, but of a narrow model on tiny images in small batches."""
    changes: dict[str, Any] = {"data.name": "image-folder", "data.path": str(images)}
    changes |= {"data.size": 32, "model.width": 4, "train.batch": 8, "train.steps": 3}
    changes |= {"train.log_every": 1, "train.checkpoint_every": 0}
    if load(name).model.name == "resnet50" and "imagenet-4k" not in name:
        changes["model.name"] = "resnet18"  # one of them as deep as it is
    return load(name, changes)


@pytest.mark.parametrize(("name", "optimizer"), jobs())
def test_the_first_steps_run(name: str, optimizer: str, images: Path) -> None:
    losses = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            losses.append(event["loss"])

    result = train(tiny(name, images), optimizer, device="cpu", listeners=[listen])
    assert result.status == "done"
    assert result.step == len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


# --- all ingredients together -------------------------------------------------------------------


def build(images: Path, stop_after: int = 100) -> Loop:
    """Mixup, erasing, rescaling, tied momentum and stale statistics in one run."""
    recipe = tiny("papers/osawa-imagenet-32k", images)
    # Three steps are one epoch here: the whole fall of the learning rate in four of them.
    changes = {"train.steps": 12, "schedule.start": 0.0, "schedule.end": 4.0, "data.size": 16}
    job = change(recipe, changes).job("kfac-stale")
    setup = prepare(job, Ranks(), torch.device("cpu"), None)
    loop = Loop(setup, Recorder(()), signal=lambda: 15 if loop.step >= stop_after else 0)
    return loop


def test_a_run_with_all_ingredients_resumes_bit_for_bit(images: Path, tmp_path: Path) -> None:
    whole, first, second = build(images), build(images, stop_after=5), build(images)
    assert whole.run().status == "done"
    assert first.run().status == "stopped"
    restore(second, collect(first), tmp_path)
    assert second.step == 5
    second.run()
    assert_same(second.setup.plain.state_dict(), whole.setup.plain.state_dict())
    assert_same(second.setup.optimizer.state_dict(), whole.setup.optimizer.state_dict())


def test_ingredients_do_their_part_in_a_run(images: Path) -> None:
    loop = build(images)
    loop.run()
    setup, job = loop.setup, loop.setup.job
    group = setup.optimizer.param_groups[0]
    share = (1 - 11.5 / 12) ** 3.5
    assert group["lr"] == pytest.approx(job.optimizer.options["lr"] * share)
    assert group["momentum"] == pytest.approx(job.optimizer.options["base_momentum"] * share)
    for module in setup.plain.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            assert module.weight.norm().item() <= math.sqrt(2 * len(module.weight)) * (1 + 1e-5)
    assert loop.stepper.mixup is not None
    assert set(loop.stepper.mixup.state_dict()) == {"inputs", "targets"}
