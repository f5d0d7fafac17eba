"""Every cell of the table in docs/support.md: two K-FAC steps that equal those in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cells import (
    CHECKPOINTS,
    EXECUTIONS,
    FRAMEWORKS,
    LAYERS,
    PLAIN,
    PRECISIONS,
    TOLERANCES,
    Cell,
    all_cells,
    is_slow,
    obstacle,
)
from tests.support.frameworks import trainer_run
from tests.support.models import SAMPLES, loss_of
from tests.support.plain import OPTIONS, STEPS, Run, data_of, model_of, plain_run, reference


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def cases(cells: list[Cell]) -> list[Any]:
    """Every third of the quick ones runs by default."""
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(cell, id=str(cell), marks=marks[is_slow(cell) or number % 3 > 0])
        for number, cell in enumerate(cells)
    ]


@pytest.mark.parametrize("cell", cases(all_cells()))
def test_cell(cell: Cell, tmp_path: Path) -> None:
    known = obstacle(cell)
    if known is None:
        check(cell, tmp_path)
    else:
        with pytest.raises(known.raises, match=known.match):
            check(cell, tmp_path)


def check(cell: Cell, folder: Path) -> None:
    run = plain_run(cell) if cell.framework == PLAIN else trainer_run(cell, folder)
    exact = reference(cell.layer)
    every_layer_was_observed(run)
    assert run.counts == exact.counts  # each sample once
    assert run.dtypes == {torch.float64 if cell.precision == "float64" else torch.float32}
    distances = [
        distance(found[name], expected[name])
        for found, expected in zip(run.steps, exact.steps, strict=True)
        for name in expected
    ]
    near = max(distances) < TOLERANCES[cell.precision]
    assert near, f"gradients are not those of a plain run: {max(distances)}"
    if TOLERANCES[cell.precision] > TOLERANCES["float32"]:
        assert max(distances) > TOLERANCES["float32"], "the run was in single precision"


def every_layer_was_observed(run: Run) -> None:
    """Nothing was left to the base optimizer or lost on the way; warnings are errors anyway."""
    assert run.left_out == {}
    assert run.stats["steps"] == run.stats["factor_updates"] == STEPS
    assert run.stats["without_solution"] == []
    assert not any(run.stats["dropped"].values())
    assert not any(run.stats["failures"].values())


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


# --- that the cells show what they should -----------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_the_reference_is_preconditioned(layer: str) -> None:
    cell = Cell(layer, "float64")
    model, (x, y) = model_of(cell), data_of(cell)[0]
    loss_of(model(x), y).backward()
    steps = reference(layer).steps[0]
    assert steps.keys() == dict(model.named_parameters()).keys()
    assert all(distance(p.grad, steps[name]) > 0.01 for name, p in model.named_parameters())


@pytest.mark.parametrize("layer", LAYERS)
def test_the_reference_counts_each_sample_once(layer: str) -> None:
    counts = {name: n for name, n in reference(layer).counts.items() if not name.endswith(".A")}
    decay = OPTIONS["decay"]
    assert counts == dict.fromkeys(counts, SAMPLES * (1 + decay))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_checkpoints_repeat_the_layer(layer: str, checkpoints: str) -> None:
    cell = Cell(layer, "float32", checkpoints=checkpoints)
    model, (x, y) = model_of(cell), data_of(cell)[0]
    calls: list[nn.Module] = []
    model.body.register_forward_pre_hook(lambda module, _: calls.append(module))
    loss_of(model(x), y).backward()
    assert len(calls) == (1 if checkpoints == "none" else 2)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_quick_cells_of_a_layer_have_every_value_of_every_axis(layer: str) -> None:
    cells = [c for c in all_cells() if c.layer == layer and not is_slow(c)]
    assert {c.precision for c in cells} == set(PRECISIONS)
    assert {(c.execution, c.checkpoints) for c in cells if c.framework == PLAIN} == {
        (execution, checkpoints) for execution in EXECUTIONS for checkpoints in CHECKPOINTS
    }
    assert {c.framework for c in cells} == set(FRAMEWORKS)
