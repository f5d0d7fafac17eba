"""The tables of the runs at real size, in Markdown, from `results/full/`.

.venv/bin/python benchmarks/full/table.py
"""

import json
from typing import Any

from _loop import RESULTS, Run, read

AUTOENCODER = {"K-FAC (published)": (75, 52.90, 57.60), "K-BFGS (published)": (120, 52.42, 58.27)}
PER_EPOCH = {"autoencoder": 60, "cifar10": 390}
TOKENS = 4096
KEYS = tuple(Run.__dataclass_fields__)


def lines(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs(task: str) -> list[list[dict[str, Any]]]:
    """The lines of each run that is finished."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in read(task):
        found.setdefault(tuple(row[key] for key in KEYS), []).append(row)
    return [rows for rows in found.values() if rows[-1]["step"] == rows[-1]["steps"]]


def seconds(task: str, optimizer: str) -> float | None:
    """Of a step, as measured in turns with the others."""
    found = [r for r in lines("costs") if (r["task"], r["optimizer"]) == (task, optimizer)]
    return found[-1]["seconds"] if found else None


def show(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(*cells: str) -> None:
    show(*cells)
    print("|---" * len(cells) + "|")


def costs(task: str, row: dict[str, Any]) -> list[str]:
    each = seconds(task, row["optimizer"])
    return ["–", "–"] if each is None else [f"{each:.2f}", f"{each * row['step']:.0f}"]


def settings(row: dict[str, Any]) -> str:
    beside = f", AdamW {row['other']:g}" if row["other"] else ""
    return f"{row['rate']:g}{beside}"


def autoencoder() -> None:
    head("MNIST autoencoder 784-1000-500-250-30", "epoch", "steps", "train loss", "test loss")
    for name, (epoch, train, test) in AUTOENCODER.items():
        show(name, epoch, epoch * PER_EPOCH["autoencoder"], f"{train:.2f}", f"{test:.2f}")
    rows = lines("autoencoder-k-fac")
    firsts = [
        next((r for r in rows if r[part] <= value), None)
        for part, value in (("test", 57.60), ("train", 52.90))
    ]
    for row in {r["epoch"]: r for r in (*firsts, *rows[-1:]) if r}.values():
        steps = row["epoch"] * PER_EPOCH["autoencoder"]
        name = f"**K-FAC, the README's line** (schedule of {row['of']} epochs)"
        show(name, row["epoch"], steps, f"{row['train']:.2f}", f"{row['test']:.2f}")
    print()


def cifar10() -> None:
    each = PER_EPOCH["cifar10"]
    head("CIFAR-10, ResNet-20", "rate", "weight decay", "epochs", "accuracy", "s/step", "seconds")
    for rows in runs("cifar10"):
        row = rows[-1]
        found = f"{row['accuracy']:.2f} %" if "accuracy" in row else "diverged"
        epochs = f"{row['steps'] / each:.3g}"
        decay = f"{row['weight_decay']:g}"
        show(row["optimizer"], settings(row), decay, epochs, found, *costs("cifar10", row))
    print()


def gpt() -> None:
    head("GPT, 3.3 M parameters", "rate", "steps", "tokens", "test loss", "s/step", "seconds")
    for rows in runs("gpt"):
        row = rows[-1]
        found = f"{row['test']:.3f}" if "test" in row else "diverged"
        tokens = f"{row['steps'] * TOKENS / 1e6:.2f} M"
        show(row["optimizer"], settings(row), row["steps"], tokens, found, *costs("gpt", row))
    print()


if __name__ == "__main__":
    autoencoder()
    cifar10()
    gpt()
