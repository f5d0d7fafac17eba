"""Parts of several layers that are solved at once are what each of them is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac.distributed.solving.together import all_finite
from kronfac.layers.linear import LinearLayer
from kronfac.layers.parameter_view import ParameterView
from kronfac.layers.stacks import places, stacked_gradients, write
from tests.training import assert_close, batch, kfac, layers, parameters, step, train

pytestmark = pytest.mark.usefixtures("double_precision")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(3) for m in (nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())),
        nn.Linear(4, 3),
    )


@pytest.mark.parametrize("damping", [0.1, kronfac.Relative(0.1)], ids=["number", "relative"])
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_batches_give_what_layers_give_alone(
    monkeypatch: pytest.MonkeyPatch, solver: str, damping: Any
) -> None:
    def run() -> dict[str, Tensor]:
        one = model()
        train(one, kfac(one, solver=solver, damping=damping), range(4))
        return parameters(one)

    together = run()
    monkeypatch.setattr("kronfac.distributed.solving.together.MAX_ELEMENTS", 0)
    assert_close(together, run())


def test_one_layer_that_fails_leaves_the_others_of_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kronfac.methods.kfac import block

    solve, alone = block.eigen_batch, []

    def spoiled(matrices: Tensor) -> Any:
        vectors, values = solve(matrices)
        if matrices.dim() == 3:
            values[1] = torch.nan
        return vectors, values

    def counted(matrix: Tensor, eigen: Callable[[Tensor], Any] = block.eigen) -> Any:
        alone.append(matrix.shape)
        return eigen(matrix)

    expected = model()
    train(expected, kfac(expected, solver="eigen"), range(1))
    monkeypatch.setattr(block, "eigen_batch", spoiled)
    monkeypatch.setattr(block, "eigen", counted)
    one = model()
    optimizer = kfac(one, solver="eigen")
    train(one, optimizer, range(1))
    assert len(alone) == 2  # one A and one G of three and four layers
    assert optimizer.stats()["without_solution"] == []
    assert_close(parameters(one), parameters(expected))


def test_a_sum_that_is_not_finite_is_solved_by_nobody_else() -> None:
    one = model()
    optimizer = kfac(one)
    train(one, optimizer, range(2))
    broken = layers(optimizer)["3"]
    broken.running["A"].sum.fill_(torch.inf)
    before = broken.solution["A.vectors"].clone()
    step(one, optimizer, batch(2))
    assert {name: n for name, n in optimizer.stats()["failures"].items() if n} == {"3": 1}
    assert torch.equal(layers(optimizer)["3"].solution["A.vectors"], before)


def test_finite_lists() -> None:
    lists = [[torch.ones(2), torch.ones(3)], [torch.tensor([1.0, torch.nan])], [], [torch.ones(0)]]
    assert all_finite([*lists, [torch.tensor(torch.inf), torch.ones(1).float()]]) == [
        *(True, False, True, True),
        False,
    ]


class Scaled(LinearLayer):
    """A layer type of a user's own, whose matrix is not the weight."""

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return grad.flip(0)

    def _weight_place(self, grad: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return grad, matrix.flip(0)


@pytest.mark.parametrize("made", [LinearLayer, Scaled])
def test_stacks_are_the_matrices_of_each_layer(made: type[LinearLayer]) -> None:
    modules = [nn.Linear(3, 2) for _ in range(3)]
    for number, module in enumerate(modules):
        module(torch.full((1, 3), float(number + 1))).sum().backward()
    own = [made(str(number), module) for number, module in enumerate(modules)]
    views = [ParameterView(layer) for layer in own]
    matrices = stacked_gradients(views)
    for layer, matrix in zip(own, matrices, strict=True):
        assert torch.equal(matrix, layer.gradient())
    write(places(views, 2 * matrices))
    for layer, matrix in zip(own, matrices, strict=True):
        assert torch.equal(layer.gradient(), 2 * matrix)


def test_momentum_of_all_layers_is_that_of_each() -> None:
    from kronfac.options.config import Schedules
    from kronfac.protocol.transform import LayerStep
    from kronfac.step.transforms import Momentum

    rule = Momentum(Schedules(0.1, 1, 1, 0.9, 0.9), nesterov=True)
    each: list[dict[str, Tensor]] = [{}, {}]
    together: list[dict[str, Tensor]] = [{}, {}]
    for number in range(3):
        gradients = [torch.randn(2, 3), torch.randn(4, 4)]
        expected = [rule(g, LayerStep(number, b)) for g, b in zip(gradients, each, strict=True)]
        found = rule.apply_all(
            [g.clone() for g in gradients], [LayerStep(number, buffers) for buffers in together]
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(together, each, strict=True):
        torch.testing.assert_close(one, other)
