"""EKFAC: against the dense Fisher, a slow reference, and K-FAC where they must be the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.layers.rows import DenseRows, TokenRows
from kronfac.methods.ekfac.block import EKFACBlock
from kronfac.methods.ekfac.moments import add_token_moments, rebased, sample_moments
from kronfac.methods.kfac import paired
from kronfac.protocol.block import Context, Given
from tests import oracles
from tests.distributed.equivalence import double_precision
from tests.distributed.models import KINDS
from tests.feature_order import in_library_order
from tests.methods.test_protocol import assert_equal
from tests.references.ekfac import SlowEKFAC
from tests.references.nets import (
    Seen,
    assert_trains_alike,
    batches,
    layers_of,
    net,
    sample_losses,
    see,
)
from tests.training import parameters

GAMMA, LR = 0.1, 0.1
PLAIN: dict[str, Any] = {"damping": GAMMA, "rescale": None, "factor_every": 1, "refresh_every": 2}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, lr: float = LR, **options: Any) -> Any:
    return kronfac.EKFAC(model, SGD(model.parameters(), lr=lr), **{**PLAIN, **options})


def take(optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    sample_losses(optimizer.model(x)).mean().backward()
    optimizer.step()


def solutions(optimizer: Any) -> list[dict[str, Tensor]]:
    return [state.solution for state in optimizer.layers]


def basis_of(solution: dict[str, Tensor]) -> Tensor:
    return torch.kron(solution["G.vectors"], solution["A.vectors"])


def in_order(layer: nn.Module, seen: Seen) -> Seen:
    return Seen(in_library_order(layer, seen.a), seen.g, in_library_order(layer, seen.U))


# --- the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["sample", "gradient"])
@pytest.mark.parametrize("kind", ["linear", "conv", "sequence"])
def test_it_equals_the_slow_reference(kind: str, moments: str) -> None:
    optimizer = make(net(kind), moments=moments)
    other = net(kind)
    rules = [SlowEKFAC(moments, GAMMA) for _ in layers_of(other)]
    assert_trains_alike(optimizer, other, rules, batches(kind, 6), LR)


# --- the Fisher --------------------------------------------------------------------------------


def moments_of_one_batch(kind: str, **options: Any) -> list[tuple[Seen, dict[str, Tensor]]]:
    """What each layer has seen and found: the same batch twice, first for the basis."""
    model, (x,) = net(kind), batches(kind, 1)
    seen = [in_order(layer, see(model, layer, x)) for layer in layers_of(model)]
    optimizer = make(model, lr=0.0, refresh_every=9, decay=0.0, **options)
    take(optimizer, x)
    take(optimizer, x)
    return list(zip(seen, solutions(optimizer), strict=True))


@pytest.mark.parametrize("kind", ["linear", "conv", "sequence"])
def test_moments_are_the_diagonal_of_the_fisher(kind: str) -> None:
    for seen, solution in moments_of_one_batch(kind):
        basis = basis_of(solution)
        assert_equal(solution["S"].flatten(), (basis.T @ seen.F @ basis).diagonal())


@pytest.mark.parametrize("kind", ["linear", "conv", "sequence"])
def test_the_trace_is_that_of_the_fisher(kind: str) -> None:
    for seen, solution in moments_of_one_batch(kind):
        assert_equal(solution["S"].sum(), seen.F.trace())


@pytest.mark.parametrize("kind", ["linear", "conv", "sequence"])
def test_it_is_nearer_to_the_fisher_than_kfac(kind: str) -> None:
    for seen, solution in moments_of_one_batch(kind):
        basis = basis_of(solution)
        values = torch.outer(solution["G.values"], solution["A.values"]).flatten()
        kfac, ekfac = (basis * one @ basis.T for one in (values, solution["S"].flatten()))
        assert (seen.F - ekfac).norm() < (seen.F - kfac).norm()


class Twice(nn.Module):
    """One convolution at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(torch.tanh(self.conv(x)))).mean((-2, -1))


def test_uses_of_a_layer_make_one_gradient() -> None:
    model, (x,) = Twice(), batches("conv", 1)
    flat = [oracles._parameter_gradient(model.conv, loss) for loss in sample_losses(model(x))]
    U = in_library_order(model.conv, torch.stack(flat).unflatten(1, (2, -1)))
    optimizer = make(model, lr=0.0, refresh_every=9, decay=0.0)
    take(optimizer, x)
    take(optimizer, x)
    (solution,) = solutions(optimizer)
    turned = solution["G.vectors"].T @ U @ solution["A.vectors"]
    assert_equal(solution["S"], turned.square().mean(0))


def test_reduced_rows_have_the_moments_of_their_products() -> None:
    for seen, solution in moments_of_one_batch("sequence", sharing="reduce"):
        U = torch.einsum("no,ni->noi", seen.g.sum(1), seen.a.mean(1))
        turned = solution["G.vectors"].T @ U @ solution["A.vectors"]
        assert_equal(solution["S"], turned.square().mean(0))


def test_a_kronecker_fisher_has_the_eigenvalues_of_kfac() -> None:
    """All pairs of some a and some g: their products are independent."""
    a, g = torch.randn(7, 4), torch.randn(5, 3)
    rows = DenseRows(a.repeat_interleave(5, 0)[:, None]), DenseRows(g.repeat(7, 1)[:, None])
    block = make_block((3, 4))
    means = {"A": a.T @ a / 7, "G": g.T @ g / 5}
    solution = block.refresh(Given(means, GAMMA))
    assert solution is not None
    S = block.observe_pair(*rows, Context(solution))["S"] / 35
    assert_equal(S, torch.outer(solution["G.values"], solution["A.values"]))


def make_block(shape: tuple[int, ...], **options: Any) -> EKFACBlock:
    given = {"moments": "sample", "decay": None, "max_dim": 100, "per_sample": False, **options}
    return EKFACBlock(shape, torch.float64, **given)


def test_the_exact_fisher_is_that_of_the_model() -> None:
    model, (x,) = net("linear"), batches("linear", 1)
    fishers = [
        oracles.dense_ggn_block(layer, model(x), "categorical") for layer in layers_of(model)
    ]
    optimizer = make(model, lr=0.0, refresh_every=9, decay=0.0, fisher="exact")
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, "categorical")
        F.cross_entropy(outputs, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
    for fisher, solution in zip(fishers, solutions(optimizer), strict=True):
        basis = basis_of(solution)
        assert_equal(solution["S"].flatten(), (basis.T @ fisher @ basis).diagonal())


def test_before_there_are_moments_it_is_kfac() -> None:
    data = batches("conv", 1)
    found = []
    for method in (kronfac.EKFAC, kronfac.KFAC):
        model = net("conv")
        take(method(model, SGD(model.parameters(), lr=LR), **PLAIN), *data)
        found.append(parameters(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


# --- moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)], ids=["plain", "grouped"])
@pytest.mark.parametrize("positions", [1, 4, 6, 9])  # fewer than, between and more than the sides
@pytest.mark.parametrize("sides", ["both", "input", "output", "none"])
def test_sample_moments(batch: tuple[int, ...], positions: int, sides: str) -> None:
    a, g = torch.randn(*batch, 3, positions, 5), torch.randn(*batch, 3, positions, 7)
    Q_in = torch.linalg.qr(torch.randn(*batch, 5, 5))[0] if sides in ("both", "input") else None
    Q_out = torch.linalg.qr(torch.randn(*batch, 7, 7))[0] if sides in ("both", "output") else None
    U = torch.einsum("...nso,...nsi->...noi", g, a)
    U = U if Q_in is None else torch.einsum("...noi,...ij->...noj", U, Q_in)
    U = U if Q_out is None else torch.einsum("...noi,...op->...npi", U, Q_out)
    assert_equal(sample_moments(a, g, Q_in, Q_out), U.square().sum(-3))


def test_moments_of_tokens_that_occur_several_times() -> None:
    tokens, g = torch.tensor([[0, 2, 2, 0], [1, 1, 1, 3]]), torch.randn(2, 4, 3)
    Q = torch.linalg.qr(torch.randn(3, 3))[0]
    a = TokenRows(tokens, 5, None, torch.float64).dense()
    found = add_token_moments(torch.zeros(3, 5), tokens, g, Q)
    assert_equal(found, sample_moments(a, g, None, Q))


@pytest.mark.parametrize("picks", [False, True], ids=["rows", "tokens"])
def test_few_samples_at_a_time_give_the_same(picks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block((3, 4), picks_columns=picks)
    solution = {"A.vectors": torch.eye(4), "G.vectors": torch.eye(3)}
    tokens = TokenRows(torch.randint(4, (5, 2)), 4, None, torch.float64)
    rows = tokens if picks else DenseRows(torch.randn(5, 2, 4)), DenseRows(torch.randn(5, 2, 3))
    whole = block.observe_pair(*rows, Context(solution))
    monkeypatch.setattr(paired, "CHUNK", 2 * 2 * (3 + 4))
    assert [some.samples for some, _ in paired.chunks(*rows, 2 * (3 + 4))] == [2, 2, 1]
    torch.testing.assert_close(block.observe_pair(*rows, Context(solution)), whole)


def test_moments_follow_the_basis() -> None:
    """The diagonal in the new basis of what was diagonal in the old one."""
    old, new = ([torch.linalg.qr(torch.randn(d, d))[0] for d in (3, 4)] for _ in range(2))
    S = torch.rand(3, 4)
    found = rebased(S, new[1].T @ old[1], new[0].T @ old[0])
    before, after = torch.kron(*old), torch.kron(*new)
    dense = before @ S.flatten().diag() @ before.T
    assert_equal(found.flatten(), (after.T @ dense @ after).diagonal())
    assert_equal(found.sum(), S.sum())


def test_the_basis_of_what_a_factor_does_not_know_does_not_matter() -> None:
    """A has three eigenvalues of zero, for whose eigenvectors there are many choices."""
    block = make_block((3, 6))
    rows = DenseRows(torch.randn(9, 2, 6)), DenseRows(torch.randn(9, 2, 3))
    Q, turn = (torch.linalg.qr(torch.randn(d, d))[0] for d in (6, 3))
    values = {"A.values": torch.tensor([0, 1e-17, 0, 1, 2, 3]), "G.values": torch.rand(3)}
    after = {"A.vectors": torch.eye(6), "G.vectors": torch.eye(3)}
    found = []
    for unknown in (Q[:, :3], Q[:, :3] @ turn):
        vectors = torch.cat([unknown, Q[:, 3:]], 1)
        solution = {"A.vectors": vectors, "G.vectors": torch.eye(3), **values}
        S = block.observe_pair(*rows, Context(solution))["S"]
        solved = block.solve("S", Given({"S": S}, GAMMA, previous=solution))
        assert solved is not None
        assert_equal(solved["S"].sum(), S.sum())
        moved = block.rebase("S", S, solution, after)
        step = block.precondition({**solution, **solved}, torch.eye(3, 6), GAMMA)
        found.append((moved, step))
    torch.testing.assert_close(*found)


def test_a_use_without_a_gradient_has_no_moments() -> None:
    block = make_block((3, 4))
    solution = {"A.vectors": torch.eye(4), "G.vectors": torch.eye(3)}
    rows = DenseRows(torch.randn(5, 2, 4)), DenseRows(torch.randn(5, 1, 3))
    assert block.observe_pair(*rows, Context(solution)) == {}


# --- moments of gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_moments_of_gradients_have_the_trace_of_kfac(scale: float) -> None:
    """Damping keeps its meaning, whatever part of the gradient is noise."""
    model, data = net("conv"), batches("conv", 4)
    optimizer = make(model, moments="gradient")
    for x in data:
        optimizer.zero_grad()
        (scale * sample_losses(model(x)).mean()).backward()
        optimizer.step()
    for solution in solutions(optimizer):
        assert_equal(solution["S"].sum(), solution["G.values"].sum() * solution["A.values"].sum())


def test_moments_of_gradients_have_their_proportions() -> None:
    model, (x,) = net("linear"), batches("linear", 1)
    optimizer = make(model, lr=0.0, refresh_every=9, moments="gradient", moments_decay=0.0)
    take(optimizer, x)
    for layer, solution in zip(layers_of(model), solutions(optimizer), strict=True):
        V = see(model, layer, x).V
        take(optimizer, x)
        (state,) = [one for one in optimizer.layers if one.layer.module is layer]
        turned = (solution["G.vectors"].T @ V @ solution["A.vectors"]).square()
        S = state.solution["S"]
        assert_equal(S / S.sum(), turned / turned.sum())


def test_without_a_gradient_it_stays_kfac() -> None:
    block = make_block((3, 4), moments="gradient", decay=0.95)
    values = {"A.values": torch.rand(4), "G.values": torch.rand(3)}
    given = Given({"S": torch.zeros(3, 4)}, GAMMA, previous={**values, "start": torch.ones(1)})
    solved = block.solve("S", given)
    assert solved is not None
    assert_equal(solved["S"], torch.outer(values["G.values"], values["A.values"]))


def test_moments_of_gradients_hold_no_rows() -> None:
    for moments, keeps in (("gradient", "none"), ("sample", "dense")):
        optimizer = make(net("conv"), moments=moments)
        assert {state.block.keeps for state in optimizer.layers} == {keeps}


# --- the curvature -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)], ids=["plain", "grouped"])
@pytest.mark.parametrize("max_dim", [10, 3, 1])
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_the_step_is_the_dense_formula(batch: tuple[int, ...], max_dim: int, power: float) -> None:
    block = make_block((*batch, 3, 4), max_dim=max_dim, power=power)
    solution, V = random_solution(block), torch.randn(*batch, 3, 4)
    found = block.precondition(solution, V, GAMMA)
    product = block.multiply(solution, V)
    for j in range(math.prod(batch)):
        one = {name: value[j] if batch else value for name, value in solution.items()}
        Q = torch.kron(one.get("G.vectors", torch.eye(3)), one.get("A.vectors", torch.eye(4)))
        S = one["S"].flatten()
        v, p, q = ((x[j] if batch else x).flatten() for x in (V, found, product))
        assert_equal(p, Q @ ((Q.T @ v) / (S + GAMMA) ** power))
        assert_equal(q, Q @ (S * (Q.T @ v)))


def random_solution(block: EKFACBlock) -> dict[str, Tensor]:
    found = {}
    for name, shape in block.solution_shapes.items():
        made = torch.rand(*shape)
        turn = name.endswith("vectors")
        found[name] = torch.linalg.qr(made)[0].contiguous() if turn else made
    return found


def test_the_mean_curvature_is_that_of_the_moments() -> None:
    for seen, solution in moments_of_one_batch("conv"):
        block = make_block(tuple(seen.V.shape))
        assert_equal(block.mean_curvature(solution).squeeze(), seen.F.trace() / seen.V.numel())


@pytest.mark.parametrize("moments", ["sample", "gradient"])
def test_damping_may_adapt_itself(moments: str) -> None:
    model, (x,) = net("conv"), batches("conv", 1)
    damping = kronfac.LevenbergMarquardt(1.0, every=1)
    optimizer = make(model, lr=1.0, damping=damping, moments=moments)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sample_losses(model(x)).mean()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


# --- embeddings --------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, and a mean over tokens."""

    def __init__(self, words: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens).sum(1)))


TOKENS = torch.tensor([[0, 1, 1], [2, 0, 3], [1, 1, 1], [3, 4, 2], [4, 0, 0]])


def embedding_fisher(model: Words, tokens: Tensor) -> Tensor:
    weight = model.embedding.weight
    each = [
        torch.autograd.grad(loss, weight, retain_graph=True)[0].T.flatten()
        for loss in sample_losses(model(tokens))
    ]
    return torch.stack(each).T @ torch.stack(each) / len(each)


def test_moments_of_an_embedding_are_the_diagonal_of_the_fisher() -> None:
    model = Words()
    fisher = embedding_fisher(model, TOKENS)
    optimizer = make(model, lr=0.0, refresh_every=9, decay=0.0, include="embedding")
    take(optimizer, TOKENS)
    take(optimizer, TOKENS)
    (solution,) = solutions(optimizer)
    basis = torch.kron(solution["G.vectors"], torch.eye(6))
    assert_equal(solution["S"].flatten(), (basis.T @ fisher @ basis).diagonal())


@pytest.mark.parametrize("moments", ["sample", "gradient"])
def test_tokens_that_were_never_seen_pass_their_gradient(moments: str) -> None:
    model = Words()
    every = {"factor_every": 5, "refresh_every": 5}
    optimizer = make(model, lr=0.0, include="embedding", moments=moments, **every)
    take(optimizer, TOKENS)
    optimizer.zero_grad()
    sample_losses(model(torch.full((2, 3), 5))).mean().backward()
    before = model.embedding.weight.grad[5].clone()
    optimizer.step()
    assert_equal(model.embedding.weight.grad[5], before)


def test_tokens_that_were_not_seen_for_long_keep_the_moments_of_their_rows() -> None:
    """A counts them as one row, and each of their rows has the moments that it had."""
    model = Words()
    optimizer = make(model, lr=0.0, refresh_every=99, early_refresh=False, include="embedding")
    for _ in range(2):
        take(optimizer, TOKENS)
    (first,) = solutions(optimizer)
    for _ in range(40):
        take(optimizer, TOKENS[:3] % 3)  # without 3 and 4
    (state,) = optimizer.layers
    last = state.solution
    ratio = last["S"][:, 3:5] / first["S"][:, 3:5]
    assert_equal(ratio, torch.ones_like(ratio))  # A is that of the first refresh


def test_an_embedding_of_single_tokens_falls_back_to_kfac() -> None:
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2))
    optimizer = make(model)
    take(optimizer, torch.tensor([0, 3, 1, 1]))
    labels = {state.name: (state.block.label, state.note) for state in optimizer.layers}
    assert labels["0"][1] == "expand: rows not grouped by sample"
    assert "moments" not in labels["0"][0]
    assert "moments" in labels["1"][0]


# --- layers whose rows are not those of samples --------------------------------------------------


class Flattened(nn.Module):
    """All tokens of all samples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_rows_without_samples_have_the_eigenvalues_of_kfac() -> None:
    data = batches("sequence", 4)
    found = []
    for method in (kronfac.EKFAC, kronfac.KFAC):
        torch.manual_seed(0)
        model = Flattened()
        optimizer = method(model, SGD(model.parameters(), lr=LR), **PLAIN)
        for x in data:
            take(optimizer, x)
        found.append(parameters(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("moments", ["sample", "gradient"])
def test_inputs_that_serve_all_samples(moments: str) -> None:
    kind = KINDS["positions"]
    model = kind.model()
    optimizer = kronfac.EKFAC(model, SGD(model.parameters(), lr=0.01), moments=moments)
    x, y = kind.batch(0, 16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": "batch"}, r"moments='batch' is not supported; choose one of 'sample', 'gra"),
        ({"moments_decay": 2.0}, r"moments_decay=2.0 must be a number in \[0, 1\]"),
        ({"sharing": "mean"}, "sharing='mean' is not supported"),
        ({"max_dim": 0}, "max_dim=0 must be a whole number"),
        ({"power": 2.0}, r"power=2.0 must be a number in \(0, 1\]"),
        ({"power": 0.5, "rescale": "quadratic"}, "power=0.5 does not minimise the quadratic"),
        ({"fisher": "forward"}, r"observes no output gradients, which EKFAC needs; choose fisher="),
        ({"solver": "eigen"}, "EKFAC has no option 'solver'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(net("linear"), **options)
