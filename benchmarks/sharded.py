"""K-FAC on a sharded Llama-style model: time and bytes per step on slow links, and a plan for large ones.

    python benchmarks/sharded.py [--rates 500mbit unlimited] [--tokens 2x64 8x128] [--ranks 4]
                                 [--rounds 2] [--quick]
    python benchmarks/sharded.py --plan

Four ranks on four hosts (network namespaces, see `_hosts.py`; without root they share the loopback)
train a decoder of 13 million parameters with FSDP2, on so many samples of so many tokens per rank.
Variants take turns, each with its own copy of the model: in a round each makes two ordinary steps, and
K-FAC two more without its exchange, one that takes statistics and one that solves as well. A step takes
as long as the slowest rank. Of a hundred steps at `factor_every=10, refresh_every=100` nine take
statistics only, one solves, and ninety do neither; from that comes the time of a step. What is in the
results is not measured again (`--again` does).

The exchange's own share: in the steps without it as many numbers are copied on each rank in place of the
messages, and everything else is the same. What an ordinary step takes longer is what the exchange costs
beside the products that it is hidden behind.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from kronfac.distributed.comm.collectives import Arrival, Collectives
from kronfac.distributed.sharded.row_local import budget

SHAPE = Shape(width=384, layers=6, key_width=192, hidden=1024, words=4096)
TINY = Shape(width=64, layers=2, key_width=32, hidden=128, words=128)
#: Samples per rank, and tokens of each: few, and what a small GPU would be given.
TOKENS = ("2x64", "8x128")
ADAMW, KFAC, SLICED, GATHERED = "AdamW", "K-FAC", "K-FAC, slices", "full_tensor()"
JOB = "KRONFAC_SHARDED_JOB"
#: Sides wider than this keep their diagonal, in the plan as in `kronfac.KFAC`.
MAX_DIM = 8192
#: Steps from one statistic, and from one solution, to the next.
FACTOR_EVERY, REFRESH_EVERY = 10, 100
NEVER = 10**6
#: Learning rate of K-FAC.
RATE = 0.02
#: Intervals of statistics and solutions by which a step is of a kind.
KINDS = {
    "ordinary": (NEVER, NEVER),
    "alone": (NEVER, NEVER),
    "factor": (1, NEVER),
    "refresh": (1, 1),
}
#: The share of FSDP2's time that K-FAC may take, and of its bytes on P ranks, times P.
TIME_GOAL, BYTES_GOAL = 0.10, 2 / 3
WORLDS = (8, 64, 512)
#: What has to be the same for results to be kept.
ALIKE = ("ranks", "rounds", "shape")
GIGA = 1e9


def exchange(parameters: float, ranks: int) -> float:
    """Elements of gradients that a rank sends in a step: to the owners of layers and back."""
    return 2 * parameters / ranks * (ranks - 1) / ranks


def of_fsdp(parameters: float, ranks: int) -> float:
    """Elements that FSDP2 sends: weights for the forward and the backward, and gradients."""
    return 3 * parameters * (ranks - 1) / ranks


# --- ranks ------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """Let parts of gradients stay where they are: as many are copied, and nobody waits."""
    before = Collectives.exchange

    def stay(
        self: Collectives, phase: Any, flat: Any, splits: Any, found: Any, sizes: Any
    ) -> Arrival:
        common = min(flat.numel(), found.numel())
        found.zero_()[:common].copy_(flat[:common])
        return Arrival(phase)

    Collectives.exchange = stay  # type: ignore[method-assign]
    try:
        yield
    finally:
        Collectives.exchange = before  # type: ignore[method-assign]


class Variant:
    """One copy of the model and its optimizer."""

    def __init__(self, name: str, shape: Shape, tokens: str) -> None:
        self.batch, self.length = map(int, tokens.split("x"))
        torch.manual_seed(0)
        self.name = name
        self.model = Llama(shape)
        self.shape = shape
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if name in (KFAC, SLICED):
            base = torch.optim.SGD(self.model.parameters(), lr=RATE)
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
        """Two ordinary steps, two without the exchange, and one of each other kind."""
        twice = [kind for kind in self.kinds if kind in ("ordinary", "alone")]
        for kind in [*twice, *self.kinds]:
            before = self.traffic()
            self.seconds[kind].append(self.step(kind))
            self.sent[kind].update({key: n - before[key] for key, n in self.traffic().items()})

    def step(self, kind: str) -> float:
        """Seconds of one step."""
        if self.name in (KFAC, SLICED):
            self.optimizer.factor_every, self.optimizer.refresh_every = KINDS[kind]
        dist.barrier()
        with alone() if kind == "alone" else nullcontext():
            return self._timed(0.0 if kind == "alone" else RATE)

    def _timed(self, rate: float) -> float:
        """Seconds of one step at a learning rate: gradients that nobody has sent change nothing."""
        if self.name in (KFAC, SLICED):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        started = time.perf_counter()
        tokens = torch.randint(self.shape.words, (self.batch, self.length + 1))
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
        hidden = per_step.get("alone", ordinary)
        return {
            "ms": 1e3 * mean,
            "share": (ordinary - hidden) / mean,
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
    names = (ADAMW, KFAC, SLICED, GATHERED)
    variants = [Variant(name, shape, job["tokens"]) for name in names]
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


def measure(rate: str, tokens: str, ranks: int, rounds: int, shape: Shape) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, make_hosts(ranks, rate) as hosts:
        out = str(Path(folder) / "found.json")
        job = {"shape": vars(shape), "tokens": tokens, "rounds": rounds, "out": out}
        command = [sys.executable, __file__]
        hosts.run(command, **{JOB: json.dumps(job)})
        return json.loads(Path(out).read_text())


def show(rate: str, tokens: str, ranks: int, found: Mapping[str, Any]) -> None:
    """Two tables: what steps take, and what they send."""
    millions, fsdp = found["parameters"] / 1e6, found["fsdp"]
    print(f"\n{rate}, {tokens} tokens on each of {ranks} ranks, {millions:.1f} M parameters")
    base = found["rows"][ADAMW]["ms"]
    kinds = ("ordinary", "factor", "refresh")
    times = [
        (
            name,
            *(f"{row['kinds'][kind]:.0f}" if kind in row["kinds"] else "" for kind in kinds),
            f"{row['ms']:.0f}",
            "" if name == ADAMW else f"{row['ms'] / base - 1:+.1%}",
            f"{row['share']:.1%}" if "alone" in row["kinds"] else "",
        )
        for name, row in found["rows"].items()
    ]
    goals = ("goal", "", "", "", "", "", f"{TIME_GOAL:.1%}")
    heads = ("ms per step", "ordinary", "factor", "refresh", "at 10/100", "over AdamW", "exchange")
    print(table(heads, [*times, goals]))
    sizes = [
        (
            name,
            f"{row['exchange'] / 1e6:.2f}",
            f"{row['exchange'] / fsdp:.1%}",
            f"{row['statistics'] / 1e6:.2f}",
        )
        for name, row in found["rows"].items()
        if name != ADAMW
    ]
    print(f"FSDP2 itself sends {fsdp / 1e6:.1f} MB.")
    heads = ("MB per step", "gradients", "of FSDP2's", "statistics")
    print(table(heads, [*sizes, ("goal", "", f"{BYTES_GOAL / ranks:.1%}", "")]))


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


def stored(ranks: int, rounds: int, shape: Shape) -> dict[str, Any]:
    """What has been measured, if with these ranks and rounds and this model."""
    known = read_json("sharded")
    alike = (ranks, rounds, vars(shape))
    return dict(known["runs"]) if alike == tuple(map(known.get, ALIKE)) else {}


def run(arguments: argparse.Namespace) -> None:
    """Measure rate by rate; what is there is kept if a later one fails."""
    quick, ranks = arguments.quick, arguments.ranks
    shape, rounds = (TINY, 1) if quick else (SHAPE, arguments.rounds)
    results = {} if quick or arguments.again else stored(ranks, rounds, shape)
    why = missing()
    if why:
        print(why)
    rates, all_tokens = [UNLIMITED] if why else arguments.rates, arguments.tokens
    pairs = [(rate, tokens) for tokens in all_tokens for rate in rates]
    for rate, tokens in pairs[:1] if quick else pairs:
        key = f"{rate}, {tokens}"
        if key not in results:
            results[key] = measure(rate, tokens, ranks, rounds, shape)
            if not quick:
                alike = dict(zip(ALIKE, (ranks, rounds, vars(shape)), strict=True))
                write_json("sharded", {**alike, "runs": results})
        show(rate, tokens, ranks, results[key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", nargs="+", default=["500mbit", UNLIMITED], help="as tc writes them"
    )
    parser.add_argument("--tokens", nargs="+", default=[*TOKENS], help="samples x tokens per rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one rate; nothing is written"
    )
    parser.add_argument("--again", action="store_true", help="measure everything again")
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
