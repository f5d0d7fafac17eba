"""The references for further layers, themselves: against autograd, torch's modules and loops."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import attention_oracle, layer_oracles, oracles
from tests.layers.kinds import (
    ATTENTIONS,
    NORMS,
    PER_SAMPLE,
    VOCABULARY,
    WIDTH,
    Conv1D,
    N,
    attending,
    embedded,
    loss_on,
    normed,
    transposed,
)
from tests.training import assert_close, differs, gradients

pytestmark = pytest.mark.usefixtures("double_precision")


def gradients_of(model: nn.Module, loss: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()
    return gradients(model)


# --- embeddings ------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_rows_of_an_embedding_give_its_gradient(uses: int, padding_idx: int | None) -> None:
    kind = embedded(uses=uses, padding_idx=padding_idx)
    loss = loss_on(kind.data())
    summed = torch.zeros(VOCABULARY, WIDTH)
    for _, tokens, grads in layer_oracles.calls_with_gradients(kind.model, "embedding", loss):
        for token, g in zip(tokens.flatten().tolist(), grads.flatten(0, 1), strict=True):
            if token != padding_idx:
                summed[token] += g
    assert_close(summed, gradients_of(kind.model, loss)["embedding.weight"])


@pytest.mark.parametrize("uses", [1, 2])
def test_an_embedding_is_a_linear_layer_on_one_hot_vectors(uses: int) -> None:
    class OneHot(nn.Module):
        def __init__(self, embedding: nn.Embedding) -> None:
            super().__init__()
            self.linear = nn.Linear(VOCABULARY, WIDTH, bias=False)
            self.linear.weight.data.copy_(embedding.weight.T)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.linear(F.one_hot(tokens, VOCABULARY).double())

    kind = embedded(uses=uses)
    loss = loss_on(kind.data())
    A, G, rows = layer_oracles.embedding_factors(kind.model, "embedding", loss, N)
    other = layer_oracles.replaced(kind.model, "embedding", OneHot)
    assert_close((A, G), layer_oracles.linear_factors(other, "embedding.linear", loss, N))
    assert rows == kind.data()[0].numel() * uses


def test_padding_is_in_neither_factor() -> None:
    kind = embedded(padding_idx=2)
    tokens, _ = kind.data()
    loss = loss_on(kind.data())
    A, G, rows = layer_oracles.embedding_factors(kind.model, "embedding", loss, N)
    padded = int((tokens == 2).sum())
    assert padded > 0
    assert rows == tokens.numel() - padded
    assert A[2, 2] == 0
    assert float(A.trace()) == pytest.approx(1)
    kind.model.embedding.padding_idx = None
    _, unpadded, _ = layer_oracles.embedding_factors(kind.model, "embedding", loss, N)
    assert not torch.allclose(G, unpadded)  # their output gradients are not zero


@pytest.mark.parametrize("solve", [oracles.eigen_step, oracles.cholesky_step])
def test_unseen_tokens_are_raw(solve: Any) -> None:
    A, G, V = torch.tensor([0.5, 0.0, 0.5]).diag(), torch.eye(2), torch.randn(2, 3)
    step = layer_oracles.embedding_step(A, G, V, 0.1, solve)
    assert_close(step[:, 1], V[:, 1])
    assert differs({"": step[:, 0]}, {"": V[:, 0]})


# --- norm layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_normalisation_from_the_definition(name: str) -> None:
    kind = normed(name)
    x, _ = kind.data()
    reference = layer_oracles.PerSampleNorm(kind.model.norm, N)
    assert_close(reference(x), kind.model.norm(x))


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_samples_sum_to_the_gradient(name: str, uses: int) -> None:
    kind = normed(name, uses)
    loss = loss_on(kind.data())
    u = layer_oracles.norm_sample_gradients(kind.model, "norm", loss, N)
    grads = gradients_of(kind.model, loss)
    parts = [grads[f"norm.{n}"].flatten() for n in ("weight", "bias") if f"norm.{n}" in grads]
    assert_close(u.sum(0), torch.stack(parts, dim=-1))


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_gradients_of_samples_are_those_of_samples_alone(name: str, uses: int) -> None:
    kind = normed(name, uses)
    *inputs, labels = kind.data()
    u = layer_oracles.norm_sample_gradients(kind.model, "norm", loss_on((*inputs, labels)), N)
    for n in range(N):
        alone = loss_on((*(x[n : n + 1] for x in inputs), labels[n : n + 1]), over=N)
        grads = gradients_of(kind.model, alone)
        parts = [grads[f"norm.{p}"].flatten() for p in ("weight", "bias") if f"norm.{p}" in grads]
        assert_close(u[n], torch.stack(parts, dim=-1))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_of_a_norm_layer_is_not_there(frozen: str) -> None:
    kind = normed("layer-sequence")
    loss = loss_on(kind.data())
    both = layer_oracles.norm_sample_gradients(kind.model, "norm", loss, N)
    getattr(kind.model.norm, frozen).requires_grad_(False)
    one = layer_oracles.norm_sample_gradients(kind.model, "norm", loss, N)
    kept = 0 if frozen == "bias" else 1
    assert_close(one, both[..., kept : kept + 1])


def test_blocks_of_a_norm_layer_are_those_of_the_empirical_fisher() -> None:
    kind = normed("layer-sequence")
    x, labels = kind.data()
    loss = loss_on((x, labels))
    u = layer_oracles.norm_sample_gradients(kind.model, "norm", loss, N)
    losses = F.cross_entropy(kind.model(x), labels, reduction="none")
    dense = oracles.empirical_fisher_block(kind.model.norm, losses)  # order: weight_c, bias_c
    blocks = [dense[2 * c : 2 * c + 2, 2 * c : 2 * c + 2] for c in range(4)]
    assert_close(layer_oracles.norm_fisher(u, N), torch.stack(blocks))


def test_exact_blocks_of_a_norm_layer_are_those_of_the_dense_ggn() -> None:
    kind = normed("layer-sequence")
    x, _ = kind.data()
    dense = oracles.dense_ggn_block(kind.model.norm, kind.model(x), "categorical")
    blocks = [dense[2 * c : 2 * c + 2, 2 * c : 2 * c + 2] for c in range(4)]
    exact = layer_oracles.norm_exact_fisher(kind.model, "norm", lambda model: model(x))
    assert_close(exact, torch.stack(blocks))


# --- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_from_the_definition(name: str) -> None:
    kind = attending(name)
    loss = loss_on(kind.data())
    reference = layer_oracles.replaced(kind.model, "attention", attention_oracle.ReferenceAttention)
    inputs = kind.data()[:-1]
    assert_close(
        [t for t in reference.middle(*inputs) if t is not None],
        [t for t in kind.model.middle(*inputs) if t is not None],
    )
    expected = gradients_of(kind.model, loss)
    matrices = attention_oracle.attention_gradients(kind.model.attention)
    found = gradients_of(reference, loss)
    for projection in attention_oracle.PROJECTIONS:
        V = oracles.matrix_gradient(reference.attention.get_submodule(projection))
        assert_close(matrices[projection], V)
    for rest in ("head.weight", "attention.bias_k", "attention.bias_v"):
        if rest in expected:
            assert_close(found[rest], expected[rest])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_of_projections_give_their_gradients(name: str) -> None:
    kind = attending(name)
    loss = loss_on(kind.data())
    reference = layer_oracles.replaced(kind.model, "attention", attention_oracle.ReferenceAttention)
    for projection in attention_oracle.PROJECTIONS:
        named = f"attention.{projection}"
        summed = sum(
            oracles.gradient_from_rows(*oracles.layer_rows(*call))
            for call in layer_oracles.calls_with_gradients(reference, named, loss)
        )
        assert_close(summed, layer_oracles.linear_gradient(reference, named, loss))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_separate_weights_are_the_same_attention(bias: bool, batch_first: bool) -> None:
    kind = attending("self", bias=bias, batch_first=batch_first)
    loss = loss_on(kind.data())
    other = layer_oracles.replaced(kind.model, "attention", attention_oracle.with_separate_weights)
    assert other.attention.in_proj_weight is None
    assert_close(loss(other), loss(kind.model))
    packed, separate = gradients_of(kind.model, loss), gradients_of(other, loss)
    joined = torch.cat([separate[f"attention.{p}_proj_weight"] for p in "qkv"])
    assert_close(joined, packed["attention.in_proj_weight"])


# --- transposed linear layers ----------------------------------------------------------------


@pytest.mark.parametrize("uses", [1, 2])
def test_a_transposed_linear_layer_is_a_linear_layer(uses: int) -> None:
    kind = transposed(uses=uses)
    loss = loss_on(kind.data())
    other = layer_oracles.replaced(kind.model, "layer", layer_oracles.as_linear)
    assert isinstance(kind.model.layer, Conv1D)
    assert_close(loss(other), loss(kind.model))
    expected, found = gradients_of(kind.model, loss), gradients_of(other, loss)
    assert_close(found["layer.weight"].T, expected["layer.weight"])
    assert_close(found["layer.bias"], expected["layer.bias"])


# --- averages --------------------------------------------------------------------------------


def test_averages_weigh_batches_by_their_counts() -> None:
    first, second = torch.tensor(1.0), torch.tensor(4.0)
    assert float(layer_oracles.decayed(first, second, 0.5, (4, 1))) == pytest.approx(2)
    assert float(layer_oracles.decayed(first, second, 0.0, (4, 1))) == 4
