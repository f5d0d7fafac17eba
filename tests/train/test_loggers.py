"""TensorBoard and Weights & Biases, played by fakes."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kronfac.runs.errors import UserError
from kronfac.train.run.run import train
from tests.train import small


class Fake:
    """A writer or run that remembers what it was told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.scalars += [(name, value, step) for name, value in values.items()]

    def close(self) -> None:
        self.closed = True

    finish = close


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> list[Fake]:
    made: list[Fake] = []

    def make(*args: Any, **kwargs: Any) -> Fake:
        made.append(Fake(*args, **kwargs))
        return made[-1]

    module = ModuleType(name)
    setattr(module, function, make)
    monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("tensorboard", "torch.utils.tensorboard", "SummaryWriter"),
        ("wandb", "wandb", "init"),
    ],
)
def test_numbers_reach_the_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, function: str
) -> None:
    made = fake_module(monkeypatch, module, function)
    train(small.recipe(), out=tmp_path / "run", log=[name])
    [logger] = made
    names = {scalar[0] for scalar in logger.scalars}
    assert {"train/loss", "train/lr", "train/damping", "test/accuracy", "test/loss"} <= names
    assert "phases/refresh" in names
    assert [step for one, _, step in logger.scalars if one == "test/accuracy"] == [4, 8, 12]
    assert logger.closed


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_logger_that_is_not_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"--log {name} needs the package {name}: pip install"):
        train(small.recipe(), out=tmp_path / "run", log=[name])
    assert not (tmp_path / "run").exists()


def test_a_logger_that_cannot_start_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("no key,\nno entry")

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UserError, match="--log wandb could not start: no key, no entry"):
        train(small.recipe(), out=tmp_path / "run", log=["wandb"])


def test_an_unknown_logger_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown logger 'tensorbord'.*did you mean 'tensorboard'"):
        train(small.recipe(), log=["tensorbord"])
