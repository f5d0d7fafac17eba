"""A compiled model gives the numbers that the same model gives in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.test_phases import assert_layers_are_whole
from tests.training import (
    SAMPLES,
    assert_close,
    batch,
    factors,
    frozen_kfac,
    gradients,
    kfac,
    layers,
    mlp,
    parameters,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


class Tokens(nn.Module):
    """Makes tokens of numbers and embeds them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x * 2).long().clamp(-2, 2) + 2).mean(1)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
    ),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.BatchNorm1d(4), nn.RMSNorm(4)),
    "embedding": Tokens,
    "attention": Attention,
}


def model_with(body: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(BODIES[body](), nn.Tanh(), nn.LazyLinear(3))


def ready(model: nn.Module) -> nn.Module:
    """Let lazy layers take their shapes."""
    with torch.no_grad():
        model(batch()[0])
    return model


def one_loss(model: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    x, y = batch()
    F.cross_entropy(model(x), y).backward()


def two_forwards(model: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    """As siamese networks do: both outputs meet in one loss, and both calls share a graph."""
    left, right = batch(0), batch(1)
    first, second = model(left[0]), model(right[0])
    (F.cross_entropy(first, left[1]) + (first - second).square().mean()).backward()


def accumulated(model: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    for number in range(3):
        x, y = batch(number)
        (F.cross_entropy(model(x), y) / 3).backward()


def two_backwards(model: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    for number, scale in ((0, 1.0), (0, 0.5)):
        x, y = batch(number)
        (scale * F.cross_entropy(model(x), y)).backward()


LOOPS = {f.__name__: f for f in (one_loss, two_forwards, accumulated, two_backwards)}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("body", BODIES)
def test_compiled_equals_eager(body: str, loop: str) -> None:
    results = []
    for compiled in (False, True):
        model = ready(model_with(body))
        optimizer = frozen_kfac(model)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for _ in range(2):
            optimizer.zero_grad()
            LOOPS[loop](run, optimizer)
            optimizer.step()
        assert optimizer.stats()["without_solution"] == []
        results.append((gradients(model), statistics(optimizer)))
    assert_close(*results)


def statistics(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{one}": running.mean()
        for name, state in layers(optimizer).items()
        for one, running in state.running.items()
    }


@pytest.mark.parametrize("wrap", ["given-compiled", "compiled-later", "in-place"])
def test_every_way_to_compile(wrap: str) -> None:
    results = []
    for way in ("eager", wrap):
        model = mlp()
        run: Any = model
        if way == "given-compiled":
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
            optimizer = kfac(run)
        else:
            optimizer = kfac(model)
        if way == "compiled-later":
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        if way == "in-place":
            model.compile(fullgraph=True, backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            one_loss(run, optimizer)
            optimizer.step()
        results.append(parameters(model))
    assert_close(*results)


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_observe(fisher: str) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        optimizer = frozen_kfac(model, fisher=fisher)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for number in range(2):
            optimizer.zero_grad()
            x, y = batch(number)
            outputs = run(x)
            drawn = torch.Generator().manual_seed(number)
            how = {"samples": 2, "generator": drawn} if fisher == "mc" else {}
            optimizer.observe(outputs, **how)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
        results.append((gradients(model), statistics(optimizer)))
    assert_close(*results)


def test_forward_curvature() -> None:
    results = []
    for compiled in (False, True):
        model = mlp()
        optimizer = frozen_kfac(model, fisher="forward")
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        one_loss(run, optimizer)
        optimizer.step()
        results.append((gradients(model), factors(optimizer, "A")))
    assert_close(*results)


def test_loss_terms_are_counted() -> None:
    def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
        x, _ = batch(shape=(5, 4))
        y = torch.randint(3, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
        y[:3, 2:] = -100
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    results = []
    for compiled in (False, True):
        model = mlp()
        optimizer = frozen_kfac(model, loss_average="token")
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        loss(run).backward()
        optimizer.step()
        results.append((gradients(model), factors(optimizer, "G")))
    assert_close(*results)


def test_at_most_two_graphs_over_fifty_steps() -> None:
    model = mlp()
    optimizer = kfac(model, factor_every=10, refresh_every=20, early_refresh=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for number in range(50):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        optimizer.step()
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    assert optimizer.stats()["factor_updates"] >= 5


def test_timing_by_layer_needs_no_other_graph() -> None:
    model = mlp()
    optimizer = kfac(model)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    one_loss(run, optimizer)
    optimizer.step()
    with optimizer.timed() as seconds:
        one_loss(run, optimizer)
        optimizer.step()
    assert_layers_are_whole(seconds, optimizer)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_nothing_is_observed_inside_no_capture() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    one_loss(run, optimizer)
    with optimizer.no_capture():
        run(batch(1)[0]).sum().backward()
    optimizer.step()
    assert all(float(state.running["A"].count) == SAMPLES for state in layers(optimizer).values())


def test_evaluation_and_inference_are_not_observed() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    one_loss(run, optimizer)
    with torch.no_grad():
        run(batch(1)[0])
    model.eval()
    run(batch(2)[0]).sum()
    optimizer.step()
    assert all(float(state.running["A"].count) == SAMPLES for state in layers(optimizer).values())


def test_a_copy_of_a_watched_model_compiles_and_is_not_observed() -> None:
    model = mlp()
    optimizer = frozen_kfac(model)
    one_loss(model, optimizer)
    twin = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    twin(batch(1)[0]).sum().backward()
    optimizer.step()
    assert all(float(state.running["A"].count) == SAMPLES for state in layers(optimizer).values())


def test_after_detach_the_compiled_model_goes_on() -> None:
    model = mlp()
    optimizer = kfac(model)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    one_loss(run, optimizer)
    optimizer.step()
    optimizer.detach()
    optimizer.zero_grad()
    one_loss(run, optimizer)
    before = gradients(model)
    optimizer.step()
    assert_close(gradients(model), before)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, at every such hook
def test_in_place_compilation_notices_late_hooks() -> None:
    results = []
    for compiled in (False, True):
        model = mlp()
        if compiled:
            model.compile(backend="aot_eager")
        one_loss(model, None)
        model.zero_grad()
        optimizer = frozen_kfac(model)
        one_loss(model, optimizer)
        optimizer.step()
        results.append(gradients(model))
    assert_close(*results)


@pytest.mark.parametrize("way", ["given-compiled", "compiled-apart"])
def test_hooks_that_come_too_late_raise_by_name(way: str) -> None:
    model = mlp()
    run: Any = torch.compile(model, backend="aot_eager")
    one_loss(run, None)
    model.zero_grad()
    optimizer = kfac(run if way == "given-compiled" else model)
    one_loss(run, optimizer)
    with pytest.raises(RuntimeError, match=r"'0', '2', '4'.*before the first compiled call"):
        optimizer.step()


def test_buffers_are_donated_again_afterwards() -> None:
    before = torch._functorch.config.donated_buffer
    model = mlp()
    optimizer = frozen_kfac(model, fisher="mc")
    outputs = torch.compile(model, fullgraph=True, backend="aot_eager")(batch()[0])
    optimizer.observe(outputs)
    outputs.sum().backward()
    assert torch._functorch.config.donated_buffer == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("body", BODIES)
def test_the_default_compiler(body: str) -> None:
    results = []
    for compiled in (False, True):
        model = ready(model_with(body))
        optimizer = frozen_kfac(model)
        run = torch.compile(model, fullgraph=True) if compiled else model
        two_forwards(run, optimizer)
        optimizer.step()
        results.append((gradients(model), statistics(optimizer)))
    assert_close(*results)
