"""Run folders as the program writes them, with made-up numbers."""

import json
import math
import random
from pathlib import Path
from typing import Any

# How fast the error falls, the error at the end, and seconds of a step.
PACES = {
    "kfac": (0.028, 0.010, 0.021),
    "sgd": (0.012, 0.016, 0.015),
    "adamw": (0.016, 0.019, 0.016),
    "muon": (0.021, 0.013, 0.019),
    "soap": (0.020, 0.014, 0.023),
}
LAYERS = [("stem", 16, 28)] + [(f"blocks.{i}.conv{j}", 16 * 2 ** (i // 3), 145 * 2 ** (i // 3))
                               for i in range(9) for j in (1, 2)] + [("head", 10, 65)]  # fmt: skip


def write_events(folder: Path, *events: dict[str, Any]) -> Path:
    """A run folder with exactly these events."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    return folder


def start(**changes: Any) -> dict[str, Any]:
    return {
        "event": "start", "time": 1.79e9, "recipe": "digits", "optimizer": "kfac", "kind": "kfac",
        "seed": 0, "world": 1, "parameters": 272474, "steps": 400, "epochs": 20.0, "batch": 64,
        "target": 0.98, "metric": "accuracy", "resumed": None, **changes,
    }  # fmt: skip


def evaluation(
    step: int, accuracy: float | None, seconds: float | None = None, **more: Any
) -> dict[str, Any]:
    seconds = step / 10 if seconds is None else seconds
    return {
        "event": "eval",
        "step": step,
        "seconds": seconds,
        "loss": 0.5,
        "accuracy": accuracy,
        **more,
    }


def step(number: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss, "seconds": number / 10, **more}


def make_run(
    root: Path,
    optimizer: str = "kfac",
    seed: int = 0,
    *,
    steps: int = 300,
    world: int = 1,
    text: bool = False,
    recipe: str = "digits",
    kind: str | None = None,
    lr: float = 0.05,
    **changes: Any,
) -> Path:
    """A whole run of plausible shape."""
    kind = kind or optimizer
    rng = random.Random(f"{optimizer}{seed}")
    rate, floor, pace = PACES.get(kind, PACES["sgd"])
    rate, pace = rate * rng.uniform(0.85, 1.15), pace * rng.uniform(0.93, 1.07)
    begin = start(
        recipe=recipe, optimizer=optimizer, kind=kind, seed=seed, steps=steps, world=world
    )
    begin |= {"metric": "loss", "target": 1.9} if text else {}
    events = [begin | changes]
    for number in range(10, steps + 1, 10):
        error = floor + 0.9 * math.exp(-rate * number)
        loss = (1.5 if text else 0.0) + 2.4 * error * rng.uniform(0.8, 1.2)
        events.append(_step(number, loss, kind, pace, world, steps, lr, rng))
        if number % 20 == 0:
            noisy = min(1.0, error * rng.uniform(0.9, 1.1))
            accuracy = round((1 - noisy) * (0.5 if text else 1), 4)
            test = (1.6 if text else 0.0) + 2.5 * noisy
            events.append(evaluation(number, accuracy, number * pace, loss=test, epoch=number / 20))
    if kind == "kfac":
        events.append(_layers(steps, pace, world))
    last = events[-2 if kind == "kfac" else -1]
    events.append({"event": "finish", "status": "done", "step": steps, "seconds": steps * pace,
                   "accuracy": last.get("accuracy"), "loss": last.get("loss"), "stats": {}})  # fmt: skip
    folder = write_events(root / f"{recipe}-{optimizer}-s{seed}", *events)
    _beside(folder, recipe, optimizer, seed, lr, world)
    return folder


def _step(
    number: int,
    loss: float,
    kind: str,
    pace: float,
    world: int,
    steps: int,
    lr: float,
    rng: random.Random,
) -> dict[str, Any]:
    whole = 10 * pace
    phases = {"data": 0.002, "forward_backward": 0.12, "optimizer": 0.008}
    extra: dict[str, Any] = {}
    if kind == "kfac":
        phases |= {"observe": 0.02, "refresh": 0.031, "precondition": 0.017, "rescale": 0.002}
        phases |= {"reduce": 0.006, "share": 0.004, "spread": 0.005} if world > 1 else {}
        clipped = max(0.0, 0.9 - number / steps) * rng.uniform(0.7, 1.0)
        extra = {
            "damping": 1e-3 * 0.5 ** (4 * number // steps),
            "kl_clip": clipped,
            "momentum": 0.9,
        }
    return step(
        number, loss, epoch=number / 20, lr=lr * (1 - number / (steps + 10)), seconds=number * pace,
        samples_per_second=64 / pace, memory=int(4.1e8 + (9e7 if kind == "kfac" else 0)),
        phases={name: value * rng.uniform(0.9, 1.1) * whole / 0.21 for name, value in phases.items()},
        **extra,
    )  # fmt: skip


def _layers(steps: int, pace: float, world: int) -> dict[str, Any]:
    listed = []
    for index, (name, rows, columns) in enumerate(LAYERS):
        cost = (rows**3 + columns**3) / 1e9
        owner = str(index % world) if index % 3 else f"{index % world},{(index + 1) % world}"
        listed.append({
            "name": name, "kind": "Conv2d" if name != "head" else "Linear", "shape": [rows, columns],
            "parameters": rows * columns, "bytes": 8 * (rows**2 + columns**2), "ranks": owner,
            "seconds": {"observe": 0.01 + cost / 3, "refresh": 0.004 + cost, "precondition": 0.02},
        })  # fmt: skip
    skipped = [{"name": "blocks.0.scale", "why": "no layer owns it"}]
    scheme = "comm-opt" if world > 1 else "replicated"
    return {"event": "layers", "layers": listed, "skipped": skipped, "scheme": scheme}


def _beside(folder: Path, recipe: str, optimizer: str, seed: int, lr: float, world: int) -> None:
    own = {"name": optimizer, "kind": optimizer, "lr": lr, "momentum": 0.9}
    own |= {"damping": 1e-3} if optimizer == "kfac" else {}
    settings = {
        "recipe": recipe, "model": {"name": "resnet8", "width": 16},
        "data": {"name": recipe, "augment": ["flip"]}, "schedule": {"warmup": 0.5},
        "train": {"batch": 64, "epochs": 15.0, "seed": seed, "target": 0.98}, "optimizer": own,
    }  # fmt: skip
    config = {
        "recipe": recipe, "optimizer": optimizer, "seed": seed, "settings": settings, "changes": [],
        "command": ["kronfac", "train", recipe, "--seed", str(seed)],
    }  # fmt: skip
    environment = {"torch": "2.13.0", "python": "3.11.2", "cpu": "Example CPU", "world": world}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (folder / "summary.txt").write_text("KFAC over SGD\nlayer   type\n", encoding="utf-8")
