"""Statistics leave for their keepers during the passes: what is in memory, and that nothing changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import kronfac
from kronfac.distributed import portions, stream
from kronfac.distributed.distributed import Distributed
from kronfac.distributed.solving import together
from kronfac.rescale import factors
from kronfac.step import batching
from tests.distributed.equivalence import assert_near, case, double_precision
from tests.distributed.ranks import run
from tests.sharded.harness import Way, check, shard, whole_parameters
from tests.sharded.live import counting

WIDTH, LAYERS = 32, 32
#: Equal square layers, and such as are 2.6 times as wide as high, in turn.
SQUARE, WIDE = (WIDTH,) * (LAYERS + 1), (20, 52) * (LAYERS // 2) + (20,)
STATISTICS = 2 * LAYERS * WIDTH**2


@contextmanager
def large(most: int = portions.MAX_PORTIONS) -> Iterator[None]:
    """As if layers were large: one at a time, in so many portions."""
    places = [(together, "MAX_ELEMENTS"), (batching, "MAX_ELEMENTS"), (factors, "MAX_AT_ONCE")]
    places += [(portions, "MIN_ELEMENTS")]
    before = [(place, name, getattr(place, name)) for place, name in places]
    before += [(portions, "MAX_PORTIONS", portions.MAX_PORTIONS)]
    for place, name in places:
        setattr(place, name, 1)
    portions.MAX_PORTIONS = most
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


#: The default, and steps that are not orthogonal.
DEFAULT: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
PLAIN = DEFAULT | {"rescale": None}
PHASES = {"forward", "backward", "land", "refresh", "exchange", "precondition", "rescale"}


def peaks(
    rank: int,
    options: dict[str, Any],
    widths: Sequence[int] = SQUARE,
    micro: int = 1,
    overlap: bool = True,
    most: int = portions.MAX_PORTIONS,
    frugal: bool = True,
) -> dict[str, int]:
    """The most elements that were there in each part of some steps, all temporary ones included."""
    torch.manual_seed(0)
    layers = [nn.Linear(*pair, bias=False) for pair in pairwise(widths)]
    model = shard(nn.Sequential(*layers), Way())
    optimizer = kronfac.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        factor_every=2,
        refresh_every=4,
        early_refresh=False,
        distribute=kronfac.Distribute(overlap=overlap),
        **options,
    )
    with large(most), counting() as live, pytest.MonkeyPatch.context() as patch:
        if not frugal:
            patch.setattr(Distributed, "is_frugal", False)
        for _ in range(7):  # steps of every kind, after one of every other kind
            optimizer.zero_grad()
            for _ in range(micro):
                (model(torch.randn(8, widths[0])).square().mean() / micro).backward()
            optimizer.step()
    return live.peaks


def bound(size: int, widths: Sequence[int] = SQUARE) -> float:
    """``(2S + 4N)/P``, and two units."""
    units = [d_in**2 + d_out**2 for d_in, d_out in pairwise(widths)]
    parameters = sum(d_in * d_out for d_in, d_out in pairwise(widths))
    return (2 * sum(units) + 4 * parameters) / size + 2 * max(units)


FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [pytest.param(DEFAULT, id="default"), pytest.param(PLAIN, id="plain", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("size", [2, FOUR])
def test_no_rank_ever_holds_all_statistics(size: int, options: dict[str, Any]) -> None:
    for found in run(size, peaks, options):
        assert set(found) >= PHASES
        for where, most in found.items():
            assert most <= bound(size), f"{where}: {most} of {bound(size):.0f}"


@pytest.mark.slow
def test_micro_batches_take_no_more() -> None:
    for found in run(4, peaks, DEFAULT, SQUARE, 3):
        assert max(found.values()) <= bound(4), found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_wide_layers_keep_no_more_inverses_than_there_is_room_for(size: int) -> None:
    """With S = 3N statistics on their way reach the bound; steps without them stay well within it."""
    for found in run(size, peaks, DEFAULT, WIDE):
        for where in ("exchange", "precondition", "rescale"):
            assert found[where] <= 0.95 * bound(size, WIDE), f"{where}: {found[where]}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_default_needs_portions_and_no_inverses_beside_statistics(size: int) -> None:
    for found in run(size, peaks, DEFAULT, SQUARE, 1, True, 1):
        assert found["rescale"] > bound(size)
    for found in run(size, peaks, DEFAULT, SQUARE, 1, True, portions.MAX_PORTIONS, False):
        assert found["backward"] > bound(size)


@pytest.mark.slow
def test_without_it_a_rank_holds_them_all() -> None:
    for found in run(4, peaks, DEFAULT, SQUARE, 1, False):
        assert found["backward"] > STATISTICS
        assert max(found.values()) > bound(4)


# --- nothing else changes ------------------------------------------------------------------------


def test_equal_to_one_process_in_micro_batches() -> None:
    check(
        2,
        (case("transformer", steps=3, micro=2, loss_average="token"), Way()),
        (case("shared", steps=3, micro=2, syncs=True), Way("model")),
        (case("mlp", steps=3, micro=3, fisher="forward"), Way()),
    )


class Net(nn.Module):
    """Queries and keys of one input or of two, then layers that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.extras = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
        self.last = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor, apart: bool = False, extras: bool = True) -> Tensor:
        y = self.query(x) * torch.tanh(self.key(x.flip(0) if apart else x))
        for one in self.extras:
            # A rank without a gradient would stay behind in the collectives of FSDP2.
            y = y + torch.tanh(one(y)) if extras else y + 0 * one.weight.sum() + 0 * one.bias.sum()
        return self.last(y)


def passes_of(how: str, number: int, piece: int) -> list[dict[str, Any]]:
    """The passes of a step on a piece of the batch: options of the forward, and what happens after."""
    if how == "skipped":
        return [{"then": "zero_grad"}, {}] if number == 1 else [{}]
    if how == "parted":
        return [{}, {"apart": number == 1}]
    if how == "unused":
        return [{"extras": piece == 0}]
    if how == "growing":
        return [{}] * (1 + number % 3)
    return [{}]


def train(model: nn.Module, optimizer: Any, how: str, pieces: list[int]) -> None:
    """Some steps on some pieces of the batch, of which there are two."""
    for number in range(4):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(number)).chunk(2)
        y = torch.arange(24).remainder(3).chunk(2)
        optimizer.zero_grad()
        calls = [(piece, options) for piece in pieces for options in passes_of(how, number, piece)]
        # One process makes the passes of all pieces that are skipped, and then those that are not.
        calls.sort(key=lambda call: "then" not in call[1])
        skipped = sum("then" in options for _, options in calls)
        for index, (piece, options) in enumerate(calls):
            options = dict(options)
            then = options.pop("then", "")
            count = skipped if then else len(calls) - skipped
            loss = F.cross_entropy(model(x[piece], **options), y[piece])
            (loss / count).backward()
            if then and index == skipped - 1:
                optimizer.zero_grad()
        if how == "failed" and number == 1:
            fail(optimizer)
        else:
            optimizer.step()


def fail(optimizer: Any) -> None:
    """A step that ends with an error before statistics have arrived."""

    def land(normalizer: Any) -> None:
        raise RuntimeError("in the midst of a step")

    coordinator = optimizer._preconditioner.coordinator
    coordinator.land = land
    with pytest.raises(RuntimeError, match="in the midst"):
        optimizer.step()
    del coordinator.land


def optimizer_of(model: nn.Module) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    return kronfac.KFAC(model, base, factor_every=1, refresh_every=2, rescale=None, damping=0.1)


def on_rank(rank: int, how: str) -> dict[str, Tensor]:
    stream.PATIENCE = 0.2
    with double_precision():
        model = Net()
        for module in (
            model.last,
            model,
        ):  # two units: layers that are left out are not in the last
            fully_shard(module)
        optimizer = optimizer_of(model)
        train(model, optimizer, how, [rank])
        return whole_parameters(model)


HOWS = ["plain", "skipped", "parted", "unused", "growing", "failed"]


@pytest.mark.parametrize("how", HOWS)
def test_equal_to_one_process(how: str) -> None:
    with double_precision():
        model = Net()
        train(model, optimizer_of(model), how, [0, 1])
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for found in run(2, on_rank, how):
        assert_near(found, expected, how)


def lopsided(rank: int, how: str) -> tuple[bool, list[float], list[float]]:
    """Counts and means of G. Ranks have other micro-batches, or one clears its gradients alone."""
    with double_precision():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        fully_shard(model)
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"on_missing": "ignore", "rescale": None, "decay": 0.0}
        optimizer = kronfac.KFAC(model, base, factor_every=1, **options)
        sizes = [[4, 4], [4, 2]][rank] if how == "sizes" else [4, 4]
        counts, means = [], []
        for number in range(3):
            optimizer.zero_grad()
            for index, size in enumerate(sizes):
                model(torch.ones(size, 3)).square().sum().div(sum(sizes)).backward()
                if how == "cleared" and (rank, index, number) == (0, 0, 0):
                    optimizer.zero_grad()
            optimizer.step()
            kept = [s.running["G"] for s in optimizer.layers if s.running["G"].sum is not None]
            found = torch.zeros(2)
            for one in kept:
                mean = one.mean()
                found += torch.tensor([float(one.count), 0.0 if mean is None else mean.trace()])
            dist.all_reduce(found)
            counts.append(float(found[0]))
            means.append(float(found[1]))
        learned = optimizer._preconditioner.coordinator.rounds.stream.learned
        return learned.proportional, counts, means


def test_micro_batches_of_other_proportions_are_dropped_once() -> None:
    for proportional, counts, means in run(2, lopsided, "sizes"):
        assert not proportional
        # Two layers: at first the second micro-batch of 2 samples, then 8 and 6 samples.
        assert counts == [2 * 2, 2 * 14, 2 * 14]
        assert means == pytest.approx([means[0]] * 3, rel=1e-12)


def test_gradients_that_one_rank_has_cleared_are_dropped_on_all() -> None:
    for proportional, counts, means in run(2, lopsided, "cleared"):
        assert proportional
        assert counts[1:] == [2 * 16, 2 * 16]
        assert means[2] == pytest.approx(means[1], rel=1e-12)
