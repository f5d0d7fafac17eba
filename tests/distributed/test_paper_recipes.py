"""Recipes of the papers take their first steps on several ranks, by the schemes of the papers."""

import math
from pathlib import Path

import pytest

from kronfac.train.run.result import Result
from kronfac.train.run.run import train
from tests.distributed.ranks import run
from tests.train.test_paper_recipes import images, tiny

__all__ = ["images"]


def first_steps(rank: int, name: str, optimizer: str, folder: str) -> Result:
    return train(tiny(name, Path(folder)), optimizer, device="cpu")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("papers/osawa-imagenet-131k", "kfac-stale"),
        ("papers/kaisa-imagenet-resnet50", "kfac"),
    ],
)
def test_ranks_come_to_the_same_end(name: str, optimizer: str, images: Path) -> None:
    first, second = run(2, first_steps, name, optimizer, str(images))
    assert first.status == second.status == "done"
    assert first.loss is not None
    assert math.isfinite(first.loss)
    assert first.loss == second.loss
    assert first.stats["refresh_every"] == second.stats["refresh_every"]
