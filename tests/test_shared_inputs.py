"""Layers that see the same input share its statistics and solutions; no number changes by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import kronfac
from kronfac.state.layer_state import LayerState
from tests.operations import Operations

WIDTH = 6


class Net(nn.Module):
    """Attention by three linear layers, then by a module with packed weights, gates, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = nn.Linear(4, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=False)
        self.gate, self.up = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.one, self.other = nn.Conv1d(8, 3, 3, padding=1), nn.Conv1d(8, 3, 3, padding=1)
        self.point = nn.Conv1d(8, 3, 1)
        self.apart = False

    def forward(self, x: Tensor) -> Tensor:
        seen = x * 2.0 if self.apart else x
        x = self.query(x) + self.mix(torch.tanh(self.key(seen))) + self.value(x)
        x = x + self.attend(*(x.transpose(0, 1) for _ in range(3)))[0].transpose(0, 1)
        x = torch.sigmoid(self.gate(x)) * self.up(x)
        x = x.transpose(1, 2)
        return (self.one(x) * self.other(x) + self.point(x)).mean(-1)


#: Those that share, in order.
SHARED = [
    ["query", "key"],
    ["attend.query", "attend.key", "attend.value"],
    ["gate", "up"],
    ["one", "other"],
]


def make(method: str = "KFAC", **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net().double()
    options = {"factor_every": 1, "refresh_every": 2, "momentum": 0.9, **options}
    base = SGD(model.parameters(), lr=0.02)
    return model, getattr(kronfac, method)(model, base, **options)


def batch(number: int) -> Tensor:
    data = torch.Generator().manual_seed(number)
    return torch.randn(5, 7, WIDTH, dtype=torch.float64, generator=data)


def step(model: nn.Module, optimizer: kronfac.KFAC, *numbers: int) -> None:
    optimizer.zero_grad()
    for number in numbers:
        (model(batch(number)).square().sum(-1).mean() / len(numbers)).backward()
    optimizer.step()


def groups(optimizer: kronfac.KFAC) -> list[list[str]]:
    found = [state.group for state in states(optimizer)]
    return [[one.name for one in group.members] for group in dict.fromkeys(found) if group]


def states(optimizer: kronfac.KFAC) -> list[LayerState]:
    return list(optimizer._preconditioner.layers.values())


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check_close(one: nn.Module, other: nn.Module) -> None:
    """Up to rounding: a decomposition depends on where in memory a matrix is."""
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


Train = Callable[[Net, kronfac.KFAC], None]


def plain(model: Net, optimizer: kronfac.KFAC) -> None:
    for number in range(5):
        step(model, optimizer, number)


def accumulated(model: Net, optimizer: kronfac.KFAC) -> None:
    for number in range(4):
        step(model, optimizer, 2 * number, 2 * number + 1)


def apart_later(model: Net, optimizer: kronfac.KFAC) -> None:
    for number in range(6):
        model.apart = number == 3
        step(model, optimizer, number)


def apart_in_a_micro_batch(model: Net, optimizer: kronfac.KFAC) -> None:
    for number in range(4):
        optimizer.zero_grad()
        for part in range(3):
            model.apart = number == 2 and part == 1
            (model(batch(3 * number + part)).square().sum(-1).mean() / 3).backward()
        optimizer.step()


def frozen_later(model: Net, optimizer: kronfac.KFAC) -> None:
    for number in range(5):
        model.up.weight.requires_grad_(number < 2)
        assert model.one.bias is not None
        model.one.bias.requires_grad_(number < 3)
        step(model, optimizer, number)


def used_twice(model: Net, optimizer: kronfac.KFAC) -> None:
    """A pass that only some layers see, and one in which a layer is called once more."""
    for number in range(5):
        optimizer.zero_grad()
        loss = model(batch(number)).square().sum(-1).mean()
        if number in (1, 4):
            loss = loss + model.gate(batch(number)).square().mean()
        loss.backward()
        optimizer.step()


TRAINS: dict[str, Train] = {
    one.__name__: one
    for one in (
        plain,
        accumulated,
        apart_later,
        apart_in_a_micro_batch,
        frozen_later,
        used_twice,
    )
}
OPTIONS: dict[str, dict[str, Any]] = {
    "eigen": {},
    "cholesky": {"solver": "cholesky"},
    "separable": {"solver": "separable"},
    "stagger": {"stagger": True, "refresh_every": 4},
    "diagonal": {"max_dim": 6},
    "forward": {"fisher": "forward"},
    "Eva": {"method": "Eva"},
}


OFTEN = [("eigen", train) for train in TRAINS] + [(name, "apart_later") for name in OPTIONS]
CASES = [
    pytest.param(name, train, marks=[pytest.mark.slow] * ((name, train) not in OFTEN))
    for name in OPTIONS
    for train in TRAINS
]


@pytest.mark.parametrize(("options", "train"), CASES)
def test_no_number_changes(options: str, train: str) -> None:
    shared, alone = make(**OPTIONS[options]), make(share_inputs=False, **OPTIONS[options])
    TRAINS[train](*shared)
    TRAINS[train](*alone)
    check_close(shared[0], alone[0])
    for one, other in zip(states(shared[1]), states(alone[1]), strict=True):
        for name, running in one.running.items():
            torch.testing.assert_close(running.mean(), other.running[name].mean())
            assert running.count == other.running[name].count
    assert not groups(alone[1])
    assert groups(shared[1])


@pytest.mark.parametrize("options", [{"method": "EKFAC"}, {"sharing": "reduce"}])
def test_rows_that_are_kept_are_not_shared(options: dict[str, Any]) -> None:
    model, optimizer = make(**options)
    plain(model, optimizer)
    assert groups(optimizer) == []


def test_what_is_shared() -> None:
    model, optimizer = make()
    assert groups(optimizer) == []
    step(model, optimizer, 0)
    assert groups(optimizer) == SHARED
    text = str(optimizer)
    assert "  gate up\n" in text
    assert "  attend.query attend.key attend.value\n" in text


def test_layers_part_and_others_stay_together() -> None:
    model, optimizer = make()
    apart_later(model, optimizer)
    assert groups(optimizer) == SHARED[1:]


class Solved(Operations):
    """Counts matrices that are decomposed, too."""

    matrices = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ == "_linalg_eigh":
            self.matrices += args[0].shape[:-2].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_inputs_are_observed_and_solved_once() -> None:
    """What is saved are the input sides of all members of a group but the first."""
    saved = sum(len(group) - 1 for group in SHARED)
    passes, steps = [], []
    for shares in (True, False):
        model, optimizer = make(share_inputs=shares, refresh_every=1)
        step(model, optimizer, 0)
        with Operations() as observed:
            model(batch(1)).square().mean().backward()
        with Solved() as solved:
            optimizer.step()
        passes.append(observed.products.total() + observed.kernels["convolution_backward"])
        steps.append(solved.matrices)
    assert steps[1] == 2 * len(states(optimizer))
    assert steps[1] - steps[0] == saved
    assert passes[1] - passes[0] >= saved


def test_statistics_and_large_solutions_take_memory_once() -> None:
    torch.manual_seed(0)
    wide = nn.ModuleList([nn.Linear(520, 520, bias=False), nn.Linear(520, 520, bias=False)])
    optimizer = kronfac.KFAC(wide, SGD(wide.parameters(), lr=0.1), rescale=None)
    before = sum(state.held_bytes for state in states(optimizer))
    x = torch.randn(8, 520)
    (wide[0](x) * wide[1](x)).sum().backward()
    optimizer.step()
    after = sum(state.held_bytes for state in states(optimizer))
    assert before - after == 4 * (2 * 520**2 + 520)
    one, other = states(optimizer)
    for name in ("A.vectors", "A.values"):
        pointers = {state.solution[name].data_ptr() for state in (one, other) if state.solution}
        assert len(pointers) == 1


class Checkpointed(nn.Module):
    """A net whose activations are computed again."""

    def __init__(self, net: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.net = net
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.net, x, use_reentrant=self.reentrant)
        return made


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_forwards(reentrant: bool) -> None:
    found = []
    for shares in (True, False):
        torch.manual_seed(0)
        model = Checkpointed(Net().double(), reentrant)
        base = SGD(model.parameters(), lr=0.02)
        optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=2, share_inputs=shares)
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number).requires_grad_()).square().mean().backward()
            optimizer.step()
        found.append(model)
        assert len(groups(optimizer)) == (len(SHARED) if shares else 0)
    check_close(*found)


class Chain(nn.Module):
    """Layers with inputs of one shape, none of which outlives its use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, torch.tanh(x) * 1.0, use_reentrant=False)
        return x


def test_memory_that_is_used_again_is_another_input() -> None:
    model = Chain().double()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1))
    for number in range(3):
        optimizer.zero_grad()
        checkpoint(model, batch(number), use_reentrant=False).square().mean().backward()
        optimizer.step()
        assert groups(optimizer) == []


@pytest.mark.parametrize("name", ["parts", "unites"])
def test_what_was_loaded_is_shared_again(name: str) -> None:
    model, optimizer = make()
    plain(model, optimizer)
    twin, restored = make()
    twin.load_state_dict(model.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert groups(restored) == SHARED
    keys = [key for key in restored.state_dict()["state"][0] if key.startswith("kronfac.A")]
    assert keys == ["kronfac.A.sum", "kronfac.A.count"]
    query, key = states(restored)[:2]
    assert query.running["A"] is key.running["A"]
    for number in range(5, 9):
        model.apart = twin.apart = name == "parts"
        step(model, optimizer, number)
        step(twin, restored, number)
    assert same(model, twin)
    assert groups(optimizer) == groups(restored) == (SHARED[1:] if name == "parts" else SHARED)


def test_what_was_saved_without_sharing_stays_apart_and_the_other_way_round() -> None:
    for saves, loads in ((False, True), (True, False)):
        model, optimizer = make(share_inputs=saves)
        plain(model, optimizer)
        twin, restored = make(share_inputs=loads)
        twin.load_state_dict(model.state_dict())
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for number in range(5, 8):
            step(model, optimizer, number)
            step(twin, restored, number)
        check_close(model, twin)
        assert groups(restored) == []


def test_compiled_layers_share_nothing() -> None:
    """Compiled code uses memory again without a trace."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        made: Tensor = model[0](x) * model[1](x)
        return made

    for forward in (compiled, lambda x: model[0](x) * model[1](x)):
        forward(torch.randn(5, WIDTH)).sum().backward()
        optimizer.step()
        assert groups(optimizer) == []


def test_fewer_rows_are_the_same_rows() -> None:
    def train(shares: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleDict({"one": nn.Linear(3, 3), "other": nn.Linear(3, 5)})
        base = SGD(model.parameters(), lr=0.1)
        optimizer = kronfac.KFAC(model, base, factor_every=1, share_inputs=shares)
        for number in range(3):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(number)
            x = torch.randn(32, 600, 3, generator=data)
            (model["one"](x).square().mean() + model["other"](x).tanh().mean()).backward()
            optimizer.step()
        assert bool(groups(optimizer)) == shares
        assert "1 of" in str(optimizer)
        return model

    check_close(train(True), train(False))
