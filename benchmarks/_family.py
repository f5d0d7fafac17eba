"""What the stages of the family's benchmark share: optimizers and settings, tasks, rows of results."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from _common import RESULTS

from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.options import method_name, methods, starting_line

PATH = RESULTS / "family.jsonl"
#: Steps of each task, whoever trains it.
STEPS = {"digits": 80, "cifar10": 80, "text": 80}
#: Test accuracy, or loss of text, that steps and seconds are counted to.
TARGETS = {"digits": 0.96, "cifar10": 0.45, "text": 2.5}
OTHERS = ("sgd", "adamw", "muon", "soap")
NAMES = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon", "soap": "SOAP", "kfac": "K-FAC"}
#: Forms of methods that have rows of their own: the method, and what they change in its line.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ekfac-gradient": ("ekfac", {"moments": "gradient"}),
    "singd-diagonal": ("singd", {"structure": "diagonal"}),
}
#: What is not run, and why.
SKIPPED = {
    ("cifar10", "dualgaussnewton"): "too slow",  # ten backward passes, and 1,280 rows of each layer
    ("resnet20", "dualgaussnewton"): "too slow",
    ("text", "dualgaussnewton"): "out of memory",  # 256 outputs a token: 18 GB and more
    ("transformer", "dualgaussnewton"): "out of memory",
}
#: Most seconds of processor time of a run.
LONGEST = 300.0

Row = dict[str, Any]


def everyone() -> list[str]:
    """All optimizers, forms of a method after it."""
    found = list(OTHERS)
    for name in methods():
        found += [name, *(form for form, (method, _) in FORMS.items() if method == name)]
    return found


def kind_of(name: str) -> str:
    """The kind of optimizer that recipes know."""
    return FORMS[name][0] if name in FORMS else name


def title(name: str) -> str:
    """How a table calls it."""
    if name in FORMS:
        method, changes = FORMS[name]
        return f"{title(method)}, {', '.join(map(str, changes.values()))}"
    return NAMES.get(name) or method_name(name) or name


def options_of(task: str, name: str) -> dict[str, Any]:
    """What an optimizer starts with on a task: the recipe's own table, or the line of a method."""
    if name in OTHERS:
        return dict(recipe_files.load(task).part_of(name).options)
    return starting_line(kind_of(name)) | (FORMS[name][1] if name in FORMS else {})


def setting(task: str, name: str) -> Row:
    """All of an optimizer's settings but the rate: results of other settings do not count."""
    if (
        name in OTHERS and task not in STEPS
    ):  # a model of random batches, of which costs are measured
        return {}
    options = {key: value for key, value in options_of(task, name).items() if key != "lr"}
    if name in OTHERS:
        return options
    defaults = asdict(methods()[kind_of(name)].method.defaults)  # type: ignore[attr-defined]
    return {key: _plain(value) for key, value in (defaults | options).items()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


# --- rows ----------------------------------------------------------------------------------------


def keep(rows: list[Row], row: Row) -> None:
    """Add a row to the results."""
    rows.append(row)
    with PATH.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(time.strftime("%H:%M:%S"), row, flush=True)


def read() -> list[Row]:
    """All rows so far."""
    return [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []


def find(rows: Iterable[Row], **key: Any) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if key.items() <= row.items()]


def valid(rows: Iterable[Row]) -> list[Row]:
    """Rows of today's settings."""
    known = set(everyone())
    named = [row for row in rows if row["optimizer"] in known]
    return [
        row
        for row in named
        if "setting" not in row or row["setting"] == setting(row["task"], row["optimizer"])
    ]
