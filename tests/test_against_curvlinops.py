"""The optimizer's own factors and steps against curvlinops, an independent implementation.

Scales between its gradient covariance B and our G are those that `test_oracles_curvlinops` explains:
B = s·G. Its inverse with damping s·γ is then ours with damping γ, divided by s.
"""

import copy
from typing import Any

import curvlinops
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from kronfac import KFAC
from tests.feature_order import factor_in_library_order

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
GAMMA = 0.05
N = 4  # samples
C = 3  # outputs of a term; not 2, where 2/C hides
FISHERS = {"exact": "type-2", "empirical": "empirical", "forward": "forward-only"}
LIKELIHOODS = {
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
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9 * float(expected.norm()))


def make_model(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        layers = [nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, C, bias=False, **DOUBLE)]
        return nn.Sequential(*layers), normal(N, 4)
    if kind == "shared-linear":
        head = nn.Linear(10, C, **DOUBLE)
        model = nn.Sequential(nn.Linear(3, 2, **DOUBLE), nn.Tanh(), nn.Flatten(), head)
        return model, normal(N, 5, 3)
    conv = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), **DOUBLE)
    same = nn.Conv2d(3, 2, 3, padding="same", bias=False, **DOUBLE)
    model = nn.Sequential(conv, nn.Tanh(), same, nn.Flatten(), nn.Linear(12, C, **DOUBLE))
    return model, normal(N, 2, 5, 4)


def make_targets(loss_type: type[nn.Module], *shape: int) -> Tensor:
    if loss_type is nn.CrossEntropyLoss:
        return torch.arange(N) % C
    y = normal(*shape, C)
    return (y > 0).to(y) if loss_type is nn.BCEWithLogitsLoss else y


def their_scale(loss: Any, fisher: str) -> float:
    """B / G."""
    over_outputs = loss.reduction == "mean" and not isinstance(loss, nn.CrossEntropyLoss)
    if fisher == "forward":
        return 1.0
    if fisher == "empirical":
        return float(C) if over_outputs else 1.0
    hessian = 2.0 if isinstance(loss, nn.MSELoss) else 1.0
    return hessian / C if over_outputs else hessian


def their_operator(
    model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, fisher: str, sharing: str
) -> Any:
    operator = curvlinops.KFACLinearOperator(
        model,
        loss,
        list(model.parameters()),
        [(x, y)],
        fisher_type=FISHERS[fisher],
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator


def our_step(
    model: nn.Module, loss: Any, x: Tensor, y: Tensor, average: Any, **options: Any
) -> tuple[KFAC, Tensor, Tensor]:
    """The optimizer after one step, the gradient, and minus the change of all parameters."""
    model = copy.deepcopy(model)
    optimizer = KFAC(
        model,
        SGD(model.parameters(), lr=1.0),
        damping=GAMMA,
        decay=0.0,
        rescale=None,
        loss_average=average,
        **options,
    )
    outputs = model(x)
    if options["fisher"] == "exact":
        optimizer.observe(outputs, LIKELIHOODS[type(loss)])
    loss(outputs, y).backward()
    before = flat(list(model.parameters()))
    gradient = flat([p.grad for p in model.parameters()])
    optimizer.step()
    return optimizer, gradient, before - flat(list(model.parameters()))


def flat(tensors: list[Any]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def assert_same_factors(optimizer: KFAC, operator: Any, scale: float) -> None:
    theirs = operator.state_dict()
    ours = optimizer._preconditioner.layers.values()
    assert {state.name for state in ours} == set(theirs["input_covariances"])
    for state in ours:
        A = theirs["input_covariances"][state.name]
        assert_equal(state.running["A"].mean(), factor_in_library_order(state.layer.module, A))
        if "G" in state.running:
            assert_equal(
                scale * state.running["G"].mean(), theirs["gradient_covariances"][state.name]
            )


every_case = [
    pytest.mark.parametrize("kind", ["linear", "shared-linear", "conv"]),
    pytest.mark.parametrize("sharing", ["expand", "reduce"]),
    pytest.mark.parametrize("fisher", FISHERS),
    pytest.mark.parametrize("loss_type", LIKELIHOODS),
    pytest.mark.parametrize("reduction", ["mean", "sum"]),
]


def for_every_case(test: Any) -> Any:
    for mark in every_case:
        test = mark(test)
    return test


@for_every_case
def test_factors(kind: str, sharing: str, fisher: str, loss_type: Any, reduction: str) -> None:
    model, x = make_model(kind)
    loss, y = loss_type(reduction=reduction), make_targets(loss_type, N)
    operator = their_operator(model, loss, x, y, fisher, sharing)
    average = "batch" if reduction == "mean" else None
    optimizer, _, _ = our_step(model, loss, x, y, average, fisher=fisher, sharing=sharing)
    assert_same_factors(optimizer, operator, their_scale(loss, fisher))


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@for_every_case
def test_preconditioned_gradient(
    solver: str, kind: str, sharing: str, fisher: str, loss_type: Any, reduction: str
) -> None:
    """Eigen is their exact damping, Cholesky their heuristic one (Martens and Grosse)."""
    model, x = make_model(kind)
    loss, y = loss_type(reduction=reduction), make_targets(loss_type, N)
    scale = their_scale(loss, fisher)
    inverse = curvlinops.KFACInverseLinearOperator(
        their_operator(model, loss, x, y, fisher, sharing),
        damping=scale * GAMMA,
        use_exact_damping=solver == "eigen",
        use_heuristic_damping=solver == "cholesky",
    )
    options = {"fisher": fisher, "sharing": sharing, "solver": solver}
    average = "batch" if reduction == "mean" else None
    _, gradient, step = our_step(model, loss, x, y, average, **options)
    assert_equal(step, scale * (inverse @ gradient))


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("loss_type", [nn.MSELoss, nn.BCEWithLogitsLoss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_factors_with_a_loss_per_position(fisher: str, loss_type: Any, reduction: str) -> None:
    """curvlinops averages over all terms: `loss_average="token"`."""
    model = nn.Sequential(nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, C, **DOUBLE))
    x, loss, y = normal(N, 5, 4), loss_type(reduction=reduction), make_targets(loss_type, N, 5)
    operator = their_operator(model, loss, x, y, fisher, "expand")
    average = "token" if reduction == "mean" else None
    optimizer, _, _ = our_step(model, loss, x, y, average, fisher=fisher)
    assert_same_factors(optimizer, operator, their_scale(loss, fisher))
