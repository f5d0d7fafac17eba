"""The ledger of real ranks equals what each scheme must send, written down from the model's shapes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.placement.place import Placement
from tests.distributed import closed_form
from tests.distributed.models import KINDS
from tests.distributed.ranks import run

SCHEMES: dict[str, Any] = {
    "replicated": "replicated",
    "comm-opt": "comm-opt",
    "mem-opt": "mem-opt",
    "hybrid": kronfac.Hybrid(0.5),
    "local": "local",
    "layer-parallel": "layer-parallel",
    "layer-parallel without DDP": "layer-parallel",
    "spd": "spd",
}
#: Some layers have several ranks that work on them, or several layers have one each.
SHARES = {"comm-opt", "hybrid", "spd"}
#: Schemes whose bytes are counted on four ranks by default; `-m slow` counts all.
OFTEN = {"spd"}
SPREADS = {"mem-opt", "hybrid", "local", "layer-parallel", "layer-parallel without DDP"}


@dataclass(frozen=True)
class Run:
    """Options, and how often statistics are added and solutions made in so many steps."""

    steps: int
    reductions: int
    refreshes: int
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of ``kronfac.Distribute``."""


RUNS = {
    "every step": Run(3, 3, 3, {"factor_every": 1, "refresh_every": 1}),
    # Statistics are observed at t = 0, 2, 4, ... and at the early refreshes.
    "deferred, early refreshes at t = 1, 2, 4, 8": Run(
        12, 6, 6, {"factor_every": 2, "refresh_every": 10}
    ),
    "deferred, no early refreshes": Run(
        12, 2, 2, {"factor_every": 2, "refresh_every": 10, "early_refresh": False}
    ),
    "not deferred": Run(
        12,
        6,
        2,
        {"factor_every": 2, "refresh_every": 10, "early_refresh": False},
        {"deferred": False},
    ),
    # Over two intervals and a step each layer is refreshed three times, whatever its offset.
    "staggered": Run(9, 3, 3, {"factor_every": 1, "refresh_every": 4, "stagger": True}),
    "no triangles": Run(
        3, 2, 2, {"factor_every": 1, "refresh_every": 2, "solver": "cholesky"}, {"triangles": False}
    ),
    "inverses": Run(3, 2, 2, {"factor_every": 1, "refresh_every": 2, "solver": "cholesky"}),
    "no overlap": Run(3, 2, 2, {"factor_every": 1, "refresh_every": 2}, {"overlap": False}),
    "clipped": Run(3, 2, 2, {"factor_every": 1, "refresh_every": 2, "rescale": "kl-clip"}),
    "half": Run(3, 2, 2, {"factor_every": 1, "refresh_every": 2}, {"wire_dtype": torch.bfloat16}),
}


def train(rank: int, name: str, names: list[str]) -> dict[str, tuple[dict[str, Any], Any]]:
    """What each run has sent, and its placement."""
    found = {}
    for one in names:
        asked = RUNS[one]
        kind = KINDS["cnn"]
        plain = kind.model()
        model = plain if "without DDP" in name else DistributedDataParallel(plain)
        distribute = kronfac.Distribute(SCHEMES[name], **asked.settings)
        base = SGD(model.parameters(), lr=0.01)
        optimizer = kronfac.KFAC(model, base, distribute=distribute, **asked.options)
        for number in range(asked.steps):
            x, y = kind.batch(10 * number + rank, 3)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found[one] = optimizer.stats(), optimizer.placement.to_json()
        optimizer.detach()
    return found


def expected(
    name: str, asked: Run, model: nn.Module, placement: Placement, rank: int
) -> dict[str, int]:
    """Bytes by phase, in single precision."""
    triangles = asked.settings.get("triangles", True)
    layers = closed_form.sizes(model, asked.options.get("solver", "auto"), triangles)
    item = 2 if "wire_dtype" in asked.settings else 4
    statistics = item * closed_form.statistics(layers, triangles)
    all_solutions = item * sum(layer.solution for layer in layers.values())
    gradients = item * closed_form.gradients(layers)
    weights = 4 * closed_form.parameters(model)  # never rounded
    found = {"reduce": asked.reductions * statistics, "share": 0, "spread": 0, "rescale": 0}
    if name == "comm-opt":
        found["share"] = asked.refreshes * all_solutions
    elif name in ("hybrid", "spd"):
        found["share"] = asked.refreshes * item * closed_form.shared(layers, placement, rank)
    if name in ("mem-opt", "hybrid", "local"):
        found["spread"] = asked.steps * gradients
    if name == "local":
        found["reduce"] = 0
    if name.startswith("layer-parallel"):
        found["spread"] = asked.steps * weights
    if name == "layer-parallel without DDP":
        found["reduce"] += asked.steps * weights
    if asked.options.get("rescale") == "kl-clip" and name in SPREADS:
        found["rescale"] = asked.steps * 8
    return found


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in SCHEMES),
        *(
            (name, 4) if name in OFTEN else pytest.param(name, 4, marks=pytest.mark.slow)
            for name in SCHEMES
        ),
    ],
)
def test_the_ledger_is_the_closed_form(name: str, world_size: int) -> None:
    """With two ranks, half of them is one: the hybrid is mem-opt."""
    names = list(RUNS) if world_size == 4 else ["every step", "clipped", "half"]
    model = KINDS["cnn"].model()
    for rank, runs in enumerate(run(world_size, train, name, names)):
        for one, (stats, described) in runs.items():
            placement = Placement.from_json(described)
            found = closed_form.bytes_of(stats)
            assert found == expected(name, RUNS[one], model, placement, rank), f"{one}, rank {rank}"
            assert {p for p, n in stats["messages"].items() if n} == {p for p in found if found[p]}


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scheme_never_sends(name: str) -> None:
    for runs in run(4, train, name, ["every step"]):
        found = closed_form.bytes_of(runs["every step"][0])
        assert (found["reduce"] > 0) == (name != "local")
        assert (found["spread"] > 0) == (name in SPREADS)
        assert found["rescale"] == 0
        if name != "spd":  # which may find that everything is quicker to solve than to send
            assert (found["share"] > 0) == (name in SHARES)


def test_what_a_rank_sends_follows_from_rings() -> None:
    """``2(P-1)/P·m`` for a sum that all need, ``m`` for one that goes to one rank, or for a copy."""
    (stats, _) = run(4, train, "replicated", ["every step"])[0]["every step"]
    assert stats["sent"]["reduce"] == stats["bytes"]["reduce"] * 3 / 2
    (stats, _) = run(4, train, "comm-opt", ["every step"])[0]["every step"]
    assert stats["sent"] == stats["bytes"]


def test_ranks_agree_by_few_bytes() -> None:
    """Flags and counts are kept apart, and do not grow with the layers' widths."""
    (stats, _) = run(4, train, "comm-opt", ["no overlap"])[0]["no overlap"]
    assert stats["control"]["messages"] <= 20
    assert stats["control"]["bytes"] < 2000
