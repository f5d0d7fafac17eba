"""CG-FAC: equal to K-FAC and to the exact solve once converged, and no factor is ever formed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac
from kronfac.methods.cgfac import CGFACBlock
from tests.distributed.equivalence import double_precision
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.feature_order import feature_order
from tests.methods.test_protocol import (
    gradients,
    make_model,
    matrix_layers,
    normal,
    rows_of,
    sample_losses,
)
from tests.references.cgfac import curvature, solve
from tests.training import gradients as named_gradients

DAMPING = 0.1
FORMS = [("kronecker", "expand"), ("kronecker", "reduce"), ("empirical", "reduce")]
OPTIONS: dict[str, Any] = {"damping": DAMPING, "rescale": None}

every_form = pytest.mark.parametrize(("matvec", "sharing"), FORMS)


@pytest.fixture(autouse=True)
def _double() -> Any:
    with double_precision():
        yield


def close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def make(model: nn.Module, lr: float = 0.0, **options: Any) -> Any:
    return kronfac.CGFAC(model, SGD(model.parameters(), lr=lr), **{**OPTIONS, **options})


# --- the reference -------------------------------------------------------------------------------


def batch(kind: str, number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return normal(5, 4) if kind == "linear" else normal(5, 2, 3, 3)


def reference_run(kind: str, steps: int, iterations: int, form: tuple[str, str]) -> list[Tensor]:
    torch.manual_seed(0)
    model, _ = make_model(kind)
    layers: list[Any] = matrix_layers(model)
    for number in range(steps):
        x = batch(kind, number)
        rows = [rows_of(model, layer, x) for layer in layers]
        model.zero_grad()
        sample_losses(model(x)).mean().backward()
        for layer, (a, g), V in zip(layers, rows, gradients(model), strict=True):
            a, g, V = (one if V.dim() == 3 else one[None] for one in (a, g, V))
            groups = zip(a, g, V, strict=True)
            found = [solve(curvature(a, g, *form), V, DAMPING, iterations) for a, g, V in groups]
            plain = torch.empty_like(torch.cat(found))
            plain[:, feature_order(layer)] = torch.cat(found)
            with torch.no_grad():
                layer.weight -= 0.05 * plain[:, :-1].reshape(layer.weight.shape)
                layer.bias -= 0.05 * plain[:, -1]
    return [p.detach().clone() for p in model.parameters()]


@every_form
@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_it_equals_the_slow_reference(
    kind: str, iterations: int, matvec: str, sharing: str
) -> None:
    torch.manual_seed(0)
    model, _ = make_model(kind)
    optimizer = make(model, 0.05, matvec=matvec, sharing=sharing, iterations=iterations)
    for number in range(3):
        optimizer.zero_grad()
        sample_losses(model(batch(kind, number))).mean().backward()
        optimizer.step()
    expected = reference_run(kind, 3, iterations, (matvec, sharing))
    close([p.detach() for p in model.parameters()], expected)


# --- converged -----------------------------------------------------------------------------------


def applied(optimizer: Any, kind: str, micro: int = 1) -> dict[str, Tensor]:
    """What the second of two steps would apply."""
    model = optimizer.model
    for number in range(2):
        optimizer.zero_grad()
        x, y = KINDS[kind].batch(number, 6)
        for part, labels in zip(x.chunk(micro), y.chunk(micro), strict=True):
            scores = model(part)
            if optimizer._preconditioner.options.sampled:
                optimizer.observe(scores)
            (F.cross_entropy(scores.flatten(0, -2), labels.flatten()) / micro).backward()
        optimizer.step()
    return named_gradients(model)


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_average": "token"}, {"loss_average": None}, {"fisher": "exact"}],
    ids=str,
)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer", "shared", "positions"])
def test_the_kronecker_product_converges_to_kfac(
    kind: str, sharing: str, options: dict[str, Any]
) -> None:
    """Whatever the loss was divided by, for weights used twice and inputs that serve all samples."""
    common: dict[str, Any] = {"sharing": sharing, "on_missing": "ignore", **OPTIONS, **options}
    common["include"] = [nn.Linear, nn.Conv2d, nn.MultiheadAttention]
    first, second = KINDS[kind].model(), KINDS[kind].model()
    found = applied(make(first, iterations=300, **common), kind)
    base = SGD(second.parameters(), lr=0.0)
    every = {"factor_every": 1, "refresh_every": 1, "decay": 0.0}
    close(found, applied(kronfac.KFAC(second, base, solver="eigen", **every, **common), kind))


def test_the_empirical_product_converges_to_the_exact_solve() -> None:
    model, x = make_model("linear")
    optimizer = make(model, matvec="empirical", iterations=100)
    rows = [rows_of(model, layer, x) for layer in matrix_layers(model)]
    sample_losses(model(x)).mean().backward()
    before = gradients(model)
    optimizer.step()
    for (a, g), V, found in zip(rows, before, gradients(model), strict=True):
        F_ = curvature(a, g, "empirical", "reduce")
        damped = F_ + DAMPING * torch.eye(len(F_))
        close(found.flatten(), torch.linalg.solve(damped, V.flatten()))


@pytest.mark.parametrize("matvec", ["kronecker", "empirical"])
def test_one_iteration_more_than_the_rank_is_enough(matvec: str) -> None:
    """Two samples: an empirical Fisher of rank 2, and factors of rank 2 each."""
    results = []
    for iterations in (3 if matvec == "empirical" else 5, 50):
        torch.manual_seed(0)
        model = nn.Linear(6, 4, bias=False)
        optimizer = make(model, matvec=matvec, iterations=iterations)
        sample_losses(model(normal(2, 6))).mean().backward()
        optimizer.step()
        results.append(named_gradients(model))
    close(*results)


def test_no_iteration_leaves_the_gradient() -> None:
    model = nn.Linear(6, 4)
    optimizer = make(model, iterations=0)
    sample_losses(model(normal(5, 6))).mean().backward()
    before = named_gradients(model)
    optimizer.step()
    close(named_gradients(model), before)


@every_form
def test_curvature_is_known_without_damping(matvec: str, sharing: str) -> None:
    """Its product and its mean eigenvalue, by which damping adapts itself or is relative."""
    model, x = make_model("conv")
    optimizer = make(model, matvec=matvec, sharing=sharing)
    rows = [rows_of(model, layer, x) for layer in matrix_layers(model)]
    sample_losses(model(x)).mean().backward()
    optimizer.step()
    for (a, g), layer in zip(rows, optimizer.layers, strict=True):
        exact = curvature(a, g, matvec, sharing)
        X = normal(*layer.layer.matrix_shape)
        close(layer.block.multiply(layer.solution, X).flatten(), exact @ X.flatten())
        close(layer.block.mean_curvature(layer.solution).squeeze(), exact.trace() / len(exact))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradients_of_any_size(size: float) -> None:
    block = CGFACBlock(
        (3, 4), torch.float32, matvec="kronecker", iterations=5, max_rows=9, per_sample=True
    )
    rows = {"a": normal(5, 4).float(), "g": normal(5, 3).float()}
    solution = {**rows, "scale": torch.ones(1, 1).float(), "mean": torch.ones(1, 1).float()}
    V = normal(3, 4).float()
    found = block.precondition(solution, size * V, DAMPING) / size
    torch.testing.assert_close(
        found, block.precondition(solution, V, DAMPING), rtol=1e-3, atol=1e-4
    )


# --- what is kept --------------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """Takes note of the last two sizes of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor):
                self.seen.add(tuple(one.shape[-2:]))
        return made


def shapes_of(method: Any, **options: Any) -> set[tuple[int, ...]]:
    model = nn.Linear(23, 19, bias=False)
    optimizer = method(model, SGD(model.parameters(), lr=0.1), **options)
    with Shapes() as shapes:
        for _ in range(2):
            optimizer.zero_grad()
            sample_losses(model(normal(29, 23))).mean().backward()
            optimizer.step()
    return shapes.seen


@every_form
def test_no_factor_is_ever_formed(matvec: str, sharing: str) -> None:
    factors = {(23, 23), (19, 19)}
    options = {"matvec": matvec, "sharing": sharing}
    assert not factors & shapes_of(kronfac.CGFAC, rescale=None, **options)
    assert factors <= shapes_of(kronfac.KFAC)
    # Orthogonal steps take products of the shorter side, less than the layer's own size.
    assert factors & shapes_of(kronfac.CGFAC, **options) == {(19, 19)}


@pytest.mark.parametrize(("sharing", "rows"), [("reduce", 5), ("expand", 5 * 9)])
def test_rows_are_all_that_is_kept(sharing: str, rows: int) -> None:
    model = nn.Conv2d(2, 4, 3, padding=1)
    optimizer = make(model, sharing=sharing)
    model(normal(5, 2, 3, 3)).square().sum().backward()
    optimizer.step()
    (layer,) = optimizer.layers
    held = [*layer.solution.values(), *(one.sum for one in layer.running.values())]
    storages = {one.untyped_storage().data_ptr(): one.numel() for one in held}
    assert sum(storages.values()) <= rows * (19 + 4) + 4  # and four numbers


def bytes_on_rank(rank: int, matvec: str) -> dict[str, int]:
    with double_precision():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(9, 6, bias=False))
        base = SGD(model.parameters(), lr=0.01)
        optimizer = kronfac.CGFAC(model, base, matvec=matvec, rescale=None, distribute="replicated")
        for _ in range(3):
            optimizer.zero_grad()
            sample_losses(model(torch.randn(4, 9))).mean().backward()
            optimizer.step()
        found: dict[str, int] = optimizer.stats()["bytes"]
        return found


@pytest.mark.parametrize(("matvec", "traces"), [("kronecker", 2), ("empirical", 1)])
def test_rows_travel_and_a_number_for_each_trace(matvec: str, traces: int) -> None:
    """Each of two ranks sends its four rows to the other, and adds up the traces."""
    for found in run(2, bytes_on_rank, matvec):
        assert found["reduce"] == 3 * 8 * (4 * (9 + 6) + traces)
        assert found["share"] == found["spread"] == 0


# --- options -------------------------------------------------------------------------------------


def test_rows_that_would_not_fit_are_refused_with_their_number() -> None:
    model = nn.Conv2d(2, 4, 3, padding=1)
    optimizer = make(model, sharing="expand", max_rows=44)
    with pytest.raises(ValueError, match=r"hold 45 rows of a layer of shape 4 x 19, 0\.0 MB"):
        model(normal(5, 2, 3, 3))
    assert optimizer.layers


def test_rows_that_are_not_grouped_by_sample_are_all_kept() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1)).transpose(0, 1)

    model = Turned()
    optimizer = make(model, matvec="empirical")
    model(normal(5, 2, 4)).square().mean().backward()
    optimizer.step()
    (layer,) = optimizer.layers
    assert layer.block.label == "cg, kronecker"
    assert layer.solution["a"].shape == (10, 5)


def test_embeddings_are_left_to_the_base_optimizer() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
    assert "as wide as the vocabulary" in str(make(model).left_out())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"matvec": "dense"}, "matvec='dense' is not supported"),
        ({"iterations": -1}, "iterations=-1 must be a whole number of at least 0"),
        ({"iterations": 2.5}, "iterations=2.5 must be a whole number"),
        ({"sharing": "both"}, "sharing='both' is not supported"),
        ({"max_rows": 0}, "max_rows=0 must be a whole number"),
        ({"matvec": "empirical", "sharing": "expand"}, "choose sharing='reduce'"),
        ({"fisher": "forward"}, "fisher='forward' observes no gradients"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(nn.Linear(3, 2), **options)
