"""What a K-FAC step costs over its base: means over whole refresh intervals, interleaved with the base.

    python benchmarks/overhead.py [--workload resnet20 ...] [--rounds 5] [--no-peers]

A median *step* at 10/100 would contain no curvature work at all, so one entry is the mean of a whole
refresh interval, and K-FAC and its base take turns step by step. Norms and embeddings are preconditioned
too. The base is SGD, and AdamW for the transformer as well. The split by phase comes from a second run
with timers on. 50/500 is assembled from the phases: each costs the same whenever it happens.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from _common import Timing, interleave, machine_line, read_json, table, write_json
from _models import WORKLOADS
from _peers import PEERS, Config, build, peer_steps, training_step
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac

INTERVALS = ((1, 10), (10, 100))
GOALS = {
    ("resnet20", "sgd", (1, 10)): 1.0,
    ("resnet20", "sgd", (10, 100)): 0.15,
    ("resnet20", "sgd", (50, 500)): 0.05,
    ("transformer", "adamw", (10, 100)): 0.25,
}
#: What K-FAC stands before and is compared with, its solver, and its intervals.
SETTINGS = {
    "resnet20": [("sgd", "auto", INTERVALS)],
    "transformer": [
        ("sgd", "auto", INTERVALS),
        ("adamw", "auto", INTERVALS),
        ("adamw", "cholesky", INTERVALS[1:]),
    ],
    "mlp": [("sgd", "auto", INTERVALS)],
}
PER_FACTOR = ("observe-input", "observe-output", "reduce")
OTHERS = ("adamw", "muon", "soap", "shampoo", "singd")


class Run:
    """A model with K-FAC over a base optimizer, past its first refresh."""

    def __init__(
        self,
        workload: str,
        factor_every: int,
        refresh_every: int,
        base: str = "sgd",
        solver: str = "auto",
    ) -> None:
        model, batch, loss = WORKLOADS[workload]()
        makers = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        }
        self.optimizer = kronfac.KFAC(
            model,
            makers[base](),
            solver=solver,
            factor_every=factor_every,
            refresh_every=refresh_every,
            early_refresh=False,
            loss_average="token" if workload == "transformer" else "batch",
        )
        self.step = training_step(model, batch, loss, self.optimizer)
        self.step()


def measure(
    workload: str, base: str, solver: str, interval: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """Time one setting against the base alone."""
    factor_every, refresh_every = interval
    run = Run(workload, factor_every, refresh_every, base, solver)
    model, batch, loss = WORKLOADS[workload]()
    alone = training_step(model, batch, loss, build(base, model, Config()))
    timings = interleave(
        {"base": alone, "kfac": run.step}, rounds=rounds, calls=refresh_every, warmup=2
    )
    ratio = timings["kfac"].ratio(timings["base"])
    return {
        "base": base,
        "solver": solver,
        "interval": f"{factor_every}/{refresh_every}",
        "base_ms": 1e3 * timings["base"].spread.median,
        "kfac_ms": 1e3 * timings["kfac"].spread.median,
        "overhead": ratio.median - 1,
        "quartiles": [ratio.low - 1, ratio.high - 1],
    }


def phase_costs(workload: str, repeats: int = 9) -> dict[str, float]:
    """Milliseconds of each phase each time it happens: medians, interleaved with SGD.

    One run does everything at every step, another nothing but preconditioning.
    """
    busy, idle = Run(workload, 1, 1), Run(workload, 10**9, 10**9)
    model, batch, loss = WORKLOADS[workload]()
    sgd = training_step(model, batch, loss, build("sgd", model, Config()))
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        started = time.perf_counter()
        sgd()
        samples.setdefault("sgd", []).append(time.perf_counter() - started)
        for run, names in ((busy, (*PER_FACTOR, "refresh")), (idle, ("precondition", "rescale"))):
            with run.optimizer.timed() as seconds:
                run.step()
            for name in names:
                samples.setdefault(name, []).append(seconds[name])
    return {name: 1e3 * statistics.median(values) for name, values in samples.items()}


def assemble(costs: dict[str, float], interval: tuple[int, int]) -> float:
    """What a mean step of this interval spends on curvature, as a share of an SGD step."""
    factor_every, refresh_every = interval
    per_factor = sum(costs[name] for name in PER_FACTOR)
    per_step = costs["precondition"] + costs["rescale"]
    total = per_step + per_factor / factor_every + costs["refresh"] / refresh_every
    return total / costs["sgd"]


class SyncCounter(TorchDispatchMode):
    """Counts operations that make the host wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        moved = name == "_to_copy" and (kwargs or {}).get("device") is not None
        self.count += name in self.WAITING or moved
        return func(*args, **(kwargs or {}))


def syncs(workload: str) -> dict[str, int]:
    """Host syncs of one factor step and of one plain step, optimizer included."""
    counts = {}
    for name, every in (("factor step", 1), ("plain step", 10**6)):
        run = Run(workload, every, 10**9)
        with SyncCounter() as counter:
            run.step()
        counts[name] = counter.count
    return counts


def memory(workload: str) -> dict[str, int]:
    """Bytes of statistics and solutions that exist, beside the closed form of the summary."""
    run = Run(workload, 1, 1)
    entries = run.optimizer.state_dict()["state"].values()
    tensors = [
        value
        for entry in entries
        for key, value in entry.items()
        if key.startswith("kronfac.") and value.dim() > 0 and value.is_floating_point()
    ]
    closed = 0
    for state in run.optimizer.layers:
        *groups, d_out, d_in = state.layer.matrix_shape
        blocks = groups[0] if groups else 1
        if state.layer.unit_wise:  # F, its eigenvectors and eigenvalues
            closed += 4 * blocks * (d_in**2 + d_in**2 * (d_in > 1) + d_in)
        elif state.layer.picks_columns:  # A is diagonal
            closed += 4 * (2 * d_out**2 + d_out + 2 * d_in)
        else:
            closed += 4 * blocks * (2 * (d_in**2 + d_out**2) + d_in + d_out)
    return {"measured": sum(v.numel() * v.element_size() for v in tensors), "closed_form": closed}


def peers(workload: str) -> list[dict[str, Any]]:
    """The same table for optimizers from elsewhere, all of them at both intervals."""
    rows = []
    for factor_every, refresh_every in INTERVALS:
        config = Config(
            factor_every=factor_every,
            refresh_every=refresh_every,
            per_token=workload == "transformer",
        )
        calls, missing = peer_steps(WORKLOADS[workload], ("sgd", *OTHERS), config)
        rounds = 3 if refresh_every <= 10 else 1
        timings = interleave(calls, rounds=rounds, calls=refresh_every, warmup=2)
        for name in OTHERS:
            row: dict[str, Any] = {"name": name, "interval": f"{factor_every}/{refresh_every}"}
            row |= {"missing": missing[name]} if name in missing else _ratio(timings, name)
            rows.append(row)
    return rows


def _ratio(timings: dict[str, Timing], name: str) -> dict[str, Any]:
    ratio = timings[name].ratio(timings["sgd"])
    return {
        "ms": 1e3 * timings[name].spread.median,
        "overhead": ratio.median - 1,
        "quartiles": [ratio.low - 1, ratio.high - 1],
    }


def report(workload: str, rounds: int, with_peers: bool) -> dict[str, Any]:
    print(f"\n{workload}")
    rows = [
        measure(workload, base, solver, interval, rounds)
        for base, solver, intervals in SETTINGS[workload]
        for interval in intervals
    ]
    costs = phase_costs(workload)
    assembled = assemble(costs, (50, 500))
    rows.append(
        {"base": "sgd", "interval": "50/500", "base_ms": costs["sgd"], "overhead": assembled}
    )
    cells = []
    for row in rows:
        interval = tuple(int(part) for part in row["interval"].split("/"))
        goal = GOALS.get((workload, row["base"], interval))
        cells.append(
            [
                f"{row['base']} {row['interval']}{_solver(row)}",
                f"{row['base_ms']:.1f}",
                f"{row['kfac_ms']:.1f}" if "kfac_ms" in row else "",
                f"{row['overhead']:+.1%}",
                _spread(row),
                "" if goal is None else f"{goal:+.0%}",
            ]
        )
    print(table(["base", "base ms", "K-FAC ms", "over base", "quartiles", "goal"], cells))
    phases = [[name, f"{ms:.2f}"] for name, ms in costs.items()]
    print(table(["phase", "ms each time"], phases))
    waits, held = syncs(workload), memory(workload)
    print(f"host syncs: {waits}")
    print(f"state: {held['measured']:,} bytes, closed form {held['closed_form']:,}")
    result = {"kfac": rows, "phases_ms": costs, "syncs": waits, "memory": held}
    if with_peers:
        others = peers(workload)
        shown = [
            [r["name"], r["interval"], r.get("missing") or f"{r['overhead']:+.1%}", _spread(r)]
            for r in others
        ]
        print(table(["peer", "interval", "over SGD", "quartiles"], shown))
        print("\n".join(f"  {name}: {PEERS[name].note}" for name in OTHERS))
        result["peers"] = others
    return result


def _solver(row: dict[str, Any]) -> str:
    solver = row.get("solver", "auto")
    return "" if solver == "auto" else f" {solver}"


def _spread(row: dict[str, Any]) -> str:
    quartiles = row.get("quartiles")
    return f"[{quartiles[0]:+.0%}, {quartiles[1]:+.0%}]" if quartiles else "assembled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    print(machine_line())
    for name in arguments.workload:
        results = read_json("overhead")  # workloads that were not asked for keep their numbers
        found = report(name, arguments.rounds, not arguments.no_peers)
        write_json("overhead", results | {name: results.get(name, {}) | found})


if __name__ == "__main__":
    main()
