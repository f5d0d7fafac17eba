"""What a profiler shows of a step on ranks, and in which order messages leave."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile, record_function

import kronfac
from kronfac.distributed.comm.collectives import Collectives
from kronfac.distributed.distributed import Distributed
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.distributed.test_unlike_ranks import Branches

PHASES = {"reduce", "refresh", "share", "precondition", "rescale", "spread"}


class Trace:
    """Ranges of a Chrome trace, by name, as pairs of begin and end."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.ranges: dict[str, list[tuple[float, float]]] = {}
        for event in events:
            if event.get("ph") == "X":
                begin, length = float(event["ts"]), float(event["dur"])
                self.ranges.setdefault(event["name"], []).append((begin, begin + length))

    def of(self, name: str) -> list[tuple[float, float]]:
        return self.ranges.get(name, [])

    def one(self, name: str) -> tuple[float, float]:
        (found,) = self.of(name)
        return found

    @property
    def sends(self) -> list[tuple[float, float]]:
        return self.of("kronfac.reduce.send")

    @property
    def messages(self) -> list[tuple[float, float]]:
        """Calls into torch.distributed."""
        names = [name for name in self.ranges if name.startswith("c10d::")]
        return [one for name in names for one in self.of(name)]


def inside(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def traced(rank: int, settings: dict[str, Any], kind: str = "mlp", refresh: bool = True) -> Any:
    """The trace of one step: a refresh, or the one after it."""
    made = KINDS[kind]
    model = DistributedDataParallel(made.model())
    options: dict[str, Any] = {"factor_every": 1, "refresh_every": 2, "rescale": "kl-clip"}
    distribute = kronfac.Distribute(**settings)
    base = SGD(model.parameters(), lr=0.01)
    optimizer = kronfac.KFAC(model, base, distribute=distribute, **options)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x, y = made.batch(number, 4)
        with record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            optimizer.step()

    before = 2 if refresh else 3
    for number in range(before):  # statistics leave early once it is known when they are ready
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(before)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = ("kronfac.", "c10d::", "forward", "backward", "step")
    return [e for e in events if str(e.get("name", "")).startswith(wanted)]


def traces(ranks: int, **given: Any) -> list[Trace]:
    kind, refresh = given.pop("kind", "mlp"), given.pop("refresh", True)
    return [Trace(events) for events in run(ranks, traced, given, kind, refresh)]


# --- phases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "ranks", "silent"),
    [
        ("replicated", 2, "spread"),
        ("comm-opt", 2, "spread"),
        ("mem-opt", 3, ""),
        (kronfac.Hybrid(0.5), 4, ""),
        ("layer-parallel", 3, ""),
    ],
    ids=str,
)
def test_ranges_are_named_by_the_phases(scheme: Any, ranks: int, silent: str) -> None:
    for trace in traces(ranks, scheme=scheme):
        named = {name.removeprefix("kronfac.") for name in trace.ranges if "kronfac." in name}
        assert named & PHASES == PHASES - {silent}
        for phase in named & PHASES:
            for one in trace.of(f"kronfac.{phase}"):
                assert inside(one, trace.one("step"))


def test_other_steps_have_no_refresh() -> None:
    for trace in traces(2, scheme="comm-opt", refresh=False):
        named = {name for name in trace.ranges if "kronfac." in name}
        assert "kronfac.precondition" in named
        assert named.isdisjoint({"kronfac.refresh", "kronfac.share", "kronfac.reduce.send"})
        assert trace.messages


# --- overlap ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", ["replicated", "comm-opt", "mem-opt", kronfac.Hybrid(0.5), "spd"]
)
def test_statistics_leave_during_forward_and_backward(scheme: Any) -> None:
    for trace in traces(4, scheme=scheme):
        forward, backward, step = (trace.one(name) for name in ("forward", "backward", "step"))
        assert len(trace.sends) == 6  # two for each of three layers
        assert all(forward[0] <= begin and end <= backward[1] for begin, end in trace.sends)
        assert sum(inside(one, forward) for one in trace.sends) == 3
        assert sum(inside(one, backward) for one in trace.sends) == 3
        assert backward[1] <= step[0]
        # What is offered really leaves: the last message at the latest with the last statistic.
        assert any(inside(one, send) for one in trace.messages for send in trace.sends)


def test_nothing_leaves_before_the_step_without_overlap() -> None:
    for trace in traces(2, scheme="comm-opt", overlap=False):
        assert trace.sends == []
        assert trace.one("step")
        assert all(begin >= trace.one("step")[0] for begin, _ in trace.of("kronfac.reduce"))


def test_layers_whose_rows_are_held_until_the_step_leave_then() -> None:
    """The norm of this network is one of them; its convolutions and head are not."""
    for trace in traces(2, scheme="replicated", kind="cnn"):
        assert len(trace.sends) == 6


# --- order -----------------------------------------------------------------------------------


class Logged:
    """Notes which tensors each message of statistics carries, and which layers are observed."""

    def __init__(self, optimizer: kronfac.KFAC) -> None:
        coordinator = optimizer._preconditioner.coordinator
        assert isinstance(coordinator, Distributed)
        self.rounds = coordinator.rounds
        self.messages: list[list[str]] = []
        self.observed: list[str] = []
        listener = coordinator.observed

        def observed(state: Any, source: str) -> None:
            self.observed.append(f"{state.name}/{source}")
            listener(state, source)

        optimizer._preconditioner.capture.listener = observed

    def watch(self) -> None:
        """Note from now on which bucket is launched."""
        collectives: Collectives = self.rounds.early
        all_reduce, reduce = collectives.all_reduce, collectives.reduce

        def name(flat: Tensor) -> list[str]:
            start = flat.untyped_storage().data_ptr()
            for buckets in self.rounds.buckets.values():
                for bucket in buckets:
                    if bucket.flat.tensor.untyped_storage().data_ptr() == start:
                        return bucket.keys
            return ["unknown"]

        def logged_all_reduce(phase: Any, flat: Tensor, *rest: Any) -> Any:
            self.messages.append(name(flat))
            return all_reduce(phase, flat, *rest)

        def logged_reduce(phase: Any, flat: Tensor, *rest: Any) -> Any:
            self.messages.append(name(flat))
            return reduce(phase, flat, *rest)

        collectives.all_reduce = logged_all_reduce  # type: ignore[method-assign]
        collectives.reduce = logged_reduce  # type: ignore[method-assign]


def in_their_own_order(rank: int, scheme: str, groups: list[list[str]]) -> Any:
    torch.manual_seed(0)
    plain = Branches()
    if rank % 2:
        plain.order = ["right", "left"]
    model: nn.Module = DistributedDataParallel(plain)
    base = SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"factor_every": 1, "refresh_every": 1, "share_inputs": False}
    optimizer = kronfac.KFAC(model, base, distribute=scheme, **options)
    logged = Logged(optimizer)
    for number in range(3):
        if number == 1:
            logged.rounds.plan.groups = groups
            logged.rounds.buckets.clear()
            logged.watch()
            logged.observed.clear()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(4, 5, generator=generator)
        F.cross_entropy(model(x), torch.arange(4) % 3).backward()
        optimizer.step()
    return logged.messages, logged.observed


NAMES = ["first", "left", "right", "head"]
GROUPS = {
    "each on its own": [[f"{name}/{side}"] for side in "AG" for name in NAMES],
    "backwards": [[f"{name}/{side}"] for side in "GA" for name in reversed(NAMES)],
    "some together": [["first/A", "right/A"], ["left/A", "head/A", "head/G"], ["left/G"]],
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("scheme", ["replicated", "comm-opt"])
def test_messages_follow_one_order_whatever_order_layers_are_called_in(
    scheme: str, groups: str
) -> None:
    planned = GROUPS[groups]
    found = run(2, in_their_own_order, scheme, planned)
    (messages, observed), (others, observed_there) = found
    assert observed != observed_there
    assert messages == others
    keys = [key for group in planned for key in group]
    rest = [f"{name}/{side}" for name in NAMES for side in "AG" if f"{name}/{side}" not in keys]
    expected = [sorted(group) for group in [*planned, rest] if group]
    assert [sorted(message) for message in messages] == expected * 2
