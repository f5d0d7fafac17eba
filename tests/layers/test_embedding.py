"""Embeddings: a linear layer on one-hot vectors, whose unseen tokens keep their raw gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import layer_oracles, oracles
from tests.layers.kinds import GAMMA, VOCABULARY, WIDTH, Kind, Loss, N, embedded, loss_on
from tests.layers.watching import assert_roughly, left_out, observed, statistics, stepped, watched
from tests.training import CLASSES, assert_close, assert_same

pytestmark = pytest.mark.usefixtures("double_precision")

NAME = "embedding.weight"
SOLVERS = {"eigen": oracles.eigen_step, "cholesky": oracles.cholesky_step}


def factors(kind: Kind, loss: Loss, divisor: float | None = N) -> tuple[Tensor, Tensor, int]:
    return layer_oracles.embedding_factors(kind.model, "embedding", loss, divisor)


def few_tokens(data: tuple[Tensor, ...], below: int) -> tuple[Tensor, ...]:
    """The same data with nothing but the first tokens."""
    return data[0] % below, *data[1:]


# --- one step --------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("uses", [1, 3])
def test_one_step(solver: Any, padding_idx: int | None, uses: int) -> None:
    kind = embedded(uses=uses, padding_idx=padding_idx)
    loss = loss_on(few_tokens(kind.data(), 7))
    A, G, _ = factors(kind, loss)
    before, after = stepped(kind.model, watched(kind.model, solver=solver), loss)
    expected = layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA, SOLVERS[solver])
    assert_close(after[NAME], expected.T)
    assert not torch.allclose(after[NAME], before[NAME])


@pytest.mark.parametrize("average", [None, 2.5])
def test_other_divisors(average: float | None) -> None:
    kind = embedded()
    tokens, labels = kind.data()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens), labels, reduction="sum") / (average or 1.0)

    A, G, _ = factors(kind, loss, average)
    before, after = stepped(kind.model, watched(kind.model, loss_average=average), loss)
    assert_close(after[NAME], layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T)


def test_one_token_per_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES))
    tokens, labels = embedded().data()
    loss = loss_on((tokens[:, 0], labels))
    A, G, _ = layer_oracles.embedding_factors(model, "0", loss, N)
    before, after = stepped(model, watched(model), loss)
    expected = layer_oracles.embedding_step(A, G, before["0.weight"].T, GAMMA)
    assert_close(after["0.weight"], expected.T)


def test_a_batch_of_nothing_but_padding() -> None:
    kind = embedded(padding_idx=2)
    tokens, labels = kind.data()
    optimizer = watched(kind.model)
    _, after = stepped(kind.model, optimizer, loss_on((torch.full_like(tokens, 2), labels)))
    assert not after[NAME].any()
    loss = loss_on((tokens, labels))
    A, G, _ = factors(kind, loss)
    before, after = stepped(kind.model, optimizer, loss)
    assert_close(after[NAME], layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T)


def test_reduce_is_not_available() -> None:
    kind = embedded(uses=2)
    loss = loss_on(kind.data())
    A, G, _ = factors(kind, loss)
    before, after = stepped(kind.model, watched(kind.model, sharing="reduce"), loss)
    assert_close(after[NAME], layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T)


def test_forward_only_curvature() -> None:
    kind = embedded(padding_idx=2)
    loss = loss_on(kind.data())
    A, _, _ = factors(kind, loss)
    before, after = stepped(kind.model, watched(kind.model, fisher="forward"), loss)
    assert_close(after[NAME], layer_oracles.embedding_step(A, None, before[NAME].T, GAMMA).T)


# --- the Fisher of the model's own distribution ----------------------------------------------


def exact_G(kind: Kind, tokens: Tensor) -> Tensor:
    with layer_oracles.recorded(kind.model.embedding) as calls:
        outputs = kind.model(tokens)
    g = oracles.type2_output_gradients(outputs, calls[0].z, "categorical").flatten(0, -2)
    return g.T @ g / N


def test_exact_fisher() -> None:
    kind = embedded()
    tokens, labels = kind.data()
    loss = loss_on((tokens, labels))
    A, _, _ = factors(kind, loss)
    G = exact_G(kind, tokens)
    (gradient,) = torch.autograd.grad(loss(kind.model), kind.model.embedding.weight)
    observed(watched(kind.model, fisher="exact"), loss, lambda model: model(tokens))
    expected = layer_oracles.embedding_step(A, G, gradient.T, GAMMA)
    assert_close(kind.model.embedding.weight.grad, expected.T)


def test_sampled_labels_approach_the_exact_fisher() -> None:
    kind = embedded()
    tokens, labels = kind.data()
    loss = loss_on((tokens, labels))
    A, _, _ = factors(kind, loss)
    G = exact_G(kind, tokens)
    (gradient,) = torch.autograd.grad(loss(kind.model), kind.model.embedding.weight)
    expected = layer_oracles.embedding_step(A, G, gradient.T, 1e-4)
    optimizer = watched(kind.model, fisher="mc", damping=1e-4)
    drawing = {"samples": 600, "generator": torch.Generator().manual_seed(1)}
    observed(optimizer, loss, lambda model: model(tokens), **drawing)
    assert_roughly(kind.model.embedding.weight.grad, expected.T, 0.1)
    assert float((gradient - expected.T).norm()) > 0.5 * float(expected.norm())


# --- averages over time, and unseen tokens ---------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_two_steps(decay: float, padding_idx: int | None) -> None:
    kind = embedded(padding_idx=padding_idx)
    losses = [loss_on(few_tokens(kind.data(0), 5)), loss_on(few_tokens(kind.data(1, 4), 8))]
    (A1, G1, rows1), (A2, G2, rows2) = (
        factors(kind, loss, samples) for loss, samples in zip(losses, (N, 4), strict=True)
    )
    optimizer = watched(kind.model, decay=decay)
    stepped(kind.model, optimizer, losses[0])
    before, after = stepped(kind.model, optimizer, losses[1])
    A = layer_oracles.decayed(A1, A2, decay, (rows1, rows2))
    G = layer_oracles.decayed(G1, G2, decay, (N, 4))
    assert_close(after[NAME], layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T)


@pytest.mark.parametrize("solver", SOLVERS)
def test_tokens_that_come_after_the_statistics_pass_raw(solver: Any) -> None:
    kind = embedded()
    first, second = loss_on(few_tokens(kind.data(0), 4)), loss_on(kind.data(1))
    A, G, _ = factors(kind, first)
    optimizer = watched(kind.model, solver=solver, factor_every=2, refresh_every=2)
    stepped(kind.model, optimizer, first)
    before, after = stepped(kind.model, optimizer, second)
    unseen = A.diag() == 0
    assert before[NAME][unseen].any()
    assert_same(after[NAME][unseen], before[NAME][unseen])
    expected = layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA, SOLVERS[solver])
    assert_close(after[NAME], expected.T)


def test_a_token_that_was_ever_seen_stays_seen() -> None:
    kind = embedded()
    losses = [loss_on(kind.data(0)), loss_on(few_tokens(kind.data(1), 3))]
    optimizer = watched(kind.model, decay=0.5)
    for loss in losses:
        stepped(kind.model, optimizer, loss)
    optimizer.decay, optimizer.factor_every = 0.5, 100
    before, after = stepped(kind.model, optimizer, losses[0])
    seen = kind.data(0)[0].unique()
    assert not any(torch.allclose(after[NAME][t], before[NAME][t]) for t in seen)


# --- length of the step ----------------------------------------------------------------------


def test_graft_keeps_the_norm_over_seen_tokens() -> None:
    kind = embedded()
    first, second = loss_on(few_tokens(kind.data(0), 4)), loss_on(kind.data(1))
    A, G, _ = factors(kind, first)
    optimizer = watched(kind.model, rescale="graft", factor_every=2, refresh_every=2)
    stepped(kind.model, optimizer, first)
    before, after = stepped(kind.model, optimizer, second)
    seen = A.diag() > 0
    solved = layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T
    ratio = before[NAME][seen].norm() / solved[seen].norm()
    assert_close(after[NAME][seen], ratio * solved[seen])
    assert_same(after[NAME][~seen], before[NAME][~seen])


def test_unit_leaves_embeddings_to_the_base() -> None:
    kind = embedded()
    optimizer = watched(kind.model, rescale="unit")
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(after[NAME], before[NAME])
    assert left_out(optimizer)[NAME]
    assert "head.weight" not in left_out(optimizer)


# --- what is left out ------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_variants_that_are_left_out(option: str) -> None:
    kind = embedded(**{option: True})
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert left_out(optimizer)[NAME]
    assert_same(after[NAME].to_dense(), before[NAME].to_dense())
    assert not torch.allclose(after["head.weight"], before["head.weight"])


def test_bags_are_left_out() -> None:
    model = nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES))
    optimizer = watched(model)
    before, after = stepped(model, optimizer, loss_on(embedded().data()))
    assert "EmbeddingBag" in left_out(optimizer)["0.weight"]
    assert_same(after["0.weight"], before["0.weight"])


class Scaled(nn.Embedding):
    """As in several language models: what it returns is not a row of its weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3 * super().forward(tokens)


class Shifted(nn.Embedding):
    """As in several language models: positions start at two."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward((tokens + 2) % VOCABULARY)


@pytest.mark.parametrize("make", [Scaled, Shifted])
def test_a_subclass_with_its_own_forward_is_left_out(make: Any) -> None:
    kind = embedded()
    kind.model.embedding = make(VOCABULARY, WIDTH)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert left_out(optimizer)[NAME]
    assert_same(after[NAME], before[NAME])


def test_a_frozen_embedding_is_left_out() -> None:
    kind = embedded()
    kind.model.embedding.weight.requires_grad_(False)
    optimizer = watched(kind.model)
    _, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert left_out(optimizer) == {NAME: "frozen"}
    assert NAME not in after


# --- size ------------------------------------------------------------------------------------


def test_a_side_wider_than_max_dim_keeps_its_diagonal() -> None:
    """The side of tokens is diagonal in any case."""
    kind = embedded()
    loss = loss_on(kind.data())
    A, G, _ = factors(kind, loss)
    before, after = stepped(kind.model, watched(kind.model, max_dim=WIDTH), loss)
    assert_close(after[NAME], layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T)
    kind = embedded()
    before, after = stepped(kind.model, watched(kind.model, max_dim=WIDTH - 1), loss)
    G = G.diag().diag()
    assert_close(after[NAME], layer_oracles.embedding_step(A, G, before[NAME].T, GAMMA).T)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_large_vocabulary_takes_one_number_per_token(solver: Any) -> None:
    tokens = 20_000
    model = nn.Sequential(nn.Embedding(tokens, 2), nn.Flatten(), nn.Linear(4, CLASSES))
    optimizer = watched(model, solver=solver, max_dim=10**6)
    inputs = torch.tensor([[0, tokens - 1], [5, 5]])
    _, after = stepped(model, optimizer, loss_on((inputs, torch.tensor([0, 2]))))
    held = sum(tensor.nbytes for tensor in statistics(optimizer).values())
    assert tokens * 8 <= held < 5 * tokens * 8
    assert torch.isfinite(after["0.weight"]).all()
