"""Damping as a share of each layer's mean curvature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac import Relative
from tests.distributed.equivalence import double_precision, same_bits
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.training import applied, batch, cnn, factors, frozen_kfac, images, layers, mlp

SOLVERS = ["eigen", "separable", "cholesky", "newton-schulz"]
RHO = 0.3


@pytest.fixture(autouse=True)
def _double() -> Any:
    with double_precision():
        yield


def matrix_of(gradients: dict[str, Tensor], name: str) -> Tensor:
    weight, bias = gradients[f"{name}.weight"], gradients[f"{name}.bias"]
    return torch.cat([weight.flatten(1), bias[:, None]], dim=1)


@pytest.mark.parametrize("to", ["mean", "trace"])
@pytest.mark.parametrize("solver", [one for one in SOLVERS if one != "separable"])
def test_the_damping_is_a_share_of_the_curvature(solver: str, to: Any) -> None:
    model = mlp()
    optimizer = frozen_kfac(model, damping=Relative(RHO, to), solver=solver)
    before, after = applied(model, optimizer, batch())
    for name in layers(optimizer):
        A, G = factors(optimizer, "A")[name], factors(optimizer, "G")[name]
        a, g = A.trace(), G.trace()
        if to == "mean":
            a, g = a / len(A), g / len(G)
        V = matrix_of(before, name)
        if solver == "eigen":
            damped = torch.kron(G, A) + RHO * a * g * torch.eye(V.numel())
            expected = torch.linalg.solve(damped, V.flatten()).reshape(V.shape)
        else:
            left = G + RHO**0.5 * g * torch.eye(len(G))
            right = A + RHO**0.5 * a * torch.eye(len(A))
            expected = torch.linalg.solve(left, V) @ torch.linalg.inv(right)
        found = matrix_of(after, name)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize(("to", "times"), [("mean", 1), ("trace", 2)])
def test_norms_have_the_mean_of_all_channels(to: Any, times: int) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = frozen_kfac(model, damping=Relative(RHO, to), include="1")
    before, after = applied(model, optimizer, batch())
    fisher = factors(optimizer, "F")["1"]
    mean = fisher.diagonal(dim1=-2, dim2=-1).mean() * times
    V = torch.stack([before["1.weight"], before["1.bias"]], dim=-1)
    expected = torch.linalg.solve(fisher + RHO * mean * torch.eye(2), V)
    found = torch.stack([after["1.weight"], after["1.bias"]], dim=-1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("solver", SOLVERS)
def test_layers_of_equal_shape_have_their_own_damping(solver: str) -> None:
    """They are preconditioned together."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 3))
    _, together = applied(model, frozen_kfac(model, damping=Relative(RHO), solver=solver), batch())
    for name in ("0", "1", "2"):
        options = {"damping": Relative(RHO), "solver": solver, "include": name}
        _, alone = applied(model, frozen_kfac(model, **options), batch())
        for part in ("weight", "bias"):
            torch.testing.assert_close(together[f"{name}.{part}"], alone[f"{name}.{part}"])


class Reader(nn.Module):
    """Embedding, attention, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x))).transpose(1, 2)


def normed_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )


def problems(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if kind == "sequences":
        return Reader(), torch.randint(7, (6, 5)), torch.randint(7, (6, 5))
    if kind == "unseen":
        model, (x, y) = KINDS[kind].model(), KINDS[kind].batch(0, 6)
        model.register_forward_hook(lambda module, args, scores: scores.transpose(1, 2))
        return model, x, y
    if kind == "images":
        return normed_cnn(), torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), *batch()


@pytest.mark.parametrize("factor", [1e-3, 1e3, "sum"])
@pytest.mark.parametrize("kind", ["vectors", "images", "sequences", "unseen"])
def test_the_scale_of_the_loss_changes_nothing_by_default(kind: str, factor: float | str) -> None:
    ends = []
    for scale in (1.0, factor):
        model, x, y = problems(kind)
        options: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
        if scale == "sum":
            options["loss_average"] = None
        optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **options)
        for _ in range(6):
            optimizer.zero_grad()
            reduction = "sum" if scale == "sum" else "mean"
            loss = F.cross_entropy(model(x), y, reduction=reduction)
            (loss if scale == "sum" else loss * scale).backward()
            optimizer.step()
        assert kind == "unseen" or not optimizer.left_out()
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dead", ["inputs", "outputs"])
def test_a_layer_without_curvature_passes_its_gradient(solver: str, dead: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = frozen_kfac(model, damping=Relative(RHO), solver=solver)
    x = torch.randn(5, 4)
    x = x * 0 if dead == "inputs" else x
    (model(x).sum() * (0.0 if dead == "outputs" else 1.0)).backward()
    gradient = model.weight.grad = torch.randn(3, 4)
    expected = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, expected)
    assert optimizer.stats()["failures"] == {"": 0}


@pytest.mark.parametrize("solver", SOLVERS)
def test_inputs_without_curvature_pass_the_gradient_without_an_output_factor(solver: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    options = {"damping": Relative(RHO), "solver": solver, "fisher": "forward"}
    optimizer = frozen_kfac(model, **options)
    model(torch.zeros(5, 4)).sum().backward()
    gradient = model.weight.grad = torch.randn(3, 4)
    expected = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, expected)


def test_the_same_text_in_every_process() -> None:
    assert repr(Relative(0.5)) == "Relative(0.5)"
    assert repr(Relative(lambda step: 1.0)) == "Relative(a callable)"
    assert repr(Relative(0.5, to="trace")) == "Relative(0.5, to='trace')"


def test_a_schedule_of_shares() -> None:
    model = mlp()
    optimizer = kronfac.KFAC(
        model, SGD(model.parameters(), lr=0.1), damping=Relative(lambda t: 1 + t)
    )
    assert optimizer.stats()["damping"] == 1
    applied(model, optimizer, batch())
    assert optimizer.stats()["damping"] == 2
    assert isinstance(optimizer.damping, Relative)
    optimizer.damping = 0.5
    assert optimizer.damping == 0.5
    optimizer.damping = Relative(0.2)
    assert optimizer.stats()["damping"] == 0.2


@pytest.mark.parametrize("share", [0, -1, float("nan"), "0.1", None])
def test_a_share_that_is_no_positive_number_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"share=.* must be a positive finite number"):
        Relative(share)


def test_a_share_of_something_else_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"to='norm' is not supported; choose one of 'mean', 'trace'"
    ):
        Relative(0.1, to="norm")  # type: ignore[arg-type]


def test_the_trace_of_an_output_factor_that_is_not_there_is_refused() -> None:
    """That of ``G = I`` grows with the width, and its eigenvalues do not."""
    damping = Relative(RHO, to="trace")
    with pytest.raises(
        ValueError, match=r"to='trace'\) is not supported for layer '0' \(eigen, G = I"
    ):
        frozen_kfac(mlp(), damping=damping, fisher="forward")
    optimizer = frozen_kfac(mlp(), fisher="forward")
    with pytest.raises(ValueError, match=r"give kronfac\.Relative\(\.\.\.\), a share of the mean"):
        optimizer.damping = damping


def test_quadratic_steps_need_a_number() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"needs a number or kronfac\.LevenbergMarquardt"):
        kronfac.KFAC(
            model, SGD(model.parameters(), lr=1.0), rescale="quadratic", damping=Relative()
        )


def test_a_method_that_does_not_know_its_curvature_says_so() -> None:
    from tests.methods.toys import RankOne

    model = mlp()
    with pytest.raises(ValueError, match=r"which layer '0' \(rank one\) does not know"):
        RankOne(model, SGD(model.parameters(), lr=0.1), damping=Relative())


def on_rank(rank: int, scheme: Any, solver: str, to: Any) -> tuple[list[Tensor], bool]:
    with double_precision():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        )
        wrapped = DistributedDataParallel(model)
        options = {"momentum": 0.9, "factor_every": 1, "refresh_every": 2, "distribute": scheme}
        options["damping"] = Relative(0.1, to)
        optimizer = kronfac.KFAC(wrapped, SGD(model.parameters(), lr=0.1), solver=solver, **options)
        train(wrapped, optimizer, slice(2 * rank, 2 * rank + 2))
        return [p.detach() for p in model.parameters()], same_bits(model)


def train(model: nn.Module, optimizer: Any, part: slice) -> None:
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(6, 4, generator=generator)[part]
        y = torch.randint(3, (6,), generator=generator)[part]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("solver", "to"), [("eigen", "mean"), ("cholesky", "mean"), ("cholesky", "trace")]
)
@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_ranks_equal_one_process(scheme: str, solver: str, to: Any) -> None:
    """With the default length of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    options: dict[str, Any] = {"momentum": 0.9, "factor_every": 1, "refresh_every": 2}
    options["damping"] = Relative(0.1, to)
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), solver=solver, **options)
    train(model, optimizer, slice(None))
    for found, same in run(3, on_rank, scheme, solver, to):
        assert same
        torch.testing.assert_close(
            found, [p.detach() for p in model.parameters()], rtol=1e-8, atol=1e-10
        )


@pytest.mark.parametrize(("share", "least"), [(0.1, 0.75), (10.0, 0.95)])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_solvers_agree_roughly_on_the_direction(make: Any, share: float, least: float) -> None:
    """Damping both factors has cross terms, ``√ρ(m_A G + m_G A)``, that vanish beside a large share."""
    steps = {}
    for solver in SOLVERS:
        model = make()
        data = images() if make is cnn else batch()
        optimizer = frozen_kfac(model, damping=Relative(share), solver=solver)
        _, after = applied(model, optimizer, data)
        steps[solver] = {name: matrix_of(after, name).flatten() for name in layers(optimizer)}
    for name, eigen in steps["eigen"].items():
        for solver in SOLVERS[1:]:
            assert float(F.cosine_similarity(eigen, steps[solver][name], dim=0)) > least
        torch.testing.assert_close(steps["cholesky"][name], steps["newton-schulz"][name])
