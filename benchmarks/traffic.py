"""What ResNet-50 sends at 10/100 in large worlds, beside kfac-pytorch's closed form.

    python benchmarks/traffic.py [--ranks 8 16 64 1024] [--quick]

Bytes that one rank sends in 100 steps by ring formulas (all-reduce 2(P-1)/P·m, reduce and broadcast m),
the rank that sends most, statistics every 10 steps and solutions every 100; the gradients of DDP are
not among them. Norms are left out, as kfac-pytorch leaves them.

Ours is a closed form of the placement. It is checked against the bytes that the engine itself counts,
exactly, in fake worlds of the same sizes: with the ResNet-50, and with one of an eighth of its width
by either solver (several ranks may divide a Cholesky inverse among them, no eigendecomposition).

Theirs (KAISA's, in single precision, with the defaults): all ranks reduce whole factors at every
factor step; eigenvectors and the divisor of the eigenvalues go to the gradient workers, and
preconditioned gradients to all others. It has no replicated scheme; D-KFAC with its factors stands
there.
"""

import argparse
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from _common import machine_line, table, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import kronfac
from kronfac.distributed.comm.traffic import Kind, ring_bytes
from kronfac.distributed.workload import unit_of
from kronfac.placement.balance import longest_first
from kronfac.placement.place import Placement, nearest_divisor, place
from kronfac.placement.scheme import Distribute, Hybrid, as_distribute

RANKS = (8, 16, 64, 1024)
STEPS, FACTOR_EVERY, REFRESH_EVERY = 100, 10, 100
TRAVELLING = ("reduce", "share", "spread")
#: The schemes that both have, and ours alone.
SCHEMES: dict[str, Any] = {
    "comm-opt": "comm-opt",
    "hybrid(0.5)": Hybrid(0.5),
    "mem-opt": "mem-opt",
    "replicated": "replicated",
}
ALONE: dict[str, Any] = {
    "replicated, bf16": Distribute("replicated", wire_dtype=torch.bfloat16),
    "comm-opt, whole": Distribute("comm-opt", split=False),
    "layer-parallel": "layer-parallel",
    "local": "local",
}
#: In these a rank of any world solves everything.
EVERYWHERE = ("replicated", "replicated, bf16")
#: How many times fewer, by scheme and phase.
GOALS = {("comm-opt", "all"): 10, ("replicated", "all"): 20, ("mem-opt", "reduce"): 10}
#: The full-sized engine runs in a world of this size.
FULL_RANKS = 64
MB = 1e6


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution around a shortcut."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            _conv(channels_in, width, 1),
            nn.ReLU(),
            _conv(width, width, 3, stride),
            nn.ReLU(),
            _conv(width, out, 1),
        )
        changes = stride != 1 or channels_in != out
        self.shortcut = _conv(channels_in, out, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, 4 * width, H / stride, W / stride]."""
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


def resnet50(width: int = 64, classes: int = 1000) -> nn.Sequential:
    """53 convolutions and a classifier; `width` is that of the first stage."""
    layers: list[nn.Module] = [_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, 2 if stage and block == 0 else 1))
            channels = 4 * inner
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *pooled)


def thin_resnet50() -> nn.Sequential:
    """The same layers at an eighth of their width."""
    return resnet50(width=8, classes=125)


def optimizer_for(model: nn.Module, **options: Any) -> kronfac.KFAC:
    """K-FAC of convolutions and classifier, with so much damping that two images are enough."""
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    return kronfac.KFAC(
        model, base, damping=1.0, exclude=nn.BatchNorm2d, early_refresh=False, **options
    )


# The closed forms


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends, by phase, and bytes that it holds."""

    reduce: float = 0.0
    share: float = 0.0
    spread: float = 0.0
    held: float = 0.0

    @property
    def all(self) -> float:
        """Bytes sent in all phases."""
        return self.reduce + self.share + self.spread

    @classmethod
    def most(cls, ranks: Iterable["Traffic"]) -> "Traffic":
        """That of the rank that sends most, and what is held where most is held."""
        found = list(ranks)
        busiest = max(found, key=lambda one: one.all)
        return replace(busiest, held=max(one.held for one in found))


class Shapes:
    """A model in numbers."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        states = optimizer_for(model, **options).layers
        self.units = [unit_of(one.name, one, True, one.name) for one in states]
        self.sides = [one.layer.matrix_shape[::-1] for one in states]
        self.statistics = {one.name: one.block.cost.statistics_bytes for one in states}
        self.solutions = {one.name: one.block.cost.solution_bytes for one in states}
        self.weights = sum(4 * p.numel() for p in model.parameters())

    def place(self, settings: Distribute, ranks: int, refresh_every: int) -> Placement:
        """Who does what."""
        return place(
            self.units,
            ranks,
            settings.scheme,
            refresh_every=refresh_every,
            balanced=settings.balanced,
            split=settings.split,
        )


def theirs(sides: Sequence[tuple[int, int]], scheme: Any, ranks: int) -> Traffic:
    """kfac-pytorch; `sides` are `(dA, dG)` of each layer."""
    squares = 4 * sum(a * a + g * g for a, g in sides)
    reduce = STEPS // FACTOR_EVERY * ring_bytes("all_reduce", squares, ranks)
    if scheme == "replicated":  # D-KFAC: factors and their inverses everywhere
        return Traffic(reduce, held=2 * squares)
    fractions = {"comm-opt": 1.0, "mem-opt": 1 / ranks}
    fraction = scheme.fraction if isinstance(scheme, Hybrid) else fractions[scheme]
    workers = nearest_divisor(ranks, fraction)
    columns = longest_first([a**3 + g**3 for a, g in sides], ranks // workers)
    solutions = [0] * (ranks // workers)
    for column, (a, g) in zip(columns, sides, strict=True):
        solutions[column] += 4 * (a * a + g * g + a * g)
    gradients = 4 * sum(a * g for a, g in sides)
    return Traffic(
        reduce=reduce,
        share=STEPS // REFRESH_EVERY * ring_bytes("broadcast", max(solutions), workers),
        spread=STEPS * ring_bytes("broadcast", gradients, ranks // workers),
        held=squares + max(solutions),
    )


def ours(
    shapes: Shapes,
    placement: Placement,
    settings: Distribute,
    rank: int,
    refreshes: int = STEPS // REFRESH_EVERY,
    steps: int = STEPS,
) -> Traffic:
    """Ours on one rank.

    Between refreshes every rank adds up what it observes itself; solutions are with their workers.
    """
    grid, name = placement.grid, placement.scheme
    wire = 1.0 if settings.wire_dtype is None else settings.wire_dtype.itemsize / 4
    reduce = share = spread = held = 0.0
    for unit in shapes.units:
        is_worker = placement.is_worker(unit.name, rank)
        held += shapes.statistics[unit.name] * (is_worker or name != "local")
        held += shapes.solutions[unit.name] * is_worker
        for statistic in unit.statistics if name != "local" else ():
            needs = placement.needs(unit, statistic.key)
            kind: Kind = "reduce" if needs is not None and len(needs) == 1 else "all_reduce"
            reduce += ring_bytes(kind, statistic.bytes, grid.size)
        for part in unit.parts if is_worker else ():
            task = placement.assignments[unit.name].tasks[part.name]
            size = part.solution_elements * unit.itemsize
            if task.split:
                share += ring_bytes("all_reduce", size, grid.workers)
            elif task.rank is not None:
                share += ring_bytes("broadcast", size, grid.workers)
        spread += ring_bytes("broadcast", unit.gradient_bytes, grid.columns)
    if name == "layer-parallel":  # weights, which are never rounded
        spread = ring_bytes("broadcast", shapes.weights, grid.size) / wire
    return Traffic(refreshes * reduce * wire, refreshes * share * wire, steps * spread * wire, held)


# The engine in a fake world


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[None]:
    """A world in which nobody answers, but everything that is sent is counted."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def keep_gradients(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Leave the gradients as they are."""
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    result.set_result(bucket.buffer())
    return result


def counted(model: nn.Module, distribute: Any, ranks: int, rank: int, **options: Any) -> Traffic:
    """What one rank of the engine sends in a refresh interval of 4 steps, and what it then holds."""
    for module in model.modules():  # two images are too few to normalise by
        module.train(not isinstance(module, nn.BatchNorm2d))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with fake_world(ranks, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, keep_gradients)  # fake messages have no result that DDP takes
        optimizer = optimizer_for(
            ddp, distribute=distribute, factor_every=2, refresh_every=4, **options
        )
        for _ in range(4):
            optimizer.zero_grad()
            ddp(images).logsumexp(1).mean().backward()
            optimizer.step()
        sent = optimizer.stats()["sent"]
        held = 0
        for state in optimizer.layers:
            sums = [running.sum for running in state.running.values()]
            for tensor in (*sums, *(state.solution or {}).values()):
                held += 0 if tensor is None else tensor.numel() * tensor.element_size()
        optimizer.detach()
    return Traffic(*(sent[phase] for phase in TRAVELLING), held=held)


def check(
    model: nn.Module, ranks: int, rank: int, name: str, distribute: Any, **options: Any
) -> dict[str, Any]:
    """Compare the engine with the closed form; a difference ends the benchmark."""
    shapes, settings = Shapes(model, **options), as_distribute(distribute)
    found = counted(model, distribute, ranks, rank, **options)
    placement = shapes.place(settings, ranks, refresh_every=4)
    expected = ours(shapes, placement, settings, rank, refreshes=1, steps=4)
    for field in (*TRAVELLING, "held"):
        counts = getattr(found, field), round(getattr(expected, field))
        if abs(counts[0] - counts[1]) > 1:  # each is rounded to whole bytes
            raise AssertionError(
                f"{name} on rank {rank} of {ranks}: {field} is {counts[0]:,} bytes, "
                f"and {counts[1]:,} by the closed form."
            )
    return {"scheme": name, "ranks": ranks, "rank": rank, "held": found.held}


# Tables


def compare(shapes: Shapes, ranks: int) -> dict[str, Any]:
    """Both closed forms for one size of the world, by scheme."""
    result: dict[str, Any] = {}
    for name, distribute in (SCHEMES | ALONE).items():
        settings = as_distribute(distribute)
        placement = shapes.place(settings, ranks, REFRESH_EVERY)
        everyone = (ours(shapes, placement, settings, rank) for rank in range(ranks))
        entry = {"ours": Traffic.most(everyone)}
        if name not in ALONE:
            entry["theirs"] = theirs(shapes.sides, settings.scheme, ranks)
        result[name] = entry
    return result


def show(ranks: int, compared: dict[str, Any]) -> None:
    """Print the traffic of one size of the world."""
    cells = []
    for name, entry in compared.items():
        mine, other = entry["ours"], entry.get("theirs")
        phases = [
            one for one in TRAVELLING if getattr(mine, one) or (other and getattr(other, one))
        ]
        for phase in [*phases, "all"] if len(phases) > 1 else ["all"]:
            sent, against = getattr(mine, phase), getattr(other, phase) if other else 0.0
            goal = GOALS.get((name, phase))
            cells.append(
                [
                    f"{name}: {phase}",
                    f"{against / MB:,.0f}" if other else "",
                    f"{sent / MB:,.0f}",
                    f"{against / sent:.1f}×" if against and sent else "",
                    f"{goal}×" if goal else "",
                ]
            )
    print(f"\n{ranks} ranks: MB sent by a rank in {STEPS} steps")
    print(table(["scheme: phase", "kfac-pytorch", "kronfac", "fewer", "goal"], cells))
    bound = compared["replicated"]["theirs"].all / compared["replicated"]["ours"].all
    print(f"replicated: {bound:.2f}×, and not 20.00×, because a triangle has its diagonal.")


def show_memory(ranks: int, compared: dict[str, Any], measured: dict[str, float]) -> None:
    """Print what a rank holds."""
    cells = []
    for name, entry in compared.items():
        other = entry.get("theirs")
        cells.append(
            [
                name,
                f"{other.held / MB:,.0f}" if other else "",
                f"{entry['ours'].held / MB:,.0f}",
                f"{measured[name] / MB:,.0f}" if name in measured else "",
            ]
        )
    print(f"\n{ranks} ranks: MB of statistics and solutions on the fullest rank, buffers apart")
    print(table(["scheme", "kfac-pytorch", "kronfac", "of them on rank 0, measured"], cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--quick", action="store_true", help="leave out the full-sized engine")
    arguments = parser.parse_args()
    print(machine_line())
    checks = [
        check(thin_resnet50(), ranks, rank, name, distribute, solver=solver)
        for ranks in arguments.ranks
        for name, distribute in (SCHEMES | ALONE).items()
        for rank, solver in ((0, "cholesky"), (ranks - 1, "eigen"))
    ]
    print(f"{len(checks)} runs of an engine of an eighth of the width equal the closed form.")
    full = []
    if not arguments.quick:
        for name, distribute in (SCHEMES | ALONE).items():
            if name not in EVERYWHERE:  # one rank would solve everything
                full.append(check(resnet50(), FULL_RANKS, 0, name, distribute))
        print(f"{len(full)} runs of the full-sized engine equal it too ({FULL_RANKS} ranks).")
    shapes = Shapes(resnet50())
    results: dict[str, Any] = {}
    for ranks in arguments.ranks:
        compared = compare(shapes, ranks)
        show(ranks, compared)
        measured = {one["scheme"]: one["held"] for one in full if one["ranks"] == ranks}
        show_memory(ranks, compared, measured)
        results[str(ranks)] = {
            name: {whose: asdict(one) | {"all": one.all} for whose, one in entry.items()}
            for name, entry in compared.items()
        }
    if not arguments.quick:
        write_json("traffic", {"sent_in_100_steps": results, "checks": checks, "full": full})


if __name__ == "__main__":
    main()
