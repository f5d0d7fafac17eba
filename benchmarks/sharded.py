"""K-FAC on a sharded Llama-style model: time and bytes per step on slow links, and a plan for large ones.

    python benchmarks/sharded.py [--rates 500mbit unlimited] [--ranks 4] [--rounds 4] [--quick]
    python benchmarks/sharded.py --plan

Four ranks on four hosts (network namespaces, see `_hosts.py`; without root they share the loopback)
train a decoder of 13 million parameters with FSDP2. Variants take turns, each with its own copy of the
model: in a round each makes two ordinary steps, and K-FAC one that takes statistics and one that solves
as well. A step takes as long as the slowest rank. Of a hundred steps at `factor_every=10,
refresh_every=100` nine take statistics only, one solves, and ninety do neither; from that comes the time
of a step. Rates that are in the results are not measured again (`--again` does).

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
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import machine_line, read_json, table, write_json
from _hosts import UNLIMITED, make_hosts, missing
from _llama import PUBLISHED, Llama, Shape
from torch.distributed.fsdp import fully_shard

import kronfac
from kronfac.distributed.sharded.row_local import budget

SHAPE = Shape(width=384, layers=6, key_width=192, hidden=1024, words=4096)
TINY = Shape(width=64, layers=2, key_width=32, hidden=128, words=128)
BATCH, LENGTH = 2, 64  # samples per rank, tokens
ADAMW, KFAC, SLICED, GATHERED = "AdamW", "K-FAC", "K-FAC, slices", "full_tensor()"
JOB = "KRONFAC_SHARDED_JOB"
#: Sides wider than this keep their diagonal, in the plan as in `kronfac.KFAC`.
MAX_DIM = 8192
#: Steps from one statistic, and from one solution, to the next.
FACTOR_EVERY, REFRESH_EVERY = 10, 100
NEVER = 10**6
#: Intervals of statistics and solutions by which a step is of a kind.
KINDS = {"ordinary": (NEVER, NEVER), "factor": (1, NEVER), "refresh": (1, 1)}
#: The share of FSDP2's time that K-FAC may take, and of its bytes on P ranks, times P.
TIME_GOAL, BYTES_GOAL = 0.10, 2 / 3
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
            options: dict[str, Any] = {"early_refresh": False}
            if name == SLICED:
                options |= {"rescale": "graft", "max_dim": shape.width}
            self.optimizer = kronfac.KFAC(
                self.model, base, momentum=0.9, nesterov=True, loss_average="token", **options
            )
        self.kinds = [*KINDS] if name in (KFAC, SLICED) else ["ordinary"]
        #: By kind, seconds of each step, and bytes that K-FAC has sent in them.
        self.seconds: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        self.sent: dict[str, Counter[str]] = {kind: Counter() for kind in self.kinds}

    def take_turn(self) -> None:
        """Two ordinary steps, and one of each other kind."""
        for kind in ["ordinary", *self.kinds]:
            before = self.traffic()
            self.seconds[kind].append(self.step(kind))
            self.sent[kind].update({key: n - before[key] for key, n in self.traffic().items()})

    def step(self, kind: str) -> float:
        """Seconds of one step."""
        if self.name in (KFAC, SLICED):
            self.optimizer.factor_every, self.optimizer.refresh_every = KINDS[kind]
        dist.barrier()
        started = time.perf_counter()
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
            return {}
        return {
            name: self.optimizer.stats()["sent"][name] for name in ("spread", "reduce", "share")
        }

    def forget(self) -> None:
        """Leave out what was measured so far."""
        for kind in self.kinds:
            self.seconds[kind].clear()
            self.sent[kind].clear()

    def row(self) -> dict[str, Any]:
        """Milliseconds, and megabytes of each phase, of a step."""
        per_step = {kind: statistics.median(values) for kind, values in self.seconds.items()}
        ordinary = per_step["ordinary"]
        solved, taken = per_step.get("refresh", ordinary), per_step.get("factor", ordinary)
        share, often = 1 / REFRESH_EVERY, 1 / FACTOR_EVERY
        mean = share * solved + (often - share) * taken + (1 - often) * ordinary
        sent = [
            self._sent("ordinary", "spread"),
            self._sent("factor", "reduce") * often,
            self._sent("refresh", "share") * share,
        ]
        total = torch.tensor(sent)
        dist.all_reduce(total)
        gradients, statistic, solutions = (total / dist.get_world_size()).tolist()
        return {
            "ms": 1e3 * mean,
            "kinds": {kind: 1e3 * value for kind, value in per_step.items()},
            "all_ms": {kind: [1e3 * one for one in own] for kind, own in self.seconds.items()},
            "exchange": gradients,
            "statistics": statistic,
            "solutions": solutions,
        }

    def _sent(self, kind: str, phase: str) -> float:
        """Bytes of a phase in a step of a kind."""
        return self.sent[kind][phase] / len(self.seconds[kind]) if kind in self.sent else 0.0


def rank_main(job: Mapping[str, Any]) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    shape = Shape(**job["shape"])
    variants = [Variant(name, shape) for name in (ADAMW, KFAC, SLICED, GATHERED)]
    for variant in variants:
        variant.take_turn()  # first statistics and solutions, buffers, plans
        variant.forget()
    for _ in range(job["rounds"]):
        for variant in variants:
            variant.take_turn()
    rows = {variant.name: variant.row() for variant in variants}
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
            *(f"{row['kinds'][kind]:.0f}" if kind in row["kinds"] else "" for kind in KINDS),
            f"{row['ms'] / alone - 1:+.1%}",
            f"{row['exchange'] / 1e6:.2f}",
            f"{row['exchange'] / fsdp:.1%}",
            f"{row['statistics'] / 1e6:.2f}",
        )
        for name, row in found["rows"].items()
    ]
    goals = ("goal", "", "", "", f"{TIME_GOAL:+.1%}", "", f"{BYTES_GOAL / ranks:.1%}", "")
    heads = ("", "ms", "factor", "refresh", "at 10/100", "MB", "of FSDP2's", "stat. MB")
    print(table(heads, [*rows, goals]))


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
            f"{name}: {4 * shape.statistics(MAX_DIM) / GIGA:.0f} GB of statistics in all, "
            "which no rank holds at once."
        )


def stored(ranks: int, shape: Shape) -> dict[str, Any]:
    """Rates that have been measured, if with these ranks and this model."""
    known = read_json("sharded")
    alike = (known.get("ranks"), known.get("shape")) == (ranks, vars(shape))
    return dict(known["rates"]) if alike else {}


def run(arguments: argparse.Namespace) -> None:
    """Measure rate by rate; what is there is kept if a later one fails."""
    quick, ranks = arguments.quick, arguments.ranks
    shape, rounds = (TINY, 1) if quick else (SHAPE, arguments.rounds)
    results = {} if quick or arguments.again else stored(ranks, shape)
    why = missing()
    if why:
        print(why)
    rates = [UNLIMITED] if why else arguments.rates
    for rate in rates[:1] if quick else rates:
        if rate not in results:
            results[rate] = measure(rate, ranks, rounds, shape)
            if not quick:
                write_json("sharded", {"ranks": ranks, "shape": vars(shape), "rates": results})
        show(rate, ranks, results[rate])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", nargs="+", default=["500mbit", UNLIMITED], help="as tc writes them"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one rate; nothing is written"
    )
    parser.add_argument("--again", action="store_true", help="measure all rates again")
    parser.add_argument("--plan", action="store_true", help="computed numbers only")
    arguments = parser.parse_args()
    if not arguments.plan:
        print(machine_line())
        run(arguments)
    plan()


if __name__ == "__main__":
    if JOB in os.environ:
        rank_main(json.loads(os.environ[JOB]))
    else:
        main()
