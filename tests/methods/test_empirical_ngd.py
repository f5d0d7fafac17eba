"""EmpiricalNGD: the exact damped Fisher of each layer, whatever is kept of its samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.capture.fisher import sampled_gradient
from kronfac.methods.sample_space.gradients import RowGradients
from tests.distributed.equivalence import double_precision
from tests.distributed.ranks import run
from tests.references import empirical_ngd
from tests.references.per_sample import (
    RATE,
    assert_follows,
    batch,
    descend,
    flat,
    layers,
    net,
    sample_gradients,
    sample_losses,
)
from tests.training import parameters

GAMMA = 0.1


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, base: Any = None, **options: Any) -> Any:
    chosen = {"damping": GAMMA, "rescale": None, **options}
    return kronfac.EmpiricalNGD(model, base or SGD(model.parameters(), lr=0.0), **chosen)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def solved(U: Tensor, V: Tensor, samples: float, gamma: float = GAMMA) -> Tensor:
    fisher = U.T @ U / samples
    return torch.linalg.solve(fisher + gamma * torch.eye(len(fisher)), V)


def gradient(layer: Any) -> Tensor:
    return flat(layer, lambda p: p.grad.clone())


# --- the step --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["rows", "gradients", "auto"])
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv", "grouped"])
def test_steps_are_those_of_the_dense_fisher(kind: str, keep: str) -> None:
    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        empirical_ngd.step(model, x, y, GAMMA)

    assert_follows(partial(make, keep=keep), reference, kind)


@pytest.mark.parametrize(("samples", "positions"), [(3, 2), (2, 9)])
def test_a_kernel_is_the_same_whatever_is_cheaper(samples: int, positions: int) -> None:
    gradients = RowGradients((5, 4))
    a, g = torch.randn(samples, positions, 4), torch.randn(samples, positions, 5)
    U = torch.einsum("nso,nsi->noi", g, a).flatten(1)
    assert_equal(gradients.kernel({"a": a, "g": g}), U @ U.T)


def test_samples_may_differ_in_their_positions() -> None:
    model, _ = net("sequence")
    optimizer = make(model)
    batches = [batch((length, 3), length, 3) for length in (2, 5)]
    rows = {
        layer: [sample_gradients(layer, sample_losses(model, *one)) for one in batches]
        for layer in layers(model)
    }
    for x, y in batches:
        (F.cross_entropy(model(x), y, reduction="sum") / 6).backward()
    before = {layer: gradient(layer) for layer in rows}
    optimizer.step()
    for layer, found in rows.items():
        assert_equal(gradient(layer), solved(torch.cat(found), before[layer], 6))


def test_a_stale_solution_is_that_of_the_older_batch() -> None:
    model, shape = net("linear")
    optimizer = make(model, factor_every=2, refresh_every=2)
    first, second = batch(shape, 0), batch(shape, 1)
    U = [sample_gradients(layer, sample_losses(model, *first)) for layer in layers(model)]
    descend(optimizer, *first)
    optimizer.zero_grad()
    F.cross_entropy(model(second[0]), second[1]).backward()
    before = [gradient(layer) for layer in layers(model)]
    optimizer.step()
    for layer, rows, V in zip(layers(model), U, before, strict=True):
        assert_equal(gradient(layer), solved(rows, V, 6))


@pytest.mark.parametrize("average", ["batch", None, 2.5])
def test_the_divisor_of_the_loss(average: Any) -> None:
    model, shape = net("linear")
    optimizer = make(model, loss_average=average)
    x, y = batch(shape, 0)
    divisor = {"batch": 6.0, None: 1.0}.get(average, average)
    U = [sample_gradients(layer, sample_losses(model, x, y)) for layer in layers(model)]
    (F.cross_entropy(model(x), y, reduction="sum") / divisor).backward()
    before = [gradient(layer) for layer in layers(model)]
    optimizer.step()
    for layer, rows, V in zip(layers(model), U, before, strict=True):
        assert_equal(gradient(layer), solved(rows, V, divisor))


def test_relative_damping_is_a_share_of_the_mean_curvature() -> None:
    model, shape = net("conv")
    optimizer = make(model, damping=kronfac.Relative(0.5))
    x, y = batch(shape, 0)
    U = [sample_gradients(layer, sample_losses(model, x, y)) for layer in layers(model)]
    descend(optimizer, x, y)
    for layer, rows in zip(layers(model), U, strict=True):
        gamma = 0.5 * float(rows.square().sum() / rows.numel())
        assert_equal(gradient(layer), solved(rows, rows.mean(0), 6, gamma))


def test_the_curvature_times_a_matrix() -> None:
    model, shape = net("linear")
    optimizer = make(model)
    x, y = batch(shape, 0)
    U = sample_gradients(model[0], sample_losses(model, x, y))
    descend(optimizer, x, y)
    state, V = optimizer.layers[0], torch.randn(5, 5)
    vector = torch.cat([V[:, :4].flatten(), V[:, 4]])
    product = state.block.multiply(state.solution, V)
    expected = U.T @ (U @ vector) / 6
    assert_equal(torch.cat([product[:, :4].flatten(), product[:, 4]]), expected)


# --- other gradients than the loss's ---------------------------------------------------------


def test_several_draws_of_labels_are_averaged() -> None:
    model, shape = net("linear")
    optimizer = make(model, fisher="mc")
    x, y = batch(shape, 0)
    outputs = model(x)
    generator = torch.Generator().manual_seed(1)
    draws = [sampled_gradient(outputs.detach(), "categorical", generator) for _ in range(3)]
    terms = torch.cat([(outputs * draw).sum(1) for draw in draws])
    U = [sample_gradients(layer, terms) for layer in layers(model)]
    optimizer.observe(outputs, samples=3, generator=torch.Generator().manual_seed(1))
    F.cross_entropy(outputs, y).backward()
    before = [gradient(layer) for layer in layers(model)]
    optimizer.step()
    for layer, rows, V in zip(layers(model), U, before, strict=True):
        assert_equal(gradient(layer), solved(rows, V, 3 * 6))


def test_inputs_alone_are_refused() -> None:
    model, _ = net("linear")
    with pytest.raises(ValueError, match="fisher='forward' does not observe; choose 'empirical'"):
        make(model, fisher="forward")


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_batch_that_is_not_finite_is_left_out(kind: str) -> None:
    model, shape = net(kind)
    optimizer = make(model)
    x, y = batch(shape, 0)
    U = [sample_gradients(layer, sample_losses(model, x, y)) for layer in layers(model)]
    for some in (x, torch.full_like(x, torch.nan)):
        (F.cross_entropy(model(some), y, reduction="sum") / 12).backward()
    before = [torch.randn_like(rows[0]) for rows in U]
    for layer, V in zip(layers(model), before, strict=True):
        own = list(layer.parameters())
        for p, part in zip(own, V.split([p.numel() for p in own]), strict=True):
            p.grad.copy_(part.view_as(p))
    optimizer.step()
    for layer, rows, V in zip(layers(model), U, before, strict=True):
        assert_equal(gradient(layer), solved(rows, V, 6))


def test_samples_of_changing_length_beside_a_bad_batch_keep_the_last_solution() -> None:
    model, _ = net("sequence")
    optimizer = make(model)
    descend(optimizer, *batch((2, 3), 0))
    kept = [state.solution for state in optimizer.layers]
    optimizer.zero_grad()
    for length, value in ((2, 1.0), (5, torch.nan), (3, 1.0)):
        x, y = batch((length, 3), length)
        F.cross_entropy(model(x * value), y).backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    assert [state.solution for state in optimizer.layers] == kept


def test_rows_that_would_not_fit_are_refused_with_the_number() -> None:
    model, shape = net("sequence")
    optimizer = make(model, max_bytes=1000)
    # 6 samples of 4 positions, inputs of 3 and a bias, outputs of 4, in double precision
    with pytest.raises(ValueError, match=r"layer 'first' would keep 192 numbers .* 1,536 bytes"):
        descend(optimizer, *batch(shape, 0))
    descend(make(net("sequence")[0], max_bytes=1600), *batch(shape, 0))


def test_micro_batches_have_to_fit_together() -> None:
    model, shape = net("linear")
    with pytest.raises(ValueError, match=r"layer '0' would keep 66 numbers of a batch, 528 bytes"):
        descend(make(model, max_bytes=500), *batch(shape, 0), parts=3)


class Flattening(nn.Module):
    """Its second layer sees positions, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.second(torch.tanh(self.first(x)).flatten(0, 1))
        return rows.unflatten(0, x.shape[:2]).mean(1)


@pytest.mark.parametrize("damping", [GAMMA, kronfac.Relative(0.1)])
def test_a_layer_without_samples_passes_its_gradient(damping: Any) -> None:
    model = Flattening()
    optimizer = make(model, damping=damping)
    x, y = batch((4, 3), 0)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = gradient(model.second)
        optimizer.step()
        assert torch.equal(gradient(model.second), before)
    assert "second: expand: rows not grouped by sample" in optimizer.summary()


def test_embeddings_are_left_out_with_the_reason() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    assert make(model).left_out()["0.weight"][1].startswith("its rows are one-hot")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"keep": "all"}, "keep='all' is not supported"), ({"max_bytes": 0}, "max_bytes=0 must be")],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(net("linear")[0], **options)


def test_damping_may_adapt_itself() -> None:
    model, shape = net("linear")
    base = SGD(model.parameters(), lr=1.0)
    damping = kronfac.LevenbergMarquardt(1.0, every=1)
    optimizer = make(model, base, damping=damping, fisher="exact")
    x, y = batch(shape, 0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.value_now("damping") < 1.0


# --- ranks -----------------------------------------------------------------------------------


def flatten_on_rank(rank: int, methods: list[str], scheme: str) -> list[Any]:
    with double_precision():
        return [flattened(method, 2, rank, scheme) for method in methods]


def flattened(method: str, size: int, rank: int, scheme: str = "auto") -> Any:
    """Parameters after some steps of a model with a layer whose rows are not those of samples."""
    torch.manual_seed(0)
    model = Flattening()
    wrapped = DistributedDataParallel(model) if size > 1 else model
    base = SGD(model.parameters(), lr=RATE)
    options = {"damping": GAMMA, "factor_every": 1, "refresh_every": 2, "rescale": None}
    optimizer = getattr(kronfac, method)(wrapped, base, distribute=scheme, **options)
    for number in range(4):
        x, y = batch((4, 3), number)
        own = slice(6 * rank // size, 6 * (rank + 1) // size)
        descend(optimizer, x[own], y[own])
    return parameters(model)


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_ranks_agree_on_a_layer_without_samples(scheme: str) -> None:
    methods = ["EmpiricalNGD", "FNGD", "IEF"]
    expected = [flattened(method, 1, 0) for method in methods]
    for found in run(2, flatten_on_rank, methods, scheme):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def bytes_on_rank(rank: int, keep: str) -> dict[str, int]:
    with double_precision():
        model, shape = net("sequence")
        wrapped = DistributedDataParallel(model)
        optimizer = make(wrapped, SGD(model.parameters(), lr=0.1), keep=keep, distribute="mem-opt")
        x, y = batch(shape, 0)
        for _ in range(2):
            descend(optimizer, x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3])
        found: dict[str, int] = optimizer.stats()["bytes"]
        return found


@pytest.mark.parametrize("keep", ["rows", "gradients"])
def test_bytes_that_are_gathered(keep: str) -> None:
    """Three samples of four positions a rank, two layers, two steps."""
    widths = {"first": (4, 4), "second": (3, 4)}
    numbers = {
        "rows": sum(3 * (4 * (d_in + d_out) + 1) for d_out, d_in in widths.values()),
        "gradients": sum(3 * d_in * d_out for d_out, d_in in widths.values()),
    }
    for found in run(2, bytes_on_rank, keep):
        assert found["reduce"] == 2 * 8 * numbers[keep]
        assert found["share"] == 0
