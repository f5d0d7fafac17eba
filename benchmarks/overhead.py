"""What a K-FAC step costs over its base, where it goes, and what each lever saves.

    python benchmarks/overhead.py [table ablation tokens flops memory] [--workload resnet20 ...]

- *table*: means of whole refresh intervals, K-FAC and all peers in one interleaved run. A median step at
  10/100 would contain no curvature work at all.
- *ablation*: the same at 1/10 with one lever changed at a time.
- *tokens*: overhead against the size of a step, assembled from the phases: each costs the same whenever
  it happens.
- *flops*: operations of each phase, the least that it needs, and its share of the machine's peak.
- *memory*: the most that a process has used for its model, optimizer and steps.

Results are kept after each part, and a part that is there is not measured again unless `--again`. Without
other work on the machine all of it takes about 20 minutes on two cores; each part says what it expects.
`--quick` takes one step of everything, to see that it runs, and keeps nothing.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from _common import Timing, interleave, machine_line, read_json, table, write_json
from _models import WORKLOADS
from _overhead import (
    PER_FACTOR,
    PER_STEP,
    Step,
    assemble,
    base_step,
    counted_flops,
    gemm_peak,
    kfac_step,
    least_flops,
    peak_bytes,
    peer_steps,
    phase_costs,
)
from _peers import PEERS

INTERVALS = ((1, 10), (10, 100))
#: What K-FAC stands before in the table; everything else is over SGD.
BASES = {"transformer": ("sgd", "adamw"), "llama": ("sgd", "adamw")}
#: What users are promised, and what they would like.
GOALS = {
    ("resnet20", "1/10"): "+35 %, +20 %",
    ("resnet20", "10/100"): "+7 %, +4 %",
    ("transformer", "1/10"): "+60 %, +40 %",
    ("transformer", "10/100"): "+20 %, +12 %",
    ("mlp", "10/100"): "+300 %, +150 %",
}
#: One lever at a time, off or on.
LEVERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rows=None": {"rows": None},
    "share_inputs=False": {"share_inputs": False},
    "products='float32'": {"products": "float32"},
    "block_dim=None": {"block_dim": None},
    "block_dim=None, solver='eigen'": {"block_dim": None, "solver": "eigen"},
    "rescale='unit' (no polar)": {"rescale": "unit"},
    "rescale=None": {"rescale": None},
    "solver='cholesky'": {"solver": "cholesky"},
    "exclude norms": {"exclude": [torch.nn.LayerNorm, torch.nn.BatchNorm2d, torch.nn.RMSNorm]},
}
#: The same for one workload: the MLP's layers are wider than its batch has rows.
OWN_LEVERS: dict[str, dict[str, dict[str, Any]]] = {
    "mlp": {
        f"solver={solver!r}, row_form=False": {"solver": solver, "row_form": False}
        for solver in ("separable", "cholesky")
    }
}
#: Sequences of 64 tokens in a step.
SEQUENCES = (8, 16, 32, 64, 128, 256)


def timed(steps: Mapping[str, Step], period: int, rounds: int, quick: bool) -> dict[str, Timing]:
    """Time steps in turns, and say beforehand how long that will take."""
    if quick:
        return interleave(steps, rounds=1, calls=1, warmup=0)
    seconds = 0.0
    for step in steps.values():
        started = time.perf_counter()
        step()
        seconds += time.perf_counter() - started
    print(f"  about {seconds * period * rounds / 60:.1f} minutes", flush=True)
    return interleave(steps, rounds=rounds, calls=period, warmup=1)


def whole_table(workload: str, quick: bool) -> list[dict[str, Any]]:
    """K-FAC over its base and all peers over SGD, in one interleaved run for each interval."""
    rows = []
    for interval in INTERVALS:
        own = BASES.get(workload, ("sgd",))
        kfac = {f"kfac over {base}": kfac_step(workload, interval, base)[0] for base in own}
        if workload == "mlp":
            kfac["kfac, unit over sgd"] = kfac_step(workload, interval, rescale="unit")[0]
            two = {"rescale": "unit", "solver": "separable"}
            kfac["kfac, unit, separable over sgd"] = kfac_step(workload, interval, **two)[0]
        others, missing = peer_steps(workload, interval)
        alone = {base: base_step(workload, base) for base in ("sgd", *own)}
        rounds = 1 if interval[1] >= 100 else 3  # ten minutes in all
        timings = timed(alone | kfac | others, interval[1], rounds, quick)
        for name in (*kfac, *others, *own[1:]):
            base = name.split()[-1] if name in kfac else "sgd"
            rows.append(_row(name, base, interval, timings))
        rows += [
            {"name": n, "interval": _shown(interval), "missing": m} for n, m in missing.items()
        ]
    return rows


def _row(
    name: str, base: str, interval: tuple[int, int], timings: Mapping[str, Timing]
) -> dict[str, Any]:
    ratio = timings[name].ratio(timings[base])
    return {
        "name": name,
        "base": base,
        "interval": _shown(interval),
        "base_ms": 1e3 * timings[base].spread.median,
        "ms": 1e3 * timings[name].spread.median,
        "overhead": ratio.median - 1,
        "quartiles": [ratio.low - 1, ratio.high - 1],
    }


def _shown(interval: tuple[int, int]) -> str:
    return f"{interval[0]}/{interval[1]}"


def show_table(workload: str, rows: list[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        if "missing" in row:
            cells.append([f"{row['interval']} {row['name']}", "", row["missing"], "", ""])
            continue
        low, high = row["quartiles"]
        own = row["name"].startswith("kfac over")
        goal = GOALS.get((workload, row["interval"]), "") if own else ""
        over = f"{row['overhead']:+.1%}"
        name = f"{row['interval']} {row['name']}"
        cells.append([name, f"{row['ms']:.1f}", over, f"[{low:+.0%}, {high:+.0%}]", goal])
    print(table(["", "ms", "over base", "quartiles", "bar, goal"], cells))
    print("\n".join(f"  {name}: {PEERS[name].note}" for name in PEERS if name != "sgd"))


def ablation(workload: str, quick: bool) -> list[dict[str, Any]]:
    """One lever changed at a time, at 1/10."""
    steps: dict[str, Step] = {"sgd": base_step(workload, "sgd")}
    levers = LEVERS | OWN_LEVERS.get(workload, {})
    for name, options in levers.items():
        steps[name] = kfac_step(workload, (1, 10), **options)[0]
    timings = timed(steps, 10, 2, quick)
    return [_row(name, "sgd", (1, 10), timings) for name in levers]


def show_ablation(workload: str, rows: list[dict[str, Any]]) -> None:
    whole = rows[0]["ms"]
    cells = [
        [row["name"], f"{row['ms']:.1f}", f"{row['overhead']:+.1%}", f"{row['ms'] / whole:.2f}"]
        for row in rows
    ]
    print(table(["lever", "ms", "over base", "times as long"], cells))


def tokens(workload: str, quick: bool) -> list[dict[str, Any]]:
    """Overhead against tokens per step."""
    rows = []
    sizes = SEQUENCES[:1] if quick else SEQUENCES
    for size in sizes if workload in ("transformer", "llama") else ():
        costs = phase_costs(workload, size, 1 if quick else 5)
        over = {_shown(interval): assemble(costs, interval) for interval in INTERVALS}
        rows.append({"tokens": 64 * size, "overhead": over, "seconds": costs})
        print(f"  {64 * size} tokens", flush=True)
    return rows


def show_tokens(workload: str, rows: list[dict[str, Any]]) -> None:
    cells = [
        [row["tokens"], f"{1e3 * row['seconds']['base']:.1f}"]
        + [f"{row['overhead'][_shown(interval)]:+.1%}" for interval in INTERVALS]
        for row in rows
    ]
    print(table(["tokens in a step", "base ms", "1/10", "10/100"], cells) if rows else "  no text")


def flops(workload: str, quick: bool) -> dict[str, Any]:
    """Operations, the least that are needed, seconds, and the share of the peak."""
    costs = phase_costs(workload, None, 1 if quick else 5)
    seconds = {
        "base": costs["base"],
        "observe": sum(costs[name] for name in PER_FACTOR),
        "refresh": costs["refresh"],
        **{name: costs[name] for name in PER_STEP},
    }
    return {
        "peak": gemm_peak(),
        "flops": counted_flops(workload),
        "least": least_flops(workload),
        "seconds": seconds,
    }


def show_flops(workload: str, found: dict[str, Any]) -> None:
    cells = []
    for name, count in found["flops"].items():
        least, seconds = found["least"].get(name), found["seconds"][name]
        share = count / seconds / found["peak"]
        limit = "" if least is None else f"{least / 1e9:.2f}"
        cells.append([name, f"{count / 1e9:.2f}", limit, f"{1e3 * seconds:.1f}", f"{share:.0%}"])
    print(table(["phase", "GFLOP", "least", "ms", "of peak"], cells))
    print(f"  peak: {found['peak'] / 1e9:.0f} GFLOP/s in single precision")


def memory(workload: str, quick: bool) -> dict[str, int]:
    """Peaks of processes of their own."""
    found = {}
    for name in ("adamw", "soap", "kfac"):
        command = [sys.executable, __file__, "--peak", workload, name]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            found[name] = int(answer.stdout.split()[-1])
    return found


def show_memory(workload: str, found: dict[str, int]) -> None:
    cells = [[n, f"{b / 1e6:.0f}", f"{b / found['adamw']:.2f}"] for n, b in found.items()]
    print(table(["optimizer", "MB at most", "times AdamW's"], cells))


STAGES: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "table": (whole_table, show_table),
    "ablation": (ablation, show_ablation),
    "tokens": (tokens, show_tokens),
    "flops": (flops, show_flops),
    "memory": (memory, show_memory),
}


def keep(workload: str, stage: str, found: Any) -> None:
    """Write a part beside those that are there; what earlier versions measured goes."""
    results = read_json("overhead")
    known = {name: one for name, one in results.get(workload, {}).items() if name in STAGES}
    write_json("overhead", results | {workload: known | {stage: found}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--workload", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--quick", action="store_true", help="see that everything runs")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak_bytes(*arguments.peak))
        return
    unknown = set(arguments.stages) - set(STAGES)
    if unknown:
        parser.error(f"there is no stage {min(unknown)!r}; choose among {', '.join(STAGES)}.")
    print(machine_line())
    for stage in arguments.stages or STAGES:
        measure, show = STAGES[stage]
        for workload in arguments.workload:
            print(f"\n{stage}: {workload}", flush=True)
            found = read_json("overhead").get(workload, {}).get(stage)
            if found is None or arguments.again or arguments.quick:
                found = measure(workload, arguments.quick)
            show(workload, found)
            if not arguments.quick:
                keep(workload, stage, found)


if __name__ == "__main__":
    main()
