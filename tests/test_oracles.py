"""The reference itself: against autograd, against loops, and in cases where K-FAC is exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracles

N = 4
REDUCTIONS = ["batch", None]
LIKELIHOODS = ["categorical", "bernoulli", "gaussian"]
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def differs(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).norm() > 1e-3 * right.norm())


# --- rows ------------------------------------------------------------------------------------

LAYERS = {
    "linear": (nn.Linear(4, 3, **DOUBLE), (N, 4)),
    "linear-no-bias": (nn.Linear(4, 3, bias=False, **DOUBLE), (N, 4)),
    "linear-lone-vector": (nn.Linear(4, 3, **DOUBLE), (4,)),
    "linear-sequence": (nn.Linear(4, 3, **DOUBLE), (N, 5, 4)),
    "linear-grid": (nn.Linear(4, 3, **DOUBLE), (N, 2, 3, 4)),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1, **DOUBLE), (N, 2, 7)),
    "conv1d-unbatched": (nn.Conv1d(2, 3, 3, padding=1, **DOUBLE), (2, 7)),
    "conv1d-dilated": (nn.Conv1d(2, 3, 3, dilation=2, bias=False, **DOUBLE), (N, 2, 8)),
    "conv1d-same-even": (nn.Conv1d(2, 3, 4, padding="same", **DOUBLE), (N, 2, 6)),
    "conv1d-depthwise": (nn.Conv1d(3, 6, 3, groups=3, **DOUBLE), (N, 3, 6)),
    "conv2d": (nn.Conv2d(2, 3, 3, **DOUBLE), (N, 2, 5, 4)),
    "conv2d-valid": (nn.Conv2d(2, 3, 2, padding="valid", **DOUBLE), (N, 2, 4, 3)),
    "conv2d-uneven": (
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2), **DOUBLE),
        (N, 2, 5, 6),
    ),
    "conv2d-same-even": (
        nn.Conv2d(2, 3, (2, 4), dilation=(3, 1), padding="same", **DOUBLE),
        (N, 2, 5, 6),
    ),
    "conv2d-groups": (
        nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1, **DOUBLE),
        (N, 4, 5, 5),
    ),
    "conv3d": (nn.Conv3d(2, 3, 2, stride=(1, 2, 1), **DOUBLE), (N, 2, 3, 4, 3)),
    "conv3d-groups": (
        nn.Conv3d(2, 4, (1, 2, 3), padding="same", groups=2, **DOUBLE),
        (N, 2, 2, 3, 4),
    ),
    **{
        f"conv{dim}d-{mode}-{padding}": (
            conv(2, 3, 3 if padding == 1 else 2, padding=padding, padding_mode=mode, **DOUBLE),
            (N, 2, *[4] * dim),
        )
        for dim, conv in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d))
        for mode in ("zeros", "reflect", "replicate", "circular")
        for padding in (1, "same")
    },
}
BATCHED = {k: v for k, v in LAYERS.items() if k not in ("linear-lone-vector", "conv1d-unbatched")}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_rows_give_the_gradient(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer.zero_grad()
    outputs, (call,) = oracles.run_layer(layer, layer, normal(*shape))
    direction = normal(*outputs.shape)
    outputs.backward(direction)
    a, g = oracles.layer_rows(layer, call.x, direction)
    assert_equal(oracles.gradient_from_rows(a, g), oracles.matrix_gradient(layer))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(("layer", "shape"), BATCHED.values(), ids=BATCHED.keys())
def test_rows_belong_to_their_sample(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    g = normal(*layer(x).shape)
    whole = oracles.layer_rows(layer, x, g)
    for n in range(N):
        alone = oracles.layer_rows(layer, x[n : n + 1], g[n : n + 1])
        for rows, expected in zip(whole, alone, strict=True):
            assert_equal(rows.narrow(-3, n, 1), expected)


def test_frozen_bias_has_no_column() -> None:
    layer = nn.Linear(4, 3, **DOUBLE)
    layer.bias.requires_grad_(False)
    a, _ = oracles.layer_rows(layer, normal(N, 4), normal(N, 3))
    assert a.shape == (N, 1, 4)


def test_inplace_activation_and_repeated_use_are_remembered() -> None:
    layer = nn.Linear(4, 4, **DOUBLE)
    model = nn.Sequential(layer, nn.ReLU(inplace=True), layer)
    outputs, calls = oracles.run_layer(model, layer, normal(N, 4))
    loss = outputs.square().sum()
    gradients = torch.autograd.grad(loss, [call.z for call in calls], retain_graph=True)
    loss.backward()
    rows = [oracles.layer_rows(layer, call.x, g) for call, g in zip(calls, gradients, strict=True)]
    a, g = (torch.cat(side, dim=-2) for side in zip(*rows, strict=True))
    assert_equal(oracles.gradient_from_rows(a, g), oracles.matrix_gradient(layer))


# --- factors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_by_loops(sharing: str) -> None:
    a, g = normal(N, 2, 4), normal(N, 2, 3)
    A, G = torch.zeros(4, 4, **DOUBLE), torch.zeros(3, 3, **DOUBLE)
    for n in range(N):
        if sharing == "expand":
            for s in range(2):
                A += torch.outer(a[n, s], a[n, s]) / (N * 2)
                G += N * torch.outer(g[n, s], g[n, s])
        else:
            mean, total = (a[n, 0] + a[n, 1]) / 2, g[n, 0] + g[n, 1]
            A += torch.outer(mean, mean) / N
            G += N * torch.outer(total, total)
    for actual, expected in zip(oracles.kfac_factors(a, g, sharing), (A, G), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("average", REDUCTIONS)
def test_repeating_the_batch(sharing: str, average: str | None) -> None:
    """A mean loss has the same factors; a sum loss has twice the curvature."""
    a, g = normal(N, 2, 4), normal(N, 2, 3)
    scale = 0.5 if average else 1.0
    A, G = oracles.kfac_factors(a, g, sharing, average)
    A2, G2 = oracles.kfac_factors(a.repeat(2, 1, 1), scale * g.repeat(2, 1, 1), sharing, average)
    assert_equal(A2, A)
    assert_equal(G2, G if average else 2 * G)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_each_group_is_a_convolution_of_its_own(sharing: str) -> None:
    whole = nn.Conv2d(4, 6, 2, groups=2, **DOUBLE)
    part = nn.Conv2d(2, 3, 2, **DOUBLE)
    x, g = normal(N, 4, 3, 4), normal(N, 6, 2, 3)
    A, G = oracles.kfac_factors(*oracles.layer_rows(whole, x, g), sharing)
    for j in range(2):
        rows = oracles.layer_rows(part, x[:, 2 * j : 2 * j + 2], g[:, 3 * j : 3 * j + 3])
        A_j, G_j = oracles.kfac_factors(*rows, sharing)
        assert_equal(A[j], A_j)
        assert_equal(G[j], G_j)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_type2_is_the_expectation_over_labels(sharing: str) -> None:
    """Categorical: `G = (1/N) Σₙ Σ_y p(y|n) g gᵀ` with g the gradient for label y."""
    layer = nn.Linear(2, 3, **DOUBLE)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(6, 4, **DOUBLE))
    outputs, (call,) = oracles.run_layer(model, layer, normal(N, 2, 2))
    gradients = oracles.type2_output_gradients(outputs, call.z, "categorical")
    _, actual = oracles.type2_factors(layer, call.x, gradients, sharing)

    expected = torch.zeros(3, 3, **DOUBLE)
    for y in range(4):
        losses = -outputs.log_softmax(1)[:, y]
        (g,) = torch.autograd.grad(losses.sum(), call.z, retain_graph=True)
        g = g * (-losses).exp().sqrt().detach().reshape(N, 1, 1)
        expected += oracles.kfac_factors(*oracles.layer_rows(layer, call.x, g), sharing, None)[1]
    assert_equal(actual, expected / N)


def test_masked_terms_are_absent() -> None:
    layer = nn.Linear(4, 3, **DOUBLE)
    x, mask = normal(N, 2, 4), torch.tensor([[1, 1], [0, 1], [0, 0], [1, 0]])
    outputs, (call,) = oracles.run_layer(layer, layer, x)
    kept, (kept_call,) = oracles.run_layer(layer, layer, x[mask.bool()])
    gradients = oracles.type2_output_gradients(outputs, call.z, "categorical", mask)
    kept_gradients = oracles.type2_output_gradients(kept, kept_call.z, "categorical")
    _, actual = oracles.type2_factors(layer, call.x, gradients, loss_average=mask.sum().item())
    _, expected = oracles.type2_factors(layer, kept_call.x, kept_gradients)
    assert_equal(actual, expected)
    assert_equal(
        oracles.dense_ggn_block(layer, outputs, "categorical", "token", mask),
        oracles.dense_ggn_block(layer, kept, "categorical"),
    )


# --- steps -----------------------------------------------------------------------------------


def covariance(size: int, *batch: int) -> Tensor:
    rows = normal(*batch, 2 * size, size)
    return rows.mT @ rows / (2 * size)


def test_eigen_step_solves() -> None:
    A, G, V = covariance(4), covariance(3), normal(3, 4)
    step = oracles.eigen_step(A, G, V, 0.1)
    assert_equal(G @ step @ A + 0.1 * step, V)


def test_cholesky_step_solves_and_pi_balances_the_dampings() -> None:
    A, G, V = 5 * covariance(4), covariance(3), normal(3, 4)
    step = oracles.cholesky_step(A, G, V, 0.1)
    pi = ((A.trace() / 4) / (G.trace() / 3)).sqrt()
    damped_a = A + pi * 0.1**0.5 * torch.eye(4, **DOUBLE)
    damped_g = G + 0.1**0.5 / pi * torch.eye(3, **DOUBLE)
    assert_equal(damped_g @ step @ damped_a, V)
    assert_equal(oracles.cholesky_step(3 * A, G / 3, V, 0.1), step)


def test_steps_agree_without_damping() -> None:
    A, G, V = covariance(4), covariance(3), normal(3, 4)
    torch.testing.assert_close(
        oracles.eigen_step(A, G, V, 0.0), oracles.cholesky_step(A, G, V, 0.0)
    )


@pytest.mark.parametrize("step", [oracles.eigen_step, oracles.cholesky_step])
def test_missing_gradient_factor_is_the_identity(step: Any) -> None:
    A, V = covariance(4), normal(3, 4)
    assert_equal(step(A, None, V, 0.1), step(A, torch.eye(3, **DOUBLE), V, 0.1))


@pytest.mark.parametrize("zero_side", ["A", "G"])
def test_zero_trace_has_plain_damping(zero_side: str) -> None:
    A, G, V = covariance(4), covariance(3), normal(3, 4)
    A, G = (A * 0, G) if zero_side == "A" else (A, G * 0)
    root = 0.1**0.5
    expected = torch.linalg.inv(G + root * torch.eye(3, **DOUBLE)) @ V
    expected = expected @ torch.linalg.inv(A + root * torch.eye(4, **DOUBLE))
    assert_equal(oracles.cholesky_step(A, G, V, 0.1), expected)


@pytest.mark.parametrize("step", [oracles.eigen_step, oracles.cholesky_step])
@pytest.mark.parametrize("forward_only", [False, True])
def test_groups_step_alone(step: Any, forward_only: bool) -> None:
    A, V = covariance(4, 2), normal(2, 3, 4)
    G = None if forward_only else covariance(3, 2)
    actual = step(A, G, V, 0.1)
    for j in range(2):
        assert_equal(actual[j], step(A[j], None if G is None else G[j], V[j], 0.1))


# --- dense curvature -------------------------------------------------------------------------


def loss_terms(f: Tensor, likelihood: str) -> Tensor:
    """Negative log-likelihood of fixed targets, one per row of `f [n, C]`."""
    if likelihood == "categorical":
        return nn.functional.cross_entropy(f, torch.arange(len(f)) % f.shape[1], reduction="none")
    if likelihood == "bernoulli":
        y = (torch.arange(f.numel()).reshape(f.shape) % 2).to(f)
        losses = nn.functional.binary_cross_entropy_with_logits(f, y, reduction="none")
        return losses.sum(1)
    return 0.5 * (f - 1).square().sum(1)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("average", REDUCTIONS)
def test_ggn_of_a_linear_model_is_the_hessian(likelihood: str, average: str | None) -> None:
    layer = nn.Linear(2, 3, **DOUBLE)
    x = normal(N, 2)

    def loss(flat: Tensor) -> Tensor:
        V = flat.reshape(3, 3)
        terms = loss_terms(x @ V[:, :2].T + V[:, 2], likelihood)
        return terms.mean() if average else terms.sum()

    matrix = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach()
    expected = torch.autograd.functional.hessian(loss, matrix.flatten())
    assert_equal(oracles.dense_ggn_block(layer, layer(x), likelihood, average), expected)


def type2_kron(
    model: nn.Module,
    layer: nn.Module,
    x: Tensor,
    sharing: str,
    average: Any,
    likelihood: str = "gaussian",
) -> tuple[Tensor, Tensor]:
    """K-FAC's `kron(G, A)` with the exact Fisher, and the model's outputs."""
    outputs, (call,) = oracles.run_layer(model, layer, x)
    gradients = oracles.type2_output_gradients(outputs, call.z, likelihood)
    A, G = oracles.type2_factors(layer, call.x, gradients, sharing, average)
    return torch.kron(G, A), outputs


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("average", REDUCTIONS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_deep_linear_net_is_exact(index: int, average: str | None, sharing: str) -> None:
    model = nn.Sequential(*(nn.Linear(i, o, **DOUBLE) for i, o in ((4, 3), (3, 3), (3, 2))))
    kron, outputs = type2_kron(model, model[index], normal(N, 4), sharing, average)
    assert_equal(kron, oracles.dense_ggn_block(model[index], outputs, "gaussian", average))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_sample_is_exact(likelihood: str) -> None:
    layer = nn.Linear(4, 3, **DOUBLE)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2, **DOUBLE))
    outputs, (call,) = oracles.run_layer(model, layer, normal(1, 4))
    losses = loss_terms(outputs, likelihood)
    (g,) = torch.autograd.grad(losses.mean(), call.z, retain_graph=True)
    A, G = oracles.kfac_factors(*oracles.layer_rows(layer, call.x, g))
    assert_equal(torch.kron(G, A), oracles.empirical_fisher_block(layer, losses))

    kron, outputs = type2_kron(model, layer, call.x, "expand", "batch", likelihood)
    assert_equal(kron, oracles.dense_ggn_block(layer, outputs, likelihood))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("average", ["batch", "token", None])
def test_expand_is_exact_for_a_loss_per_position(index: int, average: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3, **DOUBLE), nn.Linear(3, 2, **DOUBLE))
    x, terms = normal(N, 5, 4), N * 5
    divisor = terms if average == "token" else average
    kron, outputs = type2_kron(model, model[index], x, "expand", divisor)
    exact = oracles.dense_ggn_block(model[index], outputs, "gaussian", average)
    assert_equal(kron, exact)
    assert differs(type2_kron(model, model[index], x, "reduce", divisor)[0], exact)


class Pooled(nn.Module):
    """Linear layers over positions, then the mean or the sum over positions, then a head."""

    def __init__(self, layer: nn.Module, channels_last: bool, pooling: str) -> None:
        super().__init__()
        self.layer = layer
        self.channels_last, self.pooling = channels_last, pooling
        self.head = nn.Linear(3, 2, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        z = z.flatten(1, -2) if self.channels_last else z.flatten(2).mT
        return self.head(z.mean(1) if self.pooling == "mean" else z.sum(1))


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("average", REDUCTIONS)
def test_reduce_is_exact_for_pooled_positions(pooling: str, kind: str, average: str | None) -> None:
    linear = kind == "linear"
    layer = nn.Linear(4, 3, **DOUBLE) if linear else nn.Conv2d(2, 3, 2, padding=1, **DOUBLE)
    model = Pooled(layer, linear, pooling)
    x = normal(N, 5, 4) if linear else normal(N, 2, 3, 3)
    kron, outputs = type2_kron(model, layer, x, "reduce", average)
    exact = oracles.dense_ggn_block(layer, outputs, "gaussian", average)
    assert_equal(kron, exact)
    assert differs(type2_kron(model, layer, x, "expand", average)[0], exact)
