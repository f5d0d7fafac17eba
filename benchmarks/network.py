"""Every scheme on slow links: iteration time, phases and traffic of 4 ranks on 4 hosts.

    python benchmarks/network.py [--rates 100mbit 500mbit unlimited] [--models resnet20 transformer]
                                 [--rounds 5] [--steps 1] [--variants auto spd ...] [--quick]

The hosts are network namespaces whose links are limited by `tc tbf`; this needs root, and otherwise
all ranks share the loopback, without limits. Every variant has its own copy of the model, and all of
them take turns block by block; a block is a whole refresh interval, and its time is that of the
slowest rank. Timers are on all the while; the split by phase is the mean over blocks and ranks.

The baseline is the D-KFAC of the SPD-KFAC paper: statistics are all-reduced as triangles at every
factor step, and everyone solves everything; no deferral, no overlap, no placement. "squares" sends
whole matrices. Pipe is the overlap and LBP the placement by cost of that paper's own ablation, of
which "spd" has both. "layer-p., no DDP" leaves the gradients to K-FAC as well, as Osawa et al. do.
All of it takes about a quarter of an hour on 2 cores.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import Spread, Timing, machine_line, read_json, table, write_json
from _hosts import UNLIMITED, Loopback, make_hosts, missing
from _models import WORKLOADS
from torch.nn.parallel import DistributedDataParallel

import kronfac
from kronfac import Distribute, Hybrid

RATES = ("100mbit", "500mbit", UNLIMITED)
SLOW = RATES[:2]
MODELS = ("resnet20", "transformer")
BATCH = {"resnet20": 16, "transformer": 8}  # per rank
INTERVALS = ((1, 1), (5, 10))
BASELINE, ALONE, AUTO, AT_STEP = "D-KFAC", "SGD", "auto", "auto, no overlap"
GOAL, NEAR = 1.35, 0.05
WARM_UP = 2
PHASES = ("observe", "reduce", "refresh", "share", "precondition", "spread")


@dataclass(frozen=True)
class Variant:
    """How one copy of the model is trained.

    Args:
        name: as tables have it.
        distribute: K-FAC's scheme; `None` is the base optimizer alone.
        in_ddp: whether DistributedDataParallel averages the gradients; else K-FAC does.
        everywhere: whether it is measured at longer intervals too.
    """

    name: str
    distribute: Any
    in_ddp: bool = True
    everywhere: bool = True


_PLAIN = {"overlap": False, "deferred": False, "balanced": False, "split": False}
_SQUARES = Distribute("replicated", triangles=False, **_PLAIN)
_NEITHER = Distribute("spd", overlap=False, balanced=False)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(ALONE, None),
        Variant(BASELINE, Distribute("replicated", **_PLAIN)),
        Variant("D-KFAC squares", _SQUARES, everywhere=False),
        Variant("replicated", "replicated"),
        Variant("comm-opt", "comm-opt"),
        Variant("mem-opt", "mem-opt"),
        Variant("hybrid(0.5)", Hybrid(0.5)),
        Variant("layer-parallel", "layer-parallel"),
        Variant("layer-p., no DDP", "layer-parallel", in_ddp=False, everywhere=False),
        Variant("local", "local", everywhere=False),
        Variant("spd", "spd"),
        Variant(AUTO, "auto"),
        Variant(AT_STEP, Distribute("auto", overlap=False), everywhere=False),
        Variant("-Pipe -LBP", _NEITHER, everywhere=False),
        Variant("+Pipe -LBP", Distribute("spd", balanced=False), everywhere=False),
        Variant("-Pipe +LBP", Distribute("spd", overlap=False), everywhere=False),
    )
}
#: What "auto" chooses from, and is compared with the best of. It leaves `.grad` and the base optimizer's
#: state whole on all ranks, which "layer-parallel" does not, and never takes other statistics ("local").
FIXED = ("replicated", "comm-opt", "mem-opt", "hybrid(0.5)", "spd")


@dataclass(frozen=True)
class Setting:
    """What is measured in one go."""

    rate: str
    model: str
    interval: tuple[int, int]
    variants: tuple[str, ...]
    rounds: int
    steps: int

    @property
    def name(self) -> str:
        """As it is called in tables and in the file of results."""
        factor_every, refresh_every = self.interval
        return f"{self.model} {factor_every}/{refresh_every} {self.rate}"

    @property
    def block(self) -> int:
        """Steps of a block: whole intervals."""
        return self.steps if self.interval[1] == 1 else self.interval[1]


# On a rank


class Run:
    """One variant on one rank."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        size = BATCH[setting.model]
        self.model, _, self.loss = WORKLOADS[setting.model](size, seed=0)
        _, self.batch, _ = WORKLOADS[setting.model](size, seed=1 + dist.get_rank())
        if variant.in_ddp:
            self.model = DistributedDataParallel(self.model)
        base = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.kfac = None
        if variant.distribute is not None:
            self.kfac = kronfac.KFAC(
                self.model,
                base,
                distribute=variant.distribute,
                factor_every=setting.interval[0],
                refresh_every=setting.interval[1],
                early_refresh=False,
                loss_average="token" if setting.model == "transformer" else "batch",
            )
        self.optimizer = base if self.kfac is None else self.kfac

    def steps(self, count: int) -> None:
        """Train."""
        inputs, targets = self.batch
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss(self.model(inputs), targets).backward()
            self.optimizer.step()

    def begin(self) -> None:
        """Count from here."""
        self.phases: dict[str, float] = {}
        self.counted = 0
        self.before = {} if self.kfac is None else self.kfac.stats()

    def block(self, count: int) -> float:
        """Train with timers on, and return the seconds of a step."""
        with nullcontext({}) if self.kfac is None else self.kfac.timed() as seconds:
            started = time.perf_counter()
            self.steps(count)
            taken = time.perf_counter() - started
        self.counted += count
        for name, value in seconds.items():
            self.phases[name] = self.phases.get(name, 0.0) + value
        return taken / count

    def details(self) -> dict[str, Any]:
        """What has been counted, per step."""
        if self.kfac is None:
            return {}
        after = self.kfac.stats()

        def per_step(key: str) -> dict[str, float]:
            return {n: (after[key][n] - self.before[key][n]) / self.counted for n in after[key]}

        return {
            "scheme": str(self.kfac.placement.scheme),
            "seconds": {name: value / self.counted for name, value in self.phases.items()},
            "waited": (after["waited"] - self.before["waited"]) / self.counted,
            **{key: per_step(key) for key in ("bytes", "messages", "sent")},
        }


def work(setting: Setting) -> dict[str, Any]:
    """Measure one setting on this rank; what is returned is the same on all of them."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    runs = {name: Run(setting, VARIANTS[name]) for name in setting.variants}
    for (
        run
    ) in runs.values():  # first uses, DDP's new buckets, the plan that follows a first refresh
        run.steps(WARM_UP)
        run.begin()
    names = list(runs)
    seconds = torch.zeros(len(names), setting.rounds, dtype=torch.float64)
    for turn in range(setting.rounds):
        shift = turn * 4 % len(names)
        for name in names[shift:] + names[:shift]:
            dist.barrier()
            seconds[names.index(name), turn] = runs[name].block(setting.block)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    details: dict[str, list[Any]] = {name: [None] * dist.get_world_size() for name in names}
    for name, run in runs.items():
        dist.all_gather_object(details[name], run.details())
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": dict(zip(names, seconds.tolist(), strict=True)), "details": details}


# In the parent


def measure(setting: Setting, hosts: Loopback) -> dict[str, Any]:
    """Start the ranks and sum up what they found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        job = json.dumps({"setting": vars(setting), "out": str(out)})
        hosts.run([sys.executable, str(Path(__file__).resolve())], KRONFAC_NETWORK_JOB=job)
        found = json.loads(out.read_text())
    timings = {name: Timing(name, tuple(values)) for name, values in found["seconds"].items()}
    rows = {name: summary(timings, name, found["details"][name]) for name in timings}
    result: dict[str, Any] = {"variants": rows}
    if AUTO in timings:
        result["auto"] = verdict(setting, timings)
    return result


def summary(
    timings: Mapping[str, Timing], name: str, details: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One variant: its time, how much faster than the baseline, phases and traffic."""
    spread, faster = timings[name].spread, timings[BASELINE].ratio(timings[name])
    row: dict[str, Any] = {
        "ms": 1e3 * spread.median,
        "quartiles_ms": [1e3 * spread.low, 1e3 * spread.high],
        "faster_than_d_kfac": faster.median,
        "faster_quartiles": [faster.low, faster.high],
    }
    if details[0]:
        row["scheme"] = details[0]["scheme"]
        row["phases_ms"] = phases(details, mean(timings[name].seconds))
        for key in ("bytes", "messages", "sent"):
            row[key] = {n: mean(rank[key][n] for rank in details) for n in details[0][key]}
        row["waited_ms"] = 1e3 * mean(rank["waited"] for rank in details)
    return row


def phases(details: Sequence[Mapping[str, Any]], step: float) -> dict[str, float]:
    """Milliseconds of each phase per step, mean over ranks; the rest is the training step itself."""

    def of(name: str) -> float:
        return 1e3 * mean(
            sum(s for key, s in rank["seconds"].items() if key.partition("-")[0] == name)
            for rank in details
        )

    found = {name: of(name) for name in PHASES}
    return found | {"rest": 1e3 * step - sum(found.values())}


def mean(values: Iterable[float]) -> float:
    """The mean of an iterable."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def verdict(setting: Setting, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """How "auto" stands against the baseline and against the best scheme that it may choose."""
    faster = timings[BASELINE].ratio(timings[AUTO])
    result: dict[str, Any] = {
        "faster_than_d_kfac": [faster.median, faster.low, faster.high],
        "goal": GOAL if setting.rate in SLOW and setting.interval == (1, 1) else None,
    }
    rivals = [name for name in FIXED if name in timings]
    if rivals:
        best = min(rivals, key=lambda name: timings[name].spread.median)
        slower = timings[AUTO].ratio(timings[best])
        near = slower.median <= 1 + NEAR or slower.low <= 1 <= slower.high
        result |= {
            "best_fixed": best,
            "slower_than_best": [slower.median - 1, slower.low - 1, slower.high - 1],
            "near_best": near,
        }
    return result


def show(setting: Setting, result: Mapping[str, Any]) -> None:
    """Print the tables of one setting and what they say about "auto"."""
    rows = result["variants"]
    print(f"\n{setting.name}, a batch of {BATCH[setting.model]} per rank")
    cells = []
    for name, row in rows.items():
        ms, faster = row["quartiles_ms"], row["faster_quartiles"]
        sent = f"{sum(row['sent'].values()) / 1e6:.2f}" if "sent" in row else ""
        waited = f"{row['waited_ms']:.0f}" if "waited_ms" in row else ""
        cells.append(
            [
                name,
                f"{row['ms']:.0f}",
                f"[{ms[0]:.0f}, {ms[1]:.0f}]",
                f"{row['faster_than_d_kfac']:.2f}×",
                f"[{faster[0]:.2f}, {faster[1]:.2f}]",
                sent,
                waited,
            ]
        )
    headers = ["variant", "ms", "quartiles", "faster", "quartiles", "MB sent", "waited"]
    print(table(headers, cells))
    with_phases = {name: row["phases_ms"] for name, row in rows.items() if "phases_ms" in row}
    if with_phases:
        short = {"precondition": "precond"}
        columns = (*PHASES, "rest")
        print()
        print(
            table(
                ["ms per step", *(short.get(name, name) for name in columns)],
                [
                    [name, *(f"{values[column]:.1f}" for column in columns)]
                    for name, values in with_phases.items()
                ],
            )
        )
    if "auto" in result:
        for line in sentences(result["auto"], rows):
            print(line)


def sentences(auto: Mapping[str, Any], rows: Mapping[str, Any]) -> list[str]:
    """What the numbers say about "auto"."""
    faster = Spread(*auto["faster_than_d_kfac"])
    goal = "" if auto["goal"] is None else f" (goal {auto['goal']}×)"
    lines = [
        f"auto chose {rows[AUTO]['scheme']}.",
        f"auto vs D-KFAC: {faster:.2f} times as fast{goal}",
    ]
    if "best_fixed" in auto:
        slower = [f"{100 * value:+.1f} %" for value in auto["slower_than_best"]]
        lines.append(
            f"auto vs best fixed scheme ({auto['best_fixed']}): {slower[0]} "
            f"[{slower[1]}, {slower[2]}]\n  (goal: within {NEAR:.0%} of it or inside the spread)"
        )
    if AT_STEP in rows and rows[AT_STEP]["waited_ms"] > 0:
        hidden = 1 - rows[AUTO]["waited_ms"] / rows[AT_STEP]["waited_ms"]
        lines.append(f"overlap hides {hidden:.0%} of the time in which ranks wait for statistics")
    return lines


def legend() -> str:
    """What the columns mean."""
    return (
        "faster: time of D-KFAC / time of the variant, round by round. MB sent: K-FAC's\n"
        "own, per rank and step by ring formulas, without the gradients of DDP. waited:\n"
        "milliseconds per step in which a rank did nothing but wait for statistics."
    )


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """All that was asked for, rate by rate."""
    chosen = arguments.variants or list(VARIANTS)
    found = []
    for rate in arguments.rates:
        for model in arguments.models:
            for interval in INTERVALS:
                names = tuple(
                    name
                    for name, variant in VARIANTS.items()
                    if name == BASELINE
                    or (name in chosen and (variant.everywhere or interval == (1, 1)))
                )
                rounds = arguments.rounds if interval == (1, 1) else -(-arguments.rounds // 3)
                found.append(Setting(rate, model, interval, names, rounds, arguments.steps))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="as tc writes them")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="per block, updating at every step")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="one round each; nothing is written")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = arguments.steps = 1
    why = missing()
    if why:
        print(why)
        arguments.rates = [UNLIMITED]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    print(machine_line())
    print(legend())
    for setting in settings(arguments):
        with make_hosts(arguments.ranks, setting.rate) as hosts:
            result = measure(setting, hosts)
        show(setting, result)
        if not arguments.quick and not arguments.variants:
            entry = result | {
                "ranks": arguments.ranks,
                "batch": BATCH[setting.model],
                "limited": hosts.limited and setting.rate != UNLIMITED,
                "rounds": setting.rounds,
                "steps": setting.block,
            }
            write_json("network", read_json("network") | {setting.name: entry})


def rank_main(job: Mapping[str, Any]) -> None:
    """What each rank runs."""
    fields = job["setting"]
    found = work(
        Setting(
            **fields
            | {"interval": tuple(fields["interval"]), "variants": tuple(fields["variants"])}
        )
    )
    if os.environ["RANK"] == "0":
        Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    if "KRONFAC_NETWORK_JOB" in os.environ:
        rank_main(json.loads(os.environ["KRONFAC_NETWORK_JOB"]))
    else:
        main()
