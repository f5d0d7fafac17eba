"""The reference against curvlinops, an independent implementation.

curvlinops averages over N·T loss terms (T per sample) and, for a mean MSELoss or
BCEWithLogitsLoss, over the C outputs of a term as well. Its A equals ours in every case.
Its gradient covariance B, in terms of our G:

  loss and reduction         type-2, G of `type2_factors`   empirical, G of `kfac_factors`
  CrossEntropyLoss, any      B = G                          B = G
  MSELoss, mean              B = (2/C)·G                    B = C·G
  MSELoss, sum               B = 2·G                        B = G
  BCEWithLogitsLoss, mean    B = (1/C)·G                    B = C·G
  BCEWithLogitsLoss, sum     B = G                          B = G

with `loss_average` = N·T for mean (so "batch" when T = 1) and None for sum.
Type-2: our terms are ½‖f - y‖² and the sum over C of binary cross-entropies. MSELoss has
c·‖f - y‖², c = 1 (sum) or 1/C (mean), hence 2c; BCEWithLogitsLoss has the same c.
Empirical: our G is formed from the gradient of the very loss that is passed; curvlinops
multiplies a mean MSELoss or BCEWithLogitsLoss by √C first, hence C. (From the gradient of
½‖f - y‖² averaged over terms, MSELoss has B = (4/C)·G for mean and 4·G for sum.)
curvlinops averages the groups of a convolution and ignores padding_mode: neither is compared.
"""

from typing import Any

import curvlinops
import pytest
import torch
from torch import Tensor, nn

from tests import oracles

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
N = 4  # samples
C = 3  # outputs of a term; not 2, where 2/C hides
CURVLINOPS_LIKELIHOODS = {
    nn.CrossEntropyLoss: "categorical",
    nn.BCEWithLogitsLoss: "bernoulli",
    nn.MSELoss: "gaussian",
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def curvlinops_factors(
    model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per layer name its (A, B), bias joined to the weight."""
    operator = curvlinops.KFACLinearOperator(
        model,
        loss,
        list(model.parameters()),
        [(x, y)],
        fisher_type=fisher,
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    inputs, gradients = state["input_covariances"], state["gradient_covariances"]
    return {name: (inputs[name], gradients[name]) for name in inputs}


def make_case(kind: str) -> tuple[nn.Module, Tensor, list[int]]:
    """A model, its input, and the indices of its layers."""
    if kind == "linear":
        layers = [nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, C, bias=False, **DOUBLE)]
        return nn.Sequential(*layers), normal(N, 4), [0, 2]
    if kind == "shared-linear":
        head = nn.Linear(10, C, **DOUBLE)
        model = nn.Sequential(nn.Linear(3, 2, **DOUBLE), nn.Tanh(), nn.Flatten(), head)
        return model, normal(N, 5, 3), [0, 3]
    conv = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), **DOUBLE)
    same = nn.Conv2d(3, 2, 3, padding="same", bias=False, **DOUBLE)
    model = nn.Sequential(conv, nn.Tanh(), same, nn.Flatten(), nn.Linear(12, C, **DOUBLE))
    return model, normal(N, 2, 5, 4), [0, 2, 4]


@pytest.mark.parametrize("kind", ["linear", "shared-linear", "conv"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("loss_type", list(CURVLINOPS_LIKELIHOODS))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_curvlinops(
    kind: str, sharing: str, fisher: str, loss_type: type[nn.Module], reduction: str
) -> None:
    model, x, indices = make_case(kind)
    y = normal(N, C)
    if loss_type is nn.CrossEntropyLoss:
        y = torch.arange(N) % C
    elif loss_type is nn.BCEWithLogitsLoss:
        y = (y > 0).to(y)
    loss = loss_type(reduction=reduction)
    theirs = curvlinops_factors(model, loss, x, y, fisher, sharing)
    assert set(theirs) == {str(index) for index in indices}
    for index in indices:
        A, B = theirs[str(index)]
        ours = our_factors(model, model[index], x, y, loss, fisher, sharing, N)
        compare(A, B, *ours, scale_to_curvlinops(loss, fisher))


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_curvlinops_with_a_loss_per_position(fisher: str, reduction: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, C, **DOUBLE))
    x, y = normal(N, 5, 4), normal(N, 5, C)
    loss = nn.MSELoss(reduction=reduction)
    theirs = curvlinops_factors(model, loss, x, y, fisher, "expand")
    for index in (0, 2):
        A, B = theirs[str(index)]
        ours = our_factors(model, model[index], x, y, loss, fisher, "expand", N * 5)
        compare(A, B, *ours, scale_to_curvlinops(loss, fisher))


def our_factors(
    model: nn.Module,
    layer: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Any,
    fisher: str,
    sharing: str,
    num_terms: int,
) -> tuple[Tensor, Tensor]:
    average = num_terms if loss.reduction == "mean" else None
    outputs, (call,) = oracles.run_layer(model, layer, x)
    if fisher == "empirical":
        (g,) = torch.autograd.grad(loss(outputs, y), call.z)
        return oracles.kfac_factors(*oracles.layer_rows(layer, call.x, g), sharing, average)
    likelihood = CURVLINOPS_LIKELIHOODS[type(loss)]
    gradients = oracles.type2_output_gradients(outputs, call.z, likelihood)
    return oracles.type2_factors(layer, call.x, gradients, sharing, average)


def scale_to_curvlinops(loss: Any, fisher: str) -> float:
    """B / G, the table above."""
    over_outputs = loss.reduction == "mean" and not isinstance(loss, nn.CrossEntropyLoss)
    if fisher == "empirical":
        return float(C) if over_outputs else 1.0
    hessian = 2.0 if isinstance(loss, nn.MSELoss) else 1.0
    return hessian / C if over_outputs else hessian


def compare(A: Tensor, B: Tensor, ours_A: Tensor, ours_G: Tensor, scale: float) -> None:
    assert_equal(ours_A, A)
    assert_equal(scale * ours_G, B)
    assert_equal(scale * torch.kron(ours_G, ours_A), torch.kron(B, A))
