"""SINGD: its equations, what it promises of memory and traffic, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac
from kronfac.layers.rows import DenseRows
from kronfac.methods.singd.block import SINGDBlock
from kronfac.methods.singd.method import STRUCTURES, SINGDMethod
from kronfac.protocol.block import Given
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
from tests.references.singd import SINGD as Reference
from tests.references.singd import project

DAMPING, BLOCK = 0.1, 4
#: Every structure, and both rules of update.
FORMS: list[dict[str, Any]] = [{"structure": name, "block_dim": BLOCK} for name in STRUCTURES]
FORMS += [{"kfac_like": True}, {"structure": "lower-triangular", "kfac_like": True}]


@pytest.fixture(autouse=True)
def _double() -> Any:
    with double_precision():
        yield


def form_id(options: dict[str, Any]) -> str:
    return ",".join(str(value) for name, value in options.items() if name != "block_dim")


every_form = pytest.mark.parametrize("options", FORMS, ids=form_id)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


# --- one block -----------------------------------------------------------------------------------


def make_block(d_out: int, d_in: int, **options: Any) -> SINGDBlock:
    method = SINGDMethod(**options)
    sides = {"A": method._structure(d_in), "G": method._structure(d_out)}
    return SINGDBlock(
        (d_out, d_in),
        torch.float64,
        sides,
        lr_cov=method.lr_cov,
        alpha1=method.alpha1,
        kfac_like=method.kfac_like,
    )


def factor(width: int, rows: int = 20) -> Tensor:
    x = normal(rows, width)
    return x.T @ x / rows


def update(
    block: SINGDBlock,
    A: Tensor,
    G: Tensor,
    damping: float = DAMPING,
    before: Any = None,
    **more: Any,
) -> dict[str, Tensor]:
    found = block.solve("", Given({"A": A, "G": G}, damping, previous=before, **more))
    assert found is not None
    return found


@pytest.mark.parametrize("structure", ["dense", "lower-triangular"])
def test_ikfac_is_the_inverse_of_an_average_up_to_second_order(structure: str) -> None:
    """`K Kᵀ` against `((1-β)A₀ + β(A + λI))⁻¹`: the error over β² does not depend on β."""
    before, A = factor(5), factor(5)
    root = torch.linalg.cholesky(torch.linalg.inv(before))
    errors = []
    for beta in (1e-3, 5e-4):
        block = make_block(3, 5, structure=structure, kfac_like=True, lr_cov=beta)
        side = block.structures["A"]
        start = {"K": root, "C": block.structures["G"].identity(root)}
        if structure == "lower-triangular":
            start["K"] = root[tuple(torch.tril_indices(5, 5))]
        K = side.product(torch.eye(5), update(block, A, factor(3), DAMPING, start)["K"])
        average = (1 - beta) * before + beta * (A + DAMPING * torch.eye(5))
        errors.append((K @ K.T - torch.linalg.inv(average)).norm() / beta**2)
    assert errors[0] == pytest.approx(float(errors[1]), rel=0.02)


@every_form
def test_an_exact_root_stays(options: dict[str, Any]) -> None:
    """`H = I` and no damping: there is nothing to change."""
    block = make_block(6, 9, **options)
    through = {f"{side}.trace": torch.ones(1) for side in "AG"}
    means = {
        side: one.observe(_identity_rows(one.width), None) for side, one in block.structures.items()
    }
    found = block.solve("", Given(means | through, 0.0))
    assert found is not None
    for side, name in (("A", "K"), ("G", "C")):
        close(found[name], block.structures[side].identity(found[name]))


def _identity_rows(width: int) -> Any:
    return DenseRows(torch.eye(width).unsqueeze(-2))


def test_ikfac_settles_at_the_inverse_of_both_damped_factors() -> None:
    block = make_block(3, 4, kfac_like=True, lr_cov=0.3)
    A, G, V = factor(4), factor(3), normal(3, 4)
    solution = None
    for _ in range(400):
        solution = update(block, A, G, DAMPING, solution)
    assert solution is not None
    left, right = (torch.linalg.inv(M + DAMPING * torch.eye(len(M))) for M in (G, A))
    close(block.precondition(solution, V, DAMPING), left @ V @ right)


def test_ingd_settles_at_the_inverse_of_the_damped_product_of_numbers() -> None:
    block = make_block(1, 1, lr_cov=0.1)
    solution = None
    for _ in range(600):
        solution = update(block, torch.full((1, 1), 3.0), torch.full((1, 1), 0.2), 0.05, solution)
    assert solution is not None
    close(block.precondition(solution, torch.ones(1, 1), 0.05), torch.full((1, 1), 1 / 0.65))


def test_ingd_without_damping_settles_at_kfac() -> None:
    block = make_block(3, 4)
    A, G, V = factor(4), factor(3), normal(3, 4)
    solution = None
    for _ in range(1500):
        solution = update(block, A, G, 0.0, solution)
    assert solution is not None
    found = block.precondition(solution, V, 0.0)
    close(found, torch.linalg.inv(G) @ V @ torch.linalg.inv(A))


@pytest.mark.parametrize("size", [1e3, 1e12, 1e150])
@every_form
def test_no_update_takes_more_than_half_of_a_root(options: dict[str, Any], size: float) -> None:
    block = make_block(6, 9, **options)
    solution: dict[str, Tensor] = {}
    for _ in range(5):
        means = {
            side: size * one.observe(_rows(one.width), None)
            for side, one in block.structures.items()
        }
        means |= {f"{side}.trace": torch.full((1,), size) for side in "AG"}
        before = solution or None
        found = block.solve("", Given(means, DAMPING, previous=before))
        assert found is not None
        for side, name in (("A", "K"), ("G", "C")):
            own = block.structures[side]
            eye = torch.eye(own.width)
            old = own.product(eye, before[name]) if before else eye
            change = torch.linalg.solve(old, own.product(eye, found[name])) - eye
            assert torch.linalg.matrix_norm(change, ord=2) <= 0.5 + 1e-9
        solution = found


def _rows(width: int) -> Any:
    return DenseRows(normal(7, 1, width))


def test_what_overflows_leaves_the_roots_as_they_were() -> None:
    block = make_block(3, 4)
    before = update(block, factor(4), factor(3))
    after = update(block, 1e300 * factor(4), 1e300 * factor(3), before=before)
    for name, value in after.items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kfac_like", [False, True])
def test_relative_damping_is_a_share_of_the_mean_curvature(kfac_like: bool) -> None:
    block, A, G = make_block(3, 4, kfac_like=kfac_like), factor(4), factor(3)
    shared = update(block, A, G, 0.25, relative=True)
    means = A.trace() / 4, G.trace() / 3
    if kfac_like:  # half of the exponent for each side
        first = update(block, A, G, 0.5 * float(means[0]))["K"]
        second = update(block, A, G, 0.5 * float(means[1]))["C"]
        expected = {"K": first, "C": second}
    else:
        expected = update(block, A, G, 0.25 * float(means[0] * means[1]))
    for name, value in expected.items():
        close(shared[name], value)


def test_relative_damping_of_no_curvature_leaves_the_gradient_as_it_is() -> None:
    block, V = make_block(3, 4), normal(3, 4)
    solution = update(block, factor(4), torch.zeros(3, 3), 0.25, relative=True)
    close(block.precondition(solution, V, 0.25), V)


# --- whole models --------------------------------------------------------------------------------


def reference_run(kind: str, steps: int, **options: Any) -> list[Tensor]:
    """Weights after training with the slow reference, one root for each group."""
    torch.manual_seed(0)
    model, _ = make_model(kind)
    layers = matrix_layers(model)
    roots: dict[Any, list[Reference]] = {}
    for number in range(steps):
        x = _batch(kind, number)
        rows = [rows_of(model, layer, x) for layer in layers]
        model.zero_grad()
        sample_losses(model(x)).mean().backward()
        for layer, (a, g), V in zip(layers, rows, gradients(model), strict=True):
            grouped = V.dim() == 3
            a, g, V = (one if grouped else one[None] for one in (a, g, V))
            own = roots.setdefault(
                layer, [Reference(a.shape[-1], g.shape[-1], **options) for _ in V]
            )
            found = []
            for root, a_j, g_j, V_j in zip(own, a, g, V, strict=True):
                samples = a_j.shape[0]
                a_j, g_j = a_j.flatten(0, 1), g_j.flatten(0, 1)
                root.update(a_j.T @ a_j / len(a_j), samples * g_j.T @ g_j, DAMPING)
                found.append(root.precondition(V_j))
            _descend(layer, torch.stack(found))
    return [p.detach().clone() for p in model.parameters()]


def _batch(kind: str, number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return normal(5, 4) if kind == "linear" else normal(5, 2, 3, 3)


def _descend(layer: Any, step: Tensor, rate: float = 0.05) -> None:
    """Move a layer by a matrix whose features are in the library's order."""
    step = step.flatten(0, 1)
    plain = torch.empty_like(step)
    plain[:, feature_order(layer)] = step
    with torch.no_grad():
        layer.weight -= rate * plain[:, :-1].reshape(layer.weight.shape)
        layer.bias -= rate * plain[:, -1]


@every_form
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_it_equals_the_slow_reference(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, _ = make_model(kind)
    optimizer = kronfac.SINGD(
        model,
        SGD(model.parameters(), lr=0.05),
        damping=DAMPING,
        factor_every=1,
        rescale=None,
        early_refresh=False,
        **options,
    )
    for number in range(4):
        optimizer.zero_grad()
        sample_losses(model(_batch(kind, number))).mean().backward()
        optimizer.step()
    for found, expected in zip(model.parameters(), reference_run(kind, 4, **options), strict=True):
        close(found.detach(), expected)


@every_form
def test_roots_stay_in_their_structure(options: dict[str, Any]) -> None:
    """The reference makes whole matrices; what it makes has the pattern of the structure."""
    root = Reference(9, 6, **options)
    for _ in range(4):
        root.update(factor(9), factor(6), DAMPING)
    pattern = project(options.get("structure", "dense"), torch.ones(9, 9), BLOCK) != 0
    assert not (root.K * ~pattern).any()
    assert root.K.abs().sum() > 0


def train(model: nn.Module, optimizer: Any, kind: str, steps: int) -> list[float]:
    losses, data = [], KINDS[kind].batch(0, 32)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0]).flatten(0, -2), data[1].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Decompositions(TorchDispatchMode):
    """Counts calls of what decomposes, inverts or solves."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        solves = name.startswith(("linalg_", "_linalg_", "cholesky", "lu_", "geqrf", "inverse"))
        self.count += solves and not name.startswith("linalg_vector_norm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_is_decomposed(structure: str) -> None:
    for kind in ("cnn", "transformer"):
        model = KINDS[kind].model()
        base = SGD(model.parameters(), lr=0.01)
        optimizer = kronfac.SINGD(model, base, structure=structure, factor_every=1)
        with Decompositions() as counted:
            train(model, optimizer, kind, 3)
        assert counted.count == 0


def test_decompositions_would_be_counted() -> None:
    model = KINDS["mlp"].model()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.01))
    with Decompositions() as counted:
        train(model, optimizer, "mlp", 1)
    assert counted.count > 0


# --- memory and precision ------------------------------------------------------------------------


def state_bytes(optimizer: Any) -> int:
    """Bytes of all tensors that a state dict holds."""
    entries = optimizer.state_dict()["state"].values()
    values = [value for entry in entries for value in entry.values()]
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, Tensor))


def wide_model() -> nn.Module:
    """A transformer whose layers are wide enough for their state to be matrices."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True).float()


def one_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 5, 96, dtype=torch.float32)).square().mean().backward()
    optimizer.step()


def test_diagonal_state_is_at_most_that_of_adamw() -> None:
    model = wide_model()
    momentum = SGD(model.parameters(), lr=0.01, momentum=0.9)
    diagonal = kronfac.SINGD(model, momentum, structure="diagonal")
    one_step(model, diagonal)
    adamw = AdamW(model.parameters())
    one_step(model, adamw)
    assert state_bytes(diagonal) <= 1.05 * state_bytes(adamw)
    assert state_bytes(diagonal) <= 0.6 * state_bytes(adamw)  # half of it, and vectors


@pytest.mark.parametrize("structure", STRUCTURES)
def test_state_in_16_bits(structure: str) -> None:
    model = KINDS["transformer"].model().float()
    base = SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"structure": structure, "factor_every": 1}
    optimizer = kronfac.SINGD(model, base, state_dtype="bfloat16", **options)
    losses = train(model, optimizer, "transformer", 10)
    kept = {
        value.dtype
        for layer in optimizer.layers
        if isinstance(layer.block, SINGDBlock)
        for value in layer.solution.values()
    }
    assert kept == {torch.bfloat16}
    assert losses[-1] < 0.99 * losses[0]


def test_roots_in_16_bits_stop_near_those_in_64() -> None:
    A, G = factor(4), factor(3)
    narrow, wide = make_block(3, 4), make_block(3, 4)
    narrow.solution_dtype = torch.bfloat16
    first = second = None
    for _ in range(300):
        first, second = update(narrow, A, G, DAMPING, first), update(wide, A, G, DAMPING, second)
    assert first is not None
    assert second is not None
    V = normal(3, 4)
    exact = wide.precondition(second, V, DAMPING)
    error = (narrow.precondition(first, V, DAMPING) - exact).norm() / exact.norm()
    assert error < 0.1


def bytes_on_rank(rank: int, structure: str, scheme: str) -> dict[str, int]:
    with double_precision():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(9, 6, bias=False))
        options: dict[str, Any] = {"structure": structure, "block_dim": BLOCK, "factor_every": 1}
        options |= {"rescale": None, "early_refresh": False, "distribute": scheme}
        optimizer = kronfac.SINGD(model, SGD(model.parameters(), lr=0.01), **options)
        for _ in range(3):
            optimizer.zero_grad()
            sample_losses(model(torch.randn(4, 9))).mean().backward()
            optimizer.step()
        found: dict[str, int] = optimizer.stats()["bytes"]
        return found


@pytest.mark.parametrize(
    ("structure", "numbers"),
    [
        ("dense", 9 * 10 // 2 + 6 * 7 // 2),
        ("lower-triangular", 9 * 10 // 2 + 6 * 7 // 2),
        ("block-diagonal", 4 * 4 * 2 + 1 + 4 * 4 + 2 * 2),
        ("hierarchical", (2 * 9 + 5 + 2 * 7) + (2 * 6 + 2 + 2 * 4) + 2),  # and two traces
        ("toeplitz", 9 + 6 + 2),
        ("diagonal", 9 + 6),
    ],
)
def test_what_travels_has_the_size_of_the_structure(structure: str, numbers: int) -> None:
    for found in run(2, bytes_on_rank, structure, "replicated"):
        assert found["reduce"] == 3 * 8 * numbers
        assert found["share"] == found["spread"] == 0


# --- embeddings ----------------------------------------------------------------------------------


def test_tokens_that_were_never_seen_pass_their_raw_gradient() -> None:
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 2))
    options: dict[str, Any] = {"factor_every": 1, "rescale": None}
    optimizer = kronfac.SINGD(model, SGD(model.parameters(), lr=0.0), **options)
    for tokens in ([[0, 1], [1, 2]], [[0, 2], [2, 0]]):
        optimizer.zero_grad()
        model(torch.tensor(tokens)).square().sum().backward()
        optimizer.step()
    solution = optimizer.layers[0].solution
    assert (solution["K"] != 0).tolist() == [True] * 3 + [False] * 3
    raw = optimizer.layers[0].block.precondition(solution, torch.ones(3, 6), 1e-3)[:, 3:]
    assert torch.equal(raw, torch.ones(3, 3))


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"structure": "sparse"}, "structure='sparse' is not supported"),
        ({"lr_cov": 0.0}, "lr_cov=0.0 must be a positive"),
        ({"alpha1": 1.0}, r"alpha1=1.0 must be a number in \[0, 1\)"),
        ({"block_dim": 0}, "block_dim=0 must be a whole number"),
        ({"max_dim": 0.5}, "max_dim=0.5 must be a whole number"),
        ({"sharing": "both"}, "sharing='both' is not supported"),
        ({"kfac_like": "yes"}, "kfac_like='yes' is not supported"),
        ({"state_dtype": "int8"}, "state_dtype='int8' is not supported"),
        ({"fisher": "forward"}, "fisher='forward' observes no gradients"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=sentence):
        kronfac.SINGD(model, SGD(model.parameters(), lr=0.1), **options)


def test_a_side_that_is_too_wide_is_diagonal() -> None:
    model = nn.Linear(9, 4, bias=False)
    optimizer = kronfac.SINGD(model, SGD(model.parameters(), lr=0.1), max_dim=5)
    (layer,) = optimizer.layers
    assert layer.block.solution_shapes["K"] == (9,)
    assert layer.block.solution_shapes["C"] == (4, 4)
    assert "inverse-free, diagonal, dense" in str(optimizer)
