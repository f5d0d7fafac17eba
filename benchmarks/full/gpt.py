"""A byte-level GPT of 3.3 M parameters on the source text of Python: K-FAC beside Muon with AdamW.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/gpt.py search|K-FAC|"K-FAC, whole sides"|Muon|cost

Text: the first 20 MB of the .py files of the running Python's standard library (bytes; every tenth
stretch of 64 windows is for testing). Width 256, 4 blocks, windows of 128, batch 32 (4,096 tokens a
step), bf16 autocast for both, a warm-up of 5 % and a linear decay to zero, no weight decay. `search`
tries three settings of K-FAC and four of Muon at a quarter of the length, and the full runs take the
best of them; Muon's AdamW has a rate of its own. K-FAC also gets schedules of three quarters and of
half the length: how many tokens does it need for the loss that Muon reaches with all of them (goal:
25 % fewer)? `K-FAC, whole sides` has `block_dim=None`; `K-FAC@1` is another seed, which also gets a
quarter of the length (their lines have the last evaluation only). About 35 minutes in all. Lines in
`results/full/gpt.jsonl`; a run that was stopped resumes from its last evaluation.
"""

import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _loop import Run, cost, optimizer_of, read, train
from torch import Tensor

from kronfac.train import models
from kronfac.train.data.text import Text

LENGTH, BATCH, STEPS = 128, 32, 320
SIZE, TESTED = 20_000_000, 512
QUARTER = STEPS // 4
SEARCH = {
    "Muon": [
        Run("Muon", rate, QUARTER, other=other)
        for rate, other in ((0.02, 2e-3), (0.05, 2e-3), (0.1, 2e-3), (0.02, 8e-3))
    ],
    "K-FAC": [Run("K-FAC", rate, QUARTER) for rate in (0.05, 0.1, 0.2)],
}


def text() -> Text:
    library = Path(sysconfig.get_path("stdlib"))
    content = bytearray()
    for file in sorted(library.rglob("*.py")):
        if "site-packages" not in file.parts and not file.name.startswith("_sysconfigdata"):
            content += file.read_bytes()
    return Text(bytes(content[:SIZE]), LENGTH, test=TESTED)


def make(run: Run) -> tuple[Any, Any, Callable[[int], Tensor], Callable[[], Mapping[str, float]]]:
    torch.manual_seed(run.seed)
    source = text()
    model = models.build(
        "gpt", num_classes=256, sample_shape=(LENGTH,), dim=256, depth=4, heads=4, tied=False
    )
    order = torch.randperm(source.num_train, generator=torch.Generator().manual_seed(run.seed))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def loss_at(step: int) -> Tensor:
        return loss_of(*source.train_batch(order[step * BATCH :][:BATCH]))

    def evaluate() -> Mapping[str, float]:
        parts = torch.arange(TESTED).split(64)
        losses = [float(loss_of(*source.test_batch(part))) for part in parts]
        return {"test": sum(losses) / len(losses)}

    options = {"loss_average": "token"} if run.optimizer.startswith("K-FAC") else {}
    return model, optimizer_of(run, model, **options), loss_at, evaluate


def one_step(run: Run) -> Callable[[int], object]:
    _, optimizer, loss_at, _ = make(run)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_at(number).backward()
        optimizer.step()

    return step


def best(name: str, steps: int) -> Run:
    """The best setting of the search, for a schedule of `steps`."""
    ends = [
        (row["test"], run)
        for run in SEARCH[name.split(",")[0]]
        for row in read("gpt", run)
        if row["step"] == run.steps and "test" in row
    ]
    found = min(ends, key=lambda pair: pair[0])[1]
    return Run(name, found.rate, steps, other=found.other)


def main(*names: str) -> None:
    for given in names:
        name, _, seed = given.partition("@")
        if name == "cost":
            cost("gpt", one_step, [best("Muon", STEPS), best("K-FAC", STEPS)])
            continue
        if name == "search":
            runs = [run for own in SEARCH.values() for run in own]
        else:
            lengths = (STEPS, 3 * STEPS // 4, STEPS // 2) if name.startswith("K-FAC") else (STEPS,)
            lengths = (*lengths, QUARTER) if seed else lengths
            runs = [replace(best(name, steps), seed=int(seed or 0)) for steps in lengths]
        for run in runs:
            train("gpt", run, *make(run), every=20)


if __name__ == "__main__":
    main(*sys.argv[1:])
