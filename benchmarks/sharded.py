"""K-FAC on a sharded Llama-style model: time and bytes per step on slow links, and a plan for large ones.

    python benchmarks/sharded.py [--rates 500mbit unlimited] [--ranks 4] [--rounds 5] [--quick]
    python benchmarks/sharded.py --plan

Four ranks on four hosts (network namespaces, see `_hosts.py`; without root they share the loopback)
train a decoder of 13 million parameters with FSDP2. Variants take turns block by block, each with its
own copy of the model; a block is ten steps, one of them a factor step, and its time is that of the
slowest rank.

- AdamW: FSDP2 and nothing else.
- K-FAC: over SGD, `factor_every=10, refresh_every=100`; parts of gradients visit the owners of layers.
- full_tensor(): AdamW, and every rank gathers every gradient, as torch's DTensor offers it. It is what
  preconditioning each gradient on all ranks would send; its products are not counted.

Bytes are per rank and step. FSDP2's are `3N(P-1)/P` elements (weights twice, gradients once); K-FAC's are
counted by itself. The plan computes the same for published models by the same formulas.
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

SHAPE = Shape(width=384, layers=6, key_width=192, hidden=1024, words=4096)
TINY = Shape(width=64, layers=2, key_width=32, hidden=128, words=128)
BATCH, LENGTH, BLOCK = 2, 64, 10  # samples per rank, tokens, steps
ADAMW, KFAC, GATHERED = "AdamW", "K-FAC", "full_tensor()"
JOB = "KRONFAC_SHARDED_JOB"
#: Sides wider than this keep their diagonal, in the plan as in `kronfac.KFAC`.
MAX_DIM = 8192
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
        if name == KFAC:
            base = torch.optim.SGD(self.model.parameters(), lr=0.02)
            options = {"factor_every": BLOCK, "refresh_every": 100, "early_refresh": False}
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
        if self.name != KFAC:
            return {"spread": 0, "reduce": 0}
        return {name: self.optimizer.stats()["sent"][name] for name in ("spread", "reduce")}


def rank_main(job: Mapping[str, Any]) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    shape = Shape(**job["shape"])
    variants = [Variant(name, shape) for name in (ADAMW, KFAC, GATHERED)]
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


def plan() -> None:
    """What K-FAC would send and keep; weights travel in bfloat16 and everything else in float32."""
    rows = []
    for name, shape in PUBLISHED.items():
        elements, kept = shape.parameters, shape.statistics(MAX_DIM)
        for ranks in WORLDS:
            share = (ranks - 1) / ranks
            fsdp = (2 * 2 + 4) * elements * share
            gradients = 4 * exchange(elements, ranks)
            summed = 4 * kept / 2 * share / 10
            memory = 4 * (2 * kept + elements) / ranks
            rows.append(
                (
                    name,
                    ranks,
                    f"{fsdp / GIGA:.1f}",
                    f"{gradients / GIGA:.2f}",
                    f"{gradients / fsdp:.1%}",
                    f"{summed / GIGA:.2f}",
                    f"{(gradients + summed) / fsdp:.1%}",
                    f"{memory / GIGA:.1f}",
                    f"{4 * kept / GIGA:.0f}",
                )
            )
    print("\nComputed: GB per rank and step, statistics every 10 steps; GB kept per rank")
    print("(statistics, solutions, momentum), and GB of statistics at a factor step.")
    heads = ("", "GPUs", "FSDP2", "gradients", "", "statistics", "in all", "kept", "factor step")
    print(table(heads, rows))


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
