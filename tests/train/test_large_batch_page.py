"""docs/large-batch.md: its code runs, and its table is that of the recipes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kronfac
from kronfac.train.recipe.files import load
from tests.train.test_paper_recipes import OSAWA, TABLE
from tests.training import batch, mlp, step

PAGE = (Path(__file__).parents[2] / "docs" / "large-batch.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
def test_the_code_runs(code: str) -> None:
    model = mlp()
    names: dict[str, Any] = {"kronfac": kronfac, "torch": torch, "model": model}
    exec(code, names)
    step(model, names["optimizer"], batch())


@pytest.mark.parametrize("size", OSAWA)
def test_the_table_is_that_of_the_recipes(size: str) -> None:
    first = f"| {TABLE[size][0]:,} |"
    [row] = [line for line in PAGE.splitlines() if line.startswith(first)]
    shown = [float(cell.replace(",", "")) for cell in row.strip("|").split("|")[:10]]
    assert tuple(shown) == TABLE[size][:10]


def test_every_recipe_on_the_page_exists() -> None:
    for name in set(re.findall(r"papers/[a-z0-9-]+", PAGE)):
        assert load(name).source
