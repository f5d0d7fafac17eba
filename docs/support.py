"""Run every cell of the support table and write docs/support.md: ``python docs/support.py``."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.cells import (  # noqa: E402
    CHECKPOINTS,
    EXECUTIONS,
    LAYERS,
    PLAIN,
    PRECISIONS,
    TOLERANCES,
    TRAINERS,
    Cell,
    all_cells,
    obstacle,
)

PAGE = ROOT / "docs" / "support.md"
PACKAGES = ("torch", "lightning", "transformers", "accelerate")
INTRODUCTION = """\
# What works together

Layer × precision × `torch.compile` × activation checkpointing × framework. Each cell is a test that
runs: two K-FAC steps on a tiny model with that layer. They have to observe every layer and count every
sample once, keep their statistics in single precision or better, and give the preconditioned gradients
of a plain run in double precision, up to this share of their norm:
{tolerances}.

This page is written by `make support` from what those tests said; a test compares it with the list of
cells. To run some of them: `pytest tests/support -m "slow or not slow" -k "Conv2d and compiled"`.
"""
AXES = """\
- **fp16 autocast** is with `torch.amp.GradScaler`; **bf16 parameters** is a model all in bfloat16.
- **compiled** is `torch.compile(fullgraph=True, backend="aot_eager")`: the graphs of the default
  compiler without its kernels. **inductor** is the default compiler itself, in float32 and bf16 autocast.
- **reentrant** and **non-reentrant** are the kinds of `torch.utils.checkpoint`, around the layer.
- **FSDP2** is `fully_shard` in a plain loop on two ranks with half of the batch each
  ([more of it](sharded.md)).
- BatchNorm and InstanceNorm are run as 2d. Conv1D (GPT-2) is that of transformers. The registered layer
  is a module of one's own, made known by `kronfac.register_layer`.
"""

Outcomes = dict[Cell, str]


# --- the page --------------------------------------------------------------------------------


def notes() -> list[str]:
    """The reason of each footnote."""
    found = [known.reason for cell in all_cells() if (known := obstacle(cell)) is not None]
    return list(dict.fromkeys(found))


def mark(cell: Cell, outcomes: Outcomes) -> str:
    """A tick, the footnote of an exception, or a cross where a test failed or did not run."""
    if outcomes.get(cell) != "passed":
        return "✗"
    known = obstacle(cell)
    return "✓" if known is None else f"[{notes().index(known.reason) + 1}]"


def summed(cells: Iterable[Cell], outcomes: Outcomes) -> str:
    """One mark for many cells: how many of them passed, and what the others have."""
    marks = [mark(cell, outcomes) for cell in cells]
    others = dict.fromkeys(one for one in marks if one != "✓")
    return " ".join([f"✓ {marks.count('✓')}" if "✓" in marks else "", *others]).strip()


def table(columns: dict[str, Callable[[str], str]]) -> str:
    """One row per layer; a column is a heading and what to write for a layer."""
    lines = [["layer", *columns], ["---", *("---" for _ in columns)]]
    lines += [[layer, *(write(layer) for write in columns.values())] for layer in LAYERS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def overview(outcomes: Outcomes) -> str:
    """A column for each value of each axis; those of precisions are of plain loops."""

    def having(attribute: str, value: str, plain: bool) -> Callable[[str], str]:
        chosen = [c for c in all_cells() if getattr(c, attribute) == value]
        chosen = [c for c in chosen if not plain or c.framework == PLAIN]
        return lambda layer: summed((c for c in chosen if c.layer == layer), outcomes)

    columns = {value: having("precision", value, plain=True) for value in PRECISIONS}
    for value in (*EXECUTIONS[1:], "inductor"):
        columns[value] = having("execution", value, plain=True)
    columns |= {value: having("checkpoints", value, plain=True) for value in CHECKPOINTS[1:]}
    columns |= {value: having("framework", value, plain=False) for value in TRAINERS}
    return table(columns)


def plain_loops(outcomes: Outcomes) -> str:
    """Three kinds of checkpoints in eager mode, then compiled, in one field."""

    def field(precision: str) -> Callable[[str], str]:
        return lambda layer: " / ".join(
            " ".join(mark(Cell(layer, precision, how, kind), outcomes) for kind in CHECKPOINTS)
            for how in EXECUTIONS
        )

    return table({precision: field(precision) for precision in PRECISIONS})


def trainers(outcomes: Outcomes) -> str:
    """The precisions of each trainer in one field."""

    def field(trainer: str) -> Callable[[str], str]:
        return lambda layer: " ".join(
            mark(Cell(layer, precision, framework=trainer), outcomes) for precision in PRECISIONS
        )

    return table({trainer: field(trainer) for trainer in TRAINERS})


def page(outcomes: Outcomes, made: str) -> str:
    """The whole of docs/support.md."""
    tolerances = ", ".join(f"{TOLERANCES[one]:g} for {one}" for one in PRECISIONS)
    footnotes = "".join(f"- [{n}] {reason}.\n" for n, reason in enumerate(notes(), start=1))
    return "\n".join(
        [
            INTRODUCTION.format(tolerances=tolerances),
            "## At a glance\n",
            "✓ and the number of tests behind it. The first columns are of plain loops.\n",
            overview(outcomes),
            AXES,
            "## Plain loops\n",
            "Each field: no checkpoints, reentrant, non-reentrant in eager mode / the same compiled.\n",
            plain_loops(outcomes),
            "## Under a trainer, and sharded\n",
            f"Each field: {', '.join(PRECISIONS)}.\n",
            trainers(outcomes),
            "## Exceptions\n",
            "For each of them a test asserts that it still fails.\n",
            footnotes,
            made,
        ]
    )


# --- running ---------------------------------------------------------------------------------


class Collector:
    """Keeps what became of each cell's test."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")
        if cell is not None and (report.when == "call" or report.failed):
            self.outcomes[cell] = report.outcome
        return report


def made_line() -> str:
    """When and with what."""
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    python = platform.python_version()
    return f"Made on {datetime.date.today()} on a CPU, Python {python}, {versions}.\n"


def main() -> int:
    collector = Collector()
    chosen = ["-q", "-m", "slow or not slow", "-c", str(ROOT / "pyproject.toml")]
    chosen += ["-W", "ignore:Module already imported"]  # pytest is not the first to run here
    code = pytest.main([*chosen, str(ROOT / "tests" / "support" / "test_cells.py")], [collector])
    if len(collector.outcomes) != len(all_cells()):
        print("Not every cell has run; docs/support.md is as it was.")
        return 1
    PAGE.write_text(page(collector.outcomes, made_line()), encoding="utf-8")
    print(f"{len(collector.outcomes)} cells are in {PAGE.relative_to(ROOT)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
