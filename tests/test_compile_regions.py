"""Models that are compiled in part, in several ways or sizes: numbers and graphs stay right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.training import assert_close, batch, counts, factors, frozen_kfac, layers, mlp

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", **options)


class Net(nn.Module):
    """A class of one's own: compilers do not trace the hooks around its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class PartlyEager(nn.Module):
    """Its eager part sees positions as rows, which must not be taken for samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.eager = nn.Linear(4, 4), Eager()

    def forward(self, x: Tensor) -> Tensor:
        return self.eager(torch.tanh(self.linear(x)).flatten(0, 1))


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_eager_part_belongs_to_the_compiled_forward(wrapped: bool) -> None:
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for compiles in (False, True):
        model: nn.Module = nn.Sequential(PartlyEager()) if wrapped else PartlyEager()
        optimizer = frozen_kfac(model)
        run = compiled(model) if compiles else model
        run(x).square().mean().backward()
        optimizer.step()
        assert set(counts(optimizer, "G").values()) == {6.0}
        results.append(factors(optimizer, "G"))
    assert_close(*results)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, at inputs of graphs
def test_equal_blocks_share_their_graphs() -> None:
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(12)), nn.Linear(4, 3))
        optimizer = frozen_kfac(model, factor_every=2, refresh_every=2)
        for block in model[1:-1] if compiles else []:
            block.compile(backend="aot_eager")
        for number in range(4):
            optimizer.zero_grad()
            x, y = batch(number)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append([factors(optimizer, side) for side in "AGF"])
    assert counters["stats"]["unique_graphs"] == 2
    assert_close(*results)


@pytest.mark.parametrize("evaluates", [False, True])
def test_micro_batches_of_changing_sizes(evaluates: bool) -> None:
    """Graphs around and beside the forward never get out of step, however many there are."""
    results = []
    for compiles in (False, True):
        model = Net()
        optimizer = frozen_kfac(model, decay=0.5)
        run = compiled(model) if compiles else model
        for samples in (8, 8, 6, 8, 7, 5):
            optimizer.zero_grad()
            for number in range(2):
                x, y = batch(number, samples=samples)
                (F.cross_entropy(run(x), y) / 2).backward()
            optimizer.step()
            if evaluates:
                with torch.no_grad():
                    run(batch(3)[0])
        results.append([factors(optimizer, side) for side in "AGF"])
    assert_close(*results)


def test_two_graphs_are_enough_for_a_class_of_ones_own() -> None:
    model = Net()
    optimizer = frozen_kfac(model, factor_every=5, refresh_every=5)
    run = compiled(model, fullgraph=True)
    for number in range(20):
        optimizer.zero_grad()
        F.cross_entropy(run(batch(number)[0]), batch(number)[1]).backward()
        optimizer.step()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_observe_with_changing_batch_sizes(fisher: str) -> None:
    results = []
    for compiles in (False, True):
        model = mlp()
        optimizer = frozen_kfac(model, fisher=fisher)
        run = compiled(model) if compiles else model
        for samples in (6, 4, 3, 7):
            optimizer.zero_grad()
            x, y = batch(0, samples=samples)
            outputs = run(x)
            optimizer.observe(outputs, generator=torch.Generator().manual_seed(samples))
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
        results.append(factors(optimizer, "G"))
    assert_close(*results)


@pytest.mark.parametrize("training", [True, False])
def test_an_exported_model_contains_nothing_of_ours(training: bool) -> None:
    model = Net().train(training)
    optimizer = frozen_kfac(model)
    program = torch.export.export(model, (batch()[0],))
    assert "kronfac" not in str(program.graph)
    del optimizer


def test_a_frozen_layer_is_not_observed() -> None:
    model = Net()
    model.a.requires_grad_(False)
    optimizer = frozen_kfac(model)
    F.cross_entropy(compiled(model)(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert layers(optimizer)["a"].running["A"].count is None
    assert optimizer.stats()["without_solution"] == []


def test_two_optimizers_on_two_compiled_models_keep_apart() -> None:
    models = [Net(), Net()]
    optimizers = [frozen_kfac(model) for model in models]
    runs = [compiled(model) for model in models]
    for samples, run in zip((8, 5), runs, strict=True):
        x, y = batch(samples=samples)
        F.cross_entropy(run(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [set(counts(one, "G").values()) for one in optimizers] == [{8.0}, {5.0}]


def test_the_compiled_model_outlives_its_optimizer() -> None:
    model = Net()
    optimizer = frozen_kfac(model)
    run = compiled(model)
    x, y = batch()
    F.cross_entropy(run(x), y).backward()
    optimizer.step()
    del optimizer
    model.zero_grad()
    F.cross_entropy(run(x), y).backward()
    plain = Net()
    F.cross_entropy(plain(x), y).backward()
    expected = [p.grad for p in plain.parameters()]
    assert_close([p.grad for p in model.parameters()], expected)
