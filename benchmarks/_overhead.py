"""What `overhead.py` measures: whole intervals, phases, operations and memory of one training step."""

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _models import WORKLOADS, Workload
from _peers import Config, PeerUnavailable, build, training_step
from torch.utils.flop_counter import FlopCounterMode

import kronfac
from kronfac.linalg.orthogonal import orthogonal_flops
from kronfac.state.layer_state import LayerState

Step = Callable[[], Any]
Interval = tuple[int, int]

#: Peers of the table, beside their base.
OTHERS = ("soap", "shampoo", "singd", "muon", "kfac-pytorch")
#: What is done at each update of the statistics, each refresh and each step.
PER_FACTOR = ("observe-input", "observe-output", "reduce")
PER_STEP = ("precondition", "rescale")
TEXTS = ("transformer", "llama")


def kfac_step(
    workload: str, interval: Interval, base: str = "sgd", size: int | None = None, **options: Any
) -> tuple[Step, kronfac.KFAC]:
    """A training step with K-FAC over a base optimizer, past its first refresh.

    Over SGD momentum is taken before preconditioning, over AdamW there is none but AdamW's.
    """
    made = workload_of(workload, size)
    parameters = made.model.parameters()
    if base == "sgd":
        stepper = torch.optim.SGD(parameters, lr=1e-3)
        options = {"momentum": 0.9, "nesterov": True, **options}
    else:
        stepper = torch.optim.AdamW(parameters, lr=1e-3)
        warnings.filterwarnings("ignore", message="AdamW divides")  # what it costs is asked here
    optimizer = kronfac.KFAC(
        made.model,
        stepper,
        factor_every=interval[0],
        refresh_every=interval[1],
        early_refresh=False,
        loss_average="token" if workload in TEXTS else "batch",
        **options,
    )
    step = training_step(*made, optimizer)
    step()
    return step, optimizer


def workload_of(name: str, size: int | None = None) -> Workload:
    return WORKLOADS[name]() if size is None else WORKLOADS[name](size)


def base_step(name: str, base: str, size: int | None = None) -> Step:
    """A training step of a base optimizer alone."""
    made = workload_of(name, size)
    return training_step(*made, build(base, made.model, Config()))


def peer_steps(workload: str, interval: Interval) -> tuple[dict[str, Step], dict[str, str]]:
    """Training steps of the peers, each with a model of its own, and why some are left out."""
    config = Config(
        factor_every=interval[0], refresh_every=interval[1], per_token=workload in TEXTS
    )
    steps, missing = {}, {}
    for name in OTHERS:
        made = workload_of(workload)
        try:
            step = training_step(*made, build(name, made.model, config))
            step()
        except PeerUnavailable as reason:
            missing[name] = str(reason)
        except Exception as error:  # a peer that breaks is no reason to stop
            missing[name] = f"fails: {type(error).__name__}"
        else:
            steps[name] = step
    return steps, missing


def phase_costs(workload: str, size: int | None = None, repeats: int = 9) -> dict[str, float]:
    """Seconds of each phase each time it happens: medians, interleaved with SGD.

    One run does everything at every step, another nothing but preconditioning.
    """
    busy, idle = (kfac_step(workload, (n, n), "sgd", size) for n in (1, 10**9))
    alone = base_step(workload, "sgd", size)
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        started = time.perf_counter()
        alone()
        samples.setdefault("base", []).append(time.perf_counter() - started)
        for (step, optimizer), names in ((busy, (*PER_FACTOR, "refresh")), (idle, PER_STEP)):
            with optimizer.timed() as seconds:
                step()
            for name in names:
                samples.setdefault(name, []).append(seconds[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def assemble(costs: dict[str, float], interval: Interval) -> float:
    """What a mean step of an interval spends on curvature, as a share of a step of the base."""
    per_factor = sum(costs[name] for name in PER_FACTOR) / interval[0]
    per_step = sum(costs[name] for name in PER_STEP)
    return (per_step + per_factor + costs["refresh"] / interval[1]) / costs["base"]


# --- operations ------------------------------------------------------------------------------


def counted_flops(workload: str) -> dict[str, float]:
    """Operations of products in each phase: forward and backward, and what K-FAC adds to them.

    A refresh is counted by what its decompositions are known to take (9d³ each).
    """
    busy, optimizer = kfac_step(workload, (1, 10**9))
    idle, _ = kfac_step(workload, (10**9, 10**9))
    alone = base_step(workload, "sgd")
    total = {name: _flops(step) for name, step in (("s", busy), ("o", idle), ("b", alone))}
    states = optimizer.layers
    polar = sum(orthogonal_flops(*s.layer.matrix_shape) for s in states if s.rule == "orthogonal")
    return {
        "base": total["b"],
        "observe": total["s"] - total["o"],
        "refresh": float(sum(_refresh(state) for state in states)),
        "precondition": total["o"] - total["b"] - polar,
        "rescale": float(polar),
    }


def least_flops(workload: str) -> dict[str, float]:
    """What these phases need at least, with the rows that are taken.

    A second moment of R rows of width d takes R·d² operations by symmetry (half of 2·R·d²), one of an
    input that layers share is taken once.
    """
    step, optimizer = kfac_step(workload, (1, 10**9))
    rows: dict[tuple[str, str], float] = {}
    for state in optimizer.layers:
        _count_rows(state, rows)
    step()
    states = optimizer.layers
    moments = sum(
        rows.get((s.lender(n).name, one.source), 0.0) * _volume(one.shape)
        for s in states
        for n, one in s.block.statistics.items()
        if s.lender(n) is s and one.symmetric
    )
    return {
        "observe": moments,
        "refresh": float(sum(_refresh(state) for state in states)),
        "precondition": float(sum(state.block.cost.precondition_flops for state in states)),
    }


def _count_rows(state: LayerState, rows: dict[tuple[str, str], float]) -> None:
    """Note how many rows a layer observes on each side."""
    for side in ("input", "output"):
        observe = getattr(state.block, f"observe_{side}")

        def watched(seen: Any, *rest: Any, observe: Any = observe, side: str = side) -> Any:
            key = state.name, side
            rows[key] = rows.get(key, 0.0) + float(seen.samples * seen.positions)
            return observe(seen, *rest)

        setattr(state.block, f"observe_{side}", watched)


def _volume(shape: tuple[int, ...]) -> float:
    return float(torch.Size(shape).numel())


def _refresh(state: LayerState) -> int:
    """Operations of a layer's refresh, without those of parts that another layer has solved."""
    taken = () if state.group is None or state.group.leader is state else state.group.parts
    return sum(part.flops for name, part in state.block.parts.items() if name not in taken)


def _flops(step: Step) -> float:
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def gemm_peak(repeats: int = 7) -> float:
    """Operations per second of a large product in single precision, the best of a few."""
    one, other = torch.randn(1536, 1536), torch.randn(1536, 1536)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        one @ other
        best = min(best, time.perf_counter() - started)
    return 2 * 1536**3 / best


# --- memory ----------------------------------------------------------------------------------


def peak_bytes(workload: str, name: str) -> int:
    """How much memory a process uses at most in a few steps, beyond what it had before its model.

    Linux says it (`/proc`), and forgets its earlier peak on demand.
    """
    torch.randn(256, 256) @ torch.randn(256, 256)  # what products keep for good
    Path("/proc/self/clear_refs").write_text("5")
    before = _most_memory()
    if name == "kfac":
        step, _ = kfac_step(workload, (1, 1))
    else:
        made = workload_of(workload)
        step = training_step(*made, build(name, made.model, Config(refresh_every=1)))
    for _ in range(3):
        step()
    return _most_memory() - before


def _most_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
