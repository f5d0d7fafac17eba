"""The tables of the runs at real size, in Markdown, from `results/full/`.

.venv/bin/python benchmarks/full/table.py
"""

import json
from statistics import mean
from typing import Any

from _loop import RESULTS, Run, read

#: Epoch, training and test loss, from the notebook beside the code of K-BFGS.
AUTOENCODER = {
    "K-FAC (published, ReLU)": [(10, 61.65, 62.48), (20, 56.72, 58.52), (75, 52.90, 57.60)],
    "K-BFGS (published, ReLU)": [(10, 59.81, 60.98), (20, 56.30, 58.47), (120, 52.42, 58.27)],
}
OURS = {"tanh": "autoencoder-k-fac", "ReLU": "autoencoder-k-fac-relu"}
PER_EPOCH = {"autoencoder": 60, "cifar10": 390, "airbench": 25}
TOKENS = 4096
KEYS = tuple(Run.__dataclass_fields__)


def lines(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs(task: str) -> list[list[dict[str, Any]]]:
    """The lines of each run that is finished."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in read(task):
        found.setdefault(tuple(row.get(key) for key in KEYS), []).append(row)
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
    """Per step and in all, as measured in turns; without such a run its processor time."""
    each = seconds(task, row["optimizer"]) or row.get("cpu", 0) / row["step"]
    return [f"{each:.2f}", f"{each * row['step']:.0f}"]


def settings(row: dict[str, Any]) -> str:
    beside = f", AdamW {row['other']:g}" if row["other"] else ""
    damping = f", damping {row['damping']:g}" if row.get("damping") else ""
    return f"{row['rate']:g}{beside}{damping}"


def autoencoder() -> None:
    head("MNIST autoencoder 784-1000-500-250-30", "epoch", "steps", "train loss", "test loss")
    found = [(name, *row) for name, rows in AUTOENCODER.items() for row in rows]
    for kind, file in OURS.items():
        rows = lines(file)
        for row in rows:
            if row["epoch"] in (5, 10, rows[-1]["epoch"]):
                name = f"**K-FAC, README's line** ({kind}, schedule of {row['of']} epochs)"
                found.append((name, row["epoch"], row["train"], row["test"]))
    for name, epoch, train, test in found:
        show(name, epoch, epoch * PER_EPOCH["autoencoder"], f"{train:.2f}", f"{test:.2f}")
    print()


def cifar10() -> None:
    each = PER_EPOCH["cifar10"]
    head("CIFAR-10, ResNet-20", "rate", "weight decay", "epochs", "accuracy", "s/step", "seconds")
    ends = [rows[-1] for rows in runs("cifar10")]
    for row in sorted(ends, key=lambda row: (row["steps"], -row.get("accuracy", 0))):
        found = f"{row['accuracy']:.2f} %" if "accuracy" in row else "diverged"
        epochs = f"{row['steps'] / each:.3g}"
        decay = f"{row['weight_decay']:g}"
        show(row["optimizer"], settings(row), decay, epochs, found, *costs("cifar10", row))
    print()


def airbench() -> None:
    head("airbench94's network", "rate", "epochs", "accuracy", "without other views", "s/step")
    ends = [rows[-1] for rows in runs("airbench")]
    for row in sorted(ends, key=lambda row: (row["steps"], -row["accuracy"])):
        beside = f", SGD {row['other']:g} and 0.67" if row["other"] else ""
        beside += f", damping {row['damping']:g}" if row["damping"] else ""
        shares = [f"{row[name]:.1f} %" for name in ("accuracy", "plain")]
        found = (*shares, f"{row['cpu'] / row['step']:.1f}")
        epochs = f"{row['steps'] / PER_EPOCH['airbench']:.3g}"
        show(row["optimizer"], f"{row['rate']:g}{beside}", epochs, *found)
    print()


def gpt() -> None:
    """Means of all seeds of a setting, beside how many they are."""
    cells = ("rate", "steps", "tokens", "seeds", "test loss", "s/step", "seconds")
    head("GPT, 3.3 M parameters", *cells)
    alike: dict[Any, list[dict[str, Any]]] = {}
    for rows in runs("gpt"):
        row = rows[-1]
        alike.setdefault((row["steps"], row["optimizer"], settings(row)), []).append(row)
    for (steps, name, setting), ends in sorted(alike.items()):
        tests = [row.get("test") for row in ends]
        found = "diverged" if None in tests else f"{mean(tests):.3f}"
        cpu = mean(row.get("cpu", 0) for row in ends)
        tokens = f"{steps * TOKENS / 1e6:.2f} M"
        show(name, setting, steps, tokens, len(ends), found, f"{cpu / steps:.2f}", f"{cpu:.0f}")
    print()


if __name__ == "__main__":
    autoencoder()
    cifar10()
    gpt()
    airbench()
