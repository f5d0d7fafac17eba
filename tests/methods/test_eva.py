"""Eva: curvature of rank one, its closed-form inverses, and what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.methods.eva import RankOneBlock, TwoSidedBlock
from tests import oracles
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.methods import small_nets
from tests.references.eva import SlowEva
from tests.training import layers

GAMMA = 0.03
DOUBLE = torch.float64
FORMS = ["kfac", "input", "gradient"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def block_of(form: str, shape: tuple[int, ...], dtype: torch.dtype = DOUBLE, **more: Any) -> Any:
    if form == "gradient":
        return TwoSidedBlock(shape, dtype)
    return RankOneBlock(shape, dtype, output_side=form == "kfac", **more)


def dense_curvature(form: str, solution: dict[str, Tensor], d_out: int) -> Tensor:
    left = torch.eye(d_out, dtype=DOUBLE)
    if form == "kfac":
        left = torch.outer(solution["b"], solution["b"])
    return torch.kron(left, torch.outer(solution["a"], solution["a"]))


def solved(curvature: Tensor, V: Tensor, damping: float = GAMMA) -> Tensor:
    damped = curvature + damping * torch.eye(len(curvature), dtype=DOUBLE)
    return torch.linalg.solve(damped, V.flatten()).reshape(V.shape)


# --- the inverses ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["kfac", "input"])
def test_the_step_is_the_dense_inverse(form: str) -> None:
    solution, V = {"a": normal(5), "b": normal(4)}, normal(4, 5)
    found = block_of(form, (4, 5)).precondition(solution, V, GAMMA)
    assert_equal(found, solved(dense_curvature(form, solution, 4), V))


@pytest.mark.parametrize("form", FORMS)
def test_groups_and_batches_are_solved_one_by_one(form: str) -> None:
    solution = {"a": normal(3, 2, 5), "b": normal(3, 2, 4)}
    solution |= {"left": solution["b"], "right": solution["a"]}
    V, block = normal(3, 2, 4, 5), block_of(form, (2, 4, 5))
    found = block.precondition(solution, V, GAMMA)
    for index in [(0, 0), (2, 1)]:
        own = {name: value[index] for name, value in solution.items()}
        assert_equal(found[index], block.precondition(own, V[index], GAMMA))


def test_the_kfac_form_is_kfac_with_outer_products_of_means() -> None:
    a, b, V = normal(5), normal(4), normal(4, 5)
    found = block_of("kfac", (4, 5)).precondition({"a": a, "b": b}, V, GAMMA)
    assert_equal(found, oracles.eigen_step(torch.outer(a, a), torch.outer(b, b), V, GAMMA))


def test_on_one_sample_it_is_kfac() -> None:
    steps = []
    for method in (kronfac.Eva, kronfac.KFAC):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        base = SGD(model.parameters(), lr=0.1)
        options = {"damping": GAMMA, "rescale": None, "factor_every": 1, "refresh_every": 1}
        optimizer = method(model, base, **options)
        F.cross_entropy(model(normal(1, 4)), torch.tensor([1])).backward()
        optimizer.step()
        steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_equal(*steps)


def test_the_gradient_form_is_shampoo_with_sides_of_rank_one() -> None:
    solution, V = {"left": normal(4), "right": normal(5)}, normal(4, 5)

    def root(vector: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(torch.outer(vector, vector))
        return vectors @ torch.diag((values.clamp(min=0) + GAMMA) ** -0.25) @ vectors.mT

    found = block_of("gradient", (4, 5)).precondition(solution, V, GAMMA)
    assert_equal(found, root(solution["left"]) @ V @ root(solution["right"]))


def test_sides_of_rank_one_are_never_more_than_shampoos() -> None:
    V = normal(4, 5)
    seen = block_of("gradient", (4, 5)).observe_gradient(V)
    for vector, side in ((seen["left"], V @ V.mT), (seen["right"], V.mT @ V)):
        assert torch.linalg.eigvalsh(side - torch.outer(vector, vector)).min() > -1e-12


def test_sides_of_rank_one_are_exact_for_constant_columns_and_rows() -> None:
    V = torch.full((4, 5), 0.3, dtype=DOUBLE)
    seen = block_of("gradient", (4, 5)).observe_gradient(V)
    assert_equal(torch.outer(seen["left"], seen["left"]), V @ V.mT)
    assert_equal(torch.outer(seen["right"], seen["right"]), V.mT @ V)


@pytest.mark.parametrize(("rescale", "damping"), [("graft", 10.0), ("kl-clip", GAMMA)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_it_follows_the_reference(kind: str, form: str, rescale: str, damping: float) -> None:
    """Grafted steps, the default, and the paper's."""
    model, other = small_nets.twins(kind)
    given = {} if rescale == "graft" else {"rescale": rescale, "damping": damping}
    optimizer = kronfac.Eva(model, SGD(model.parameters(), lr=0.1), form=form, **given)
    slow = SlowEva(other, form, lr=0.1, damping=damping, clips=rescale == "kl-clip")
    small_nets.assert_follows(optimizer, slow, kind)


# --- curvature -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["kfac", "input"])
def test_curvature_and_its_mean(form: str) -> None:
    solution, V = {"a": normal(5), "b": normal(4)}, normal(4, 5)
    block, dense = block_of(form, (4, 5)), dense_curvature(form, solution, 4)
    assert_equal(block.multiply(solution, V).flatten(), dense @ V.flatten())
    assert_equal(block.mean_curvature(solution), (dense.trace() / 20).reshape(1, 1))


@pytest.mark.parametrize("form", ["kfac", "input"])
def test_relative_damping_is_a_share_of_the_mean_curvature(form: str) -> None:
    model = nn.Linear(4, 3, bias=False).double()
    base = SGD(model.parameters(), lr=0.0)
    damping = kronfac.Relative(0.5)
    optimizer = kronfac.Eva(model, base, form=form, damping=damping, rescale=None)
    F.cross_entropy(model(normal(6, 4)), torch.arange(6) % 3).backward()
    V = model.weight.grad.clone()
    optimizer.step()
    (state,) = layers(optimizer).values()
    dense = dense_curvature(form, state.solution, 3)
    assert_equal(model.weight.grad, solved(dense, V, float(0.5 * dense.trace() / 12)))


def test_damping_may_adapt_itself() -> None:
    model = small_nets.make("linear")
    damping = kronfac.LevenbergMarquardt(1e-2, every=1)
    base = SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.Eva(model, base, damping=damping, rescale="kl-clip")
    x, y = small_nets.batch("linear", 0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(4)]
    assert losses[-1] < losses[0]


# --- embeddings and norms --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["kfac", "input"])
def test_tokens_have_their_exact_second_moment(form: str) -> None:
    p, b = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=DOUBLE), normal(3)
    V = normal(3, 4)
    block = block_of(form, (3, 4), picks_columns=True)
    left = torch.outer(b, b) if form == "kfac" else torch.eye(3, dtype=DOUBLE)
    expected = solved(torch.kron(left, torch.diag(p)), V)
    expected[:, 1] = V[:, 1]  # never seen
    solution = {"a": p, "b": b}
    assert_equal(block.precondition(solution, V, GAMMA), expected)
    assert_equal(
        block.multiply(solution, V).flatten(), torch.kron(left, torch.diag(p)) @ V.flatten()
    )
    trace = torch.kron(left, torch.diag(p)).trace()
    assert_equal(block.mean_curvature(solution), (trace / 12).reshape(1, 1))


@pytest.mark.parametrize("form", FORMS)
def test_norms_are_left_to_the_base_optimizer(form: str) -> None:
    model = KINDS["transformer"].model()
    optimizer = kronfac.Eva(model, SGD(model.parameters(), lr=0.1), form=form)
    left_out = {"norm.weight", "norm.bias", "norm2.weight", "norm2.bias"}
    assert set(optimizer.left_out()) == left_out
    assert "a norm has no mean input" in str(optimizer)


# --- what may go wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_without_vectors_the_step_is_the_gradient_over_the_damping(form: str) -> None:
    block, V = block_of(form, (4, 5)), normal(4, 5)
    zeros = {
        name: torch.zeros(shape, dtype=DOUBLE) for name, shape in block.solution_shapes.items()
    }
    power = 0.5 if form == "gradient" else 1.0
    assert_equal(block.precondition(zeros, V, GAMMA), V / GAMMA**power)


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e19, 3e38])
@pytest.mark.parametrize("form", FORMS)
def test_extreme_vectors_stay_finite(form: str, size: float) -> None:
    block = block_of(form, (4, 5), torch.float32)
    solution = {name: torch.full(shape, size) for name, shape in block.solution_shapes.items()}
    V = torch.randn(4, 5)
    for damping in (GAMMA, torch.full((1, 1), GAMMA)):
        assert torch.isfinite(block.precondition(solution, V, damping)).all()
    if form != "gradient":
        assert torch.isfinite(block.mean_curvature(solution)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "shampoo"}, "form='shampoo' is not supported; choose one of 'kfac', 'input'"),
        ({"fisher": "mc"}, "form='kfac' needs the mean of the loss's own output gradients"),
        ({"fisher": "forward"}, "choose fisher='empirical', or form='input'"),
        ({"form": "gradient", "damping": kronfac.Relative()}, "does not know; give damping=1e-3"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        kronfac.Eva(model, SGD(model.parameters(), lr=0.1), **options)


# --- what travels ----------------------------------------------------------------------------

STEPS = 3
RUNS: dict[str, dict[str, Any]] = {form: {"form": form} for form in FORMS}
RUNS["kfac in 16 bits"] = {"form": "kfac", "wire_dtype": torch.bfloat16}


def traffic_on_rank(rank: int, scheme: str) -> dict[str, dict[str, int]]:
    found = {}
    for name, options in RUNS.items():
        model = DistributedDataParallel(KINDS["cnn"].model())
        distribute = kronfac.Distribute(scheme, wire_dtype=options.get("wire_dtype"))
        base = SGD(model.parameters(), lr=0.01)
        optimizer = kronfac.Eva(
            model, base, form=options["form"], distribute=distribute, rescale="graft"
        )
        for number in range(STEPS):
            x, y = KINDS["cnn"].batch(10 * number + rank, 3)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found[name] = optimizer.stats()["bytes"]
        optimizer.detach()
    return found


def sides(model: nn.Module) -> dict[str, int]:
    """How many numbers a step sends, counted from the modules."""
    watched = [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
    d_in = sum(one.weight[0].numel() + (one.bias is not None) for one in watched)
    d_out = sum(len(one.weight) for one in watched)
    return {"kfac": d_in + d_out, "input": d_in, "gradient": 0}


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt", "mem-opt"])
def test_only_vectors_travel(scheme: str) -> None:
    model = KINDS["cnn"].model()
    numbers = sides(model)
    watched = [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
    gradients = sum(p.numel() for one in watched for p in one.parameters())
    for found in run(2, traffic_on_rank, scheme):
        for name, bytes_ in found.items():
            form, item = RUNS[name]["form"], 2 if "wire_dtype" in RUNS[name] else 4
            spread = STEPS * item * gradients if scheme == "mem-opt" else 0
            expected = {"reduce": STEPS * item * numbers[form], "share": 0, "spread": spread}
            assert {phase: bytes_[phase] for phase in expected} == expected, name
