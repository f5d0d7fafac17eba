"""K-FAC on a sharded Llama-style model: time and bytes per step on slow links, and a plan for large ones.

    python benchmarks/sharded.py [--rates 500mbit unlimited] [--ranks 4] [--rounds 5] [--quick]
    python benchmarks/sharded.py --plan

Four ranks on four hosts (network namespaces, see `_hosts.py`; without root they share the loopback)
train a decoder of 13 million parameters with FSDP2. Variants take turns block by block, each with its
own copy of the model; a block is ten steps, one of them a factor step, and its time is that of the
slowest rank.

- AdamW: FSDP2 and nothing else.
- K-FAC: over SGD, `factor_every=10, refresh_every=100`; parts of gradients visit the owners of layers.
  The embedding's stay where they are, since its tokens do not mix.
- K-FAC, slices: the same with grafted steps and `max_dim` as wide as the stream: gate, up and head keep
  the diagonals of their outputs, and their gradients stay where they are too.
- full_tensor(): AdamW, and every rank gathers every gradient, as torch's DTensor offers it. It is what
  preconditioning each gradient on all ranks would send; its products are not counted.

Bytes are per rank and step. FSDP2's are `3N(P-1)/P` elements (weights twice, gradients once); K-FAC's are
counted by itself. The plan computes the same for published models by the same formulas: for orthogonal
steps, where only the embedding is worked on by slices, and for others, where all wide layers are.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import machine_line, table, write_json
from _hosts import UNLIMITED, make_hosts, missing
from _llama import PUBLISHED, Llama, Shape
from torch.distributed.fsdp import fully_shard

import kronfac
from kronfac.distributed.row_local import budget

SHAPE = Shape(width=384, layers=6, key_width=192, hidden=1024, words=4096)
TINY = Shape(width=64, layers=2, key_width=32, hidden=128, words=128)
BATCH, LENGTH, BLOCK = 2, 64, 10  # samples per rank, tokens, steps
ADAMW, KFAC, SLICED, GATHERED = "AdamW", "K-FAC", "K-FAC, slices", "full_tensor()"
JOB = "KRONFAC_SHARDED_JOB"
#: Sides wider than this keep their diagonal, in the plan as in `kronfac.KFAC`.
MAX_DIM = 8192
#: Steps from one statistic, and from one solution, to the next.
FACTOR_EVERY, REFRESH_EVERY = 10, 100
WORLDS = (8, 64, 512)
GIGA = 1e9


def exchange(parameters: float, ranks: int) -> float:
    """Elements of gradients that a rank sends in a step: to the owners of layers and back."""
    return 2 * parameters / ranks * (ranks - 1) / ranks


def of_fsdp(parameters: float, ranks: int) -> float:
    """Elements that FSDP2 sends: weights for the forward and the backward, and gradients."""
    return 3 * parameters * (ranks - 1) / ranks


# --- ranks ------------------------------------------------------------------------------------


class Variant:
    """One copy of the model and its optimizer."""

    def __init__(self, name: str, shape: Shape) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = Llama(shape)
        self.shape = shape
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if name in (KFAC, SLICED):
            base = torch.optim.SGD(self.model.parameters(), lr=0.02)
            options: dict[str, Any] = {"factor_every": BLOCK, "refresh_every": REFRESH_EVERY}
            options["early_refresh"] = False
            if name == SLICED:
                options |= {"rescale": "graft", "max_dim": shape.width}
            self.optimizer = kronfac.KFAC(
                self.model, base, momentum=0.9, nesterov=True, loss_average="token", **options
            )

    def block(self) -> float:
        """Seconds of ten steps."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(BLOCK):
            tokens = torch.randint(self.shape.words, (BATCH, LENGTH + 1))
            self.optimizer.zero_grad()
            scores = self.model(tokens[:, :-1])
            F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            if self.name == GATHERED:
                for parameter in self.model.parameters():
                    parameter.grad.full_tensor()
            self.optimizer.step()
        seconds = torch.tensor([time.perf_counter() - started])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def traffic(self) -> dict[str, int]:
        """Bytes that K-FAC has sent so far, by phase."""
        if self.name not in (KFAC, SLICED):
            return {"spread": 0, "reduce": 0}
        return {name: self.optimizer.stats()["sent"][name] for name in ("spread", "reduce")}


def rank_main(job: Mapping[str, Any]) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    shape = Shape(**job["shape"])
    variants = [Variant(name, shape) for name in (ADAMW, KFAC, SLICED, GATHERED)]
    for variant in variants:
        variant.block()  # first statistics and solutions, buffers, plans
    before = {variant.name: variant.traffic() for variant in variants}
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(job["rounds"]):
        for variant in variants:
            seconds[variant.name].append(variant.block())
    steps = job["rounds"] * BLOCK
    rows = {}
    for variant in variants:
        after = variant.traffic()
        sent = {name: (after[name] - before[variant.name][name]) / steps for name in after}
        mean = torch.tensor([sent["spread"], sent["reduce"]])
        dist.all_reduce(mean)
        spread, reduce = (mean / dist.get_world_size()).tolist()
        rows[variant.name] = {
            "ms": 1e3 * statistics.median(seconds[variant.name]) / BLOCK,
            "all_ms": [1e3 * one / BLOCK for one in seconds[variant.name]],
            "exchange": spread,
            "statistics": reduce,
        }
    elements = sum(p.numel() for p in variants[0].model.parameters())
    size = dist.get_world_size()
    rows[GATHERED]["exchange"] = 4 * elements * (size - 1) / size
    if dist.get_rank() == 0:
        found = {"parameters": elements, "fsdp": 4 * of_fsdp(elements, size), "rows": rows}
        Path(job["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# --- the table, and the plan ------------------------------------------------------------------


def measure(rate: str, ranks: int, rounds: int, shape: Shape) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, make_hosts(ranks, rate) as hosts:
        out = str(Path(folder) / "found.json")
        job = {"shape": vars(shape), "rounds": rounds, "out": out}
        command = [sys.executable, __file__]
        hosts.run(command, **{JOB: json.dumps(job)})
        return json.loads(Path(out).read_text())


def show(rate: str, ranks: int, found: Mapping[str, Any]) -> None:
    millions, fsdp = found["parameters"] / 1e6, found["fsdp"]
    print(f"\n{rate}, {ranks} ranks, {millions:.1f} M parameters; FSDP2 sends {fsdp / 1e6:.1f} MB")
    alone = found["rows"][ADAMW]["ms"]
    rows = [
        (
            name,
            f"{row['ms']:.0f}",
            f"{row['ms'] / alone - 1:+.0%}",
            f"{row['exchange'] / 1e6:.2f}",
            f"{row['exchange'] / fsdp:.1%}",
            f"{row['statistics'] / 1e6:.2f}",
        )
        for name, row in found["rows"].items()
    ]
    heads = ("", "ms a step", "over AdamW", "gradients MB", "of FSDP2's", "statistics MB")
    print(table(heads, rows))


def planned(shape: Shape, ranks: int, orthogonal: bool) -> dict[str, float]:
    """Bytes that a rank sends in a step, by what they are, and keeps."""
    elements, kept = shape.parameters, shape.statistics(MAX_DIM)
    local, solutions = shape.row_local(MAX_DIM, orthogonal, budget(elements, ranks))
    share = (ranks - 1) / ranks
    return {
        "fsdp": (2 * 2 + 4) * elements * share,
        "gradients": 4 * exchange(elements - local, ranks),
        "statistics": 4 * kept / 2 * share / FACTOR_EVERY,
        "solutions": 4 * solutions / REFRESH_EVERY,
        "kept": 4 * ((2 * kept + elements) / ranks + solutions * share),
    }


def plan_row(name: str, ranks: int, orthogonal: bool) -> tuple[object, ...]:
    found = planned(PUBLISHED[name], ranks, orthogonal)
    sent = [found[one] for one in ("gradients", "statistics", "solutions")]
    return (
        name,
        ranks,
        f"{found['fsdp'] / GIGA:.1f}",
        *(f"{one / GIGA:.2f}" for one in sent),
        f"{sum(sent) / found['fsdp']:.1%}",
        f"{found['kept'] / GIGA:.1f}",
    )


def plan() -> None:
    """What K-FAC would send and keep; weights travel in bfloat16 and everything else in float32."""
    print("\nComputed: GB per rank and step; GB kept per rank (statistics, solutions, momentum).")
    print(f"Statistics every {FACTOR_EVERY} steps, solutions every {REFRESH_EVERY}.")
    heads = ("", "GPUs", "FSDP2", "gradients", "statistics", "solutions", "in all", "kept")
    for orthogonal in (True, False):
        layers = (
            "the embedding" if orthogonal else "embedding, head, and gate and up as there is room"
        )
        print(f"\n{'Orthogonal' if orthogonal else 'Other'} steps; by slices: {layers}")
        print(table(heads, [plan_row(name, n, orthogonal) for name in PUBLISHED for n in WORLDS]))
    print()
    for name, shape in PUBLISHED.items():
        print(
            f"{name}: {4 * shape.statistics(MAX_DIM) / GIGA:.0f} GB of statistics at a factor step."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", nargs="+", default=["500mbit", UNLIMITED], help="as tc writes them"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model; nothing is written")
    parser.add_argument("--plan", action="store_true", help="computed numbers only")
    arguments = parser.parse_args()
    if not arguments.plan:
        print(machine_line())
        why = missing()
        if why:
            print(why)
            arguments.rates = [UNLIMITED]
        results = {}
        for rate in [UNLIMITED] if arguments.quick else arguments.rates:
            shape, rounds = (TINY, 1) if arguments.quick else (SHAPE, arguments.rounds)
            results[rate] = measure(rate, arguments.ranks, rounds, shape)
            show(rate, arguments.ranks, results[rate])
        if not arguments.quick:
            write_json("sharded", {"ranks": arguments.ranks, "rates": results})
    plan()


if __name__ == "__main__":
    if JOB in os.environ:
        rank_main(json.loads(os.environ[JOB]))
    else:
        main()
