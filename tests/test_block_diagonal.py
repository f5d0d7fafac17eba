"""Sides that are cut into diagonal blocks, against dense float64 matrices whose rest is zero."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.layers.linear import LinearLayer
from kronfac.layers.rows import DenseRows
from kronfac.methods.kfac.block_diagonal import BlockDiagonalBlock, pieces_of
from kronfac.methods.kfac.separable import SeparableBlock
from kronfac.step.sampled_rows import SampledRows

GAMMA = 0.05
pytestmark = pytest.mark.usefixtures("double_precision")


def model_of(bias: bool = True) -> nn.Sequential:
    """Cut at 4: both sides of the first layer, the input of the second, the output of the third."""
    return nn.Sequential(
        nn.Linear(6, 12, bias=bias),
        nn.Tanh(),
        nn.Linear(12, 4, bias=bias),
        nn.Tanh(),
        nn.Linear(4, 8, bias=bias),
    )


def blocks_only(matrix: Tensor, block: int, bias: bool) -> Tensor:
    """A dense matrix without what is outside its blocks; a bias has one of its own."""
    width = len(matrix)
    units = torch.arange(width) // block
    if bias:
        units[-1] = width
    return matrix * (units[:, None] == units)


def rows_of(model: nn.Sequential, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Input rows and gradients of output rows of each linear layer, by autograd."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, args, out, name=name: seen.__setitem__(name, (args[0].detach(), out))
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    loss = F.mse_loss(model(x), torch.zeros(()).expand(*x.shape[:-1], 8))
    names = list(seen)
    grads = torch.autograd.grad(loss, [seen[name][1] for name in names])
    for handle in handles:
        handle.remove()
    return {name: (seen[name][0], grad) for name, grad in zip(names, grads, strict=True)}


def expected_step(
    module: nn.Linear, a: Tensor, g: Tensor, samples: int, widths: dict[str, int | None]
) -> Tensor:
    """``(G ⊗ A + γI)⁻¹ vec(V)`` with dense matrices."""
    a, g = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
    bias = module.bias is not None
    if bias:
        a = torch.cat([a, torch.ones(len(a), 1)], 1)
    inputs, outputs = a.T @ a / len(a), samples * g.T @ g
    if widths["A"] is not None:
        inputs = blocks_only(inputs, widths["A"], bias)
    if widths["G"] is not None:
        outputs = blocks_only(outputs, widths["G"], False)
    curvature = torch.kron(outputs, inputs)
    curvature.diagonal().add_(GAMMA)
    return torch.linalg.solve(curvature, (g.T @ a).reshape(-1)).reshape(len(outputs), -1)


WIDTHS: dict[str, dict[str, int | None]] = {
    "0": {"A": 3, "G": 4},
    "2": {"A": 4, "G": None},
    "4": {"A": None, "G": 4},
}


@pytest.mark.parametrize("shape", [(5, 6), (5, 3, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_is_that_of_dense_matrices(bias: bool, shape: tuple[int, ...]) -> None:
    model, x = model_of(bias), torch.randn(*shape)
    expected = {
        name: expected_step(model.get_submodule(name), a, g, len(x), WIDTHS[name])
        for name, (a, g) in rows_of(model, x).items()
    }
    before = copy.deepcopy(model)
    optimizer = kronfac.KFAC(
        model, SGD(model.parameters(), lr=1), damping=GAMMA, rescale=None, block_dim=4
    )
    F.mse_loss(model(x), torch.zeros(()).expand(*x.shape[:-1], 8)).backward()
    optimizer.step()
    for name, step in expected.items():
        now, then = model.get_submodule(name), before.get_submodule(name)
        moved = then.weight - now.weight
        if bias:
            moved = torch.cat([moved, (then.bias - now.bias)[:, None]], 1)
        torch.testing.assert_close(moved, step, rtol=1e-8, atol=1e-10)
    assert "A in 2 blocks, G in 3 blocks" in str(optimizer)


def trained(model: nn.Module, batches: list[Tensor], **options: Any) -> kronfac.KFAC:
    optimizer = kronfac.KFAC(
        model, SGD(model.parameters(), lr=0.1), momentum=0.9, nesterov=True, **options
    )
    for x in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), x[..., :1].expand(*x.shape[:-1], 8)).backward()
        optimizer.step()
    return optimizer


def test_statistics_and_solutions_have_the_size_of_their_blocks() -> None:
    optimizer = trained(model_of(), [torch.randn(5, 6)], block_dim=4)
    first = optimizer.layers[0]
    assert {name: one.sum.shape for name, one in first.running.items()} == {
        "A": (2, 3, 3),
        "G": (3, 4, 4),
    }
    assert first.solution is not None
    shapes = {name: tuple(value.shape) for name, value in first.solution.items()}
    assert shapes == dict(first.block.solution_shapes)
    assert shapes["A.values"] == (7,)  # the constant input of the bias has one too
    assert float(first.solution["A.values"][-1]) == 1


def test_products_with_the_curvature_are_those_of_dense_matrices() -> None:
    (state, *_) = trained(model_of(), [torch.randn(9, 6)], block_dim=4).layers
    means = {name: one.sum / one.count for name, one in state.running.items()}
    inputs = torch.block_diag(*means["A"], torch.ones(1, 1))
    outputs = torch.block_diag(*means["G"])
    v = torch.randn(12, 7)
    assert state.solution is not None
    torch.testing.assert_close(state.block.multiply(state.solution, v), outputs @ v @ inputs)
    quadratic = (v * (outputs @ v @ inputs)).sum()
    torch.testing.assert_close(state.block.quadratic(state.solution, v), quadratic)
    mean = inputs.diagonal().mean() * outputs.diagonal().mean()
    torch.testing.assert_close(state.block.mean_curvature(state.solution).squeeze(), mean)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_equal_layers_are_worked_on_together(sharing: str) -> None:
    """Side by side or one by one, steps are the same."""
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh()]
    model = nn.Sequential(*layers, *copy.deepcopy(layers), nn.Linear(6, 8))
    alone, batches = copy.deepcopy(model), [torch.randn(7, 3, 6) for _ in range(3)]
    trained(model, batches, block_dim=4, sharing=sharing)
    optimizer = kronfac.KFAC(
        alone,
        SGD(alone.parameters(), lr=0.1),
        momentum=0.9,
        nesterov=True,
        block_dim=4,
        sharing=sharing,
    )
    for state in optimizer.layers:
        state.block.__class__ = type("Alone", (type(state.block),), {"signature": None})
    for x in batches:
        optimizer.zero_grad()
        F.mse_loss(alone(x), x[..., :1].expand(*x.shape[:-1], 8)).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class Heads(nn.Module):
    """Layers that see one input, of which one output is cut and the other is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.one(h) + self.two(h).sum(-1, keepdim=True)


def test_an_input_that_is_not_cut_is_shared_with_other_layers() -> None:
    model, apart = Heads(), Heads()
    apart.load_state_dict(model.state_dict())
    batches = [torch.randn(5, 6) for _ in range(3)]
    optimizer = trained(model, batches, block_dim=4)
    groups = {state.name: state.group for state in optimizer.layers}
    assert groups["one"] is not None
    assert groups["one"] is groups["two"]
    trained(apart, batches, block_dim=4, share_inputs=False)
    for one, other in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_run_resumes_bit_for_bit() -> None:
    model, batches = model_of(), [torch.randn(5, 6) for _ in range(6)]
    optimizer = trained(model, batches[:3], block_dim=4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = model_of()
    again.load_state_dict(saved[0])
    resumed = trained(again, [], block_dim=4)
    resumed.load_state_dict(saved[1])
    for x in batches[3:]:
        for net, one in ((model, optimizer), (again, resumed)):
            one.zero_grad()
            F.mse_loss(net(x), x[..., :1].expand(*x.shape[:-1], 8)).backward()
            one.step()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def pieces(d_in: int, d_out: int, block_dim: Any = "auto", max_dim: int = 8192) -> dict[str, int]:
    with torch.device("meta"):
        return pieces_of(LinearLayer("one", nn.Linear(d_in, d_out)), block_dim, max_dim)


def test_which_sides_are_cut_by_default() -> None:
    assert pieces(768, 768) == {}
    assert pieces(768, 2304) == {"G": 3}  # queries, keys and values
    assert pieces(768, 3072) == {"G": 4}
    assert pieces(3072, 768) == {"A": 4}
    assert pieces(96, 288) == {}  # too small to save anything
    assert pieces(1024, 2752) == {"G": 2}  # 2 x 1376 is nearer to 1024 than 4 x 688
    assert pieces(2048, 7168) == {"G": 4}
    assert pieces(3072, 8192) == {}  # so wide a side is not decomposed
    assert pieces(8192, 28672) == {}  # as wide as this only the diagonal is kept
    assert pieces(1536, 128) == {}  # more than six times as wide
    assert pieces(512, 10) == {}
    assert pieces(2048, 1000) == {}  # little more than twice as wide
    assert pieces(784, 400) == {}
    assert pieces(784, 256) == {}  # no equal blocks are a multiple of 16 wide
    assert pieces(64, 192) == {}
    assert pieces(100, 257) == {}


def test_which_sides_are_cut_by_a_number() -> None:
    assert pieces(768, 3072, 1024) == {"G": 3}
    assert pieces(14336, 4096, 4096) == {"A": 4}
    assert pieces(16384, 64, 4096, max_dim=8192) == {"A": 4}
    assert pieces(257, 64, 128) == {}
    assert pieces(257, 64, None) == {}


def test_a_side_without_equal_blocks_keeps_its_diagonal_where_it_is_too_wide() -> None:
    for widths in ((16, 11), (11, 16)):
        model = nn.Linear(*widths)
        optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), block_dim=8, max_dim=8)
        model(torch.randn(5, widths[0])).square().mean().backward()
        optimizer.step()
        (state,) = optimizer.layers
        cut, whole = ("A", "G") if widths[0] == 16 else ("G", "A")
        assert state.running[cut].sum.shape == (2, 8, 8)
        assert state.running[whole].sum.dim() == 1


class Scaled(LinearLayer):
    """Rows of its own: a bias that is multiplied by a tenth."""

    def inputs(self, args: tuple[Any, ...]) -> DenseRows:
        rows = self.rows(args[0])
        return DenseRows(torch.cat([rows, rows.new_full((*rows.shape[:-1], 1), 0.1)], -1))


class Grouped(LinearLayer):
    """A matrix for each group."""

    def _weight_shape(self) -> tuple[int, ...]:
        return 2, self.weight.shape[0] // 2, self.weight.shape[1]


def test_layers_that_make_other_rows_or_several_matrices_are_not_cut() -> None:
    module = nn.Linear(512, 128)
    assert pieces_of(LinearLayer("one", module), "auto", 8192) == {"A": 4}
    assert pieces_of(Scaled("one", module), "auto", 8192) == {}
    assert pieces_of(Grouped("one", nn.Linear(512, 256)), "auto", 8192) == {}


def test_fewer_rows_are_enough_for_blocks() -> None:
    model = nn.Linear(768, 3072)
    for block_dim, expected in (("auto", 8 * 769), (None, 8 * 3072)):
        optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), block_dim=block_dim)
        assert SampledRows("auto").target(optimizer.layers[0]) == expected


def blocks_of(**options: Any) -> list[type]:
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128), nn.Linear(128, 128))
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **options)
    return [type(state.block) for state in optimizer.layers]


def test_sides_are_cut_where_orthogonal_steps_follow_relative_damping() -> None:
    cut = [BlockDiagonalBlock, BlockDiagonalBlock, SeparableBlock]
    assert blocks_of() == cut
    for options in (
        {"rescale": None},
        {"damping": 1e-3},
        {"solver": "eigen"},
        {"solver": "separable"},
        {"solver": "cholesky"},
        {"block_dim": None},
    ):
        assert BlockDiagonalBlock not in blocks_of(**options)
    assert blocks_of(rescale=None, block_dim=256)[:2] == cut[:2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_dim": 0}, "block_dim=0 must be"),
        ({"block_dim": "wide"}, "block_dim='wide' must be a number of units, 'auto', or None"),
        ({"block_dim": 64, "solver": "cholesky"}, "solver='cholesky' does not do; choose"),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(options: dict[str, Any], words: str) -> None:
    model = nn.Linear(4, 8)
    with pytest.raises(ValueError, match=words):
        kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **options)


def test_only_the_input_side_without_gradients_of_outputs() -> None:
    optimizer = trained(model_of(), [torch.randn(5, 6)], block_dim=4, fisher="forward")
    assert isinstance(optimizer.layers[0].block, BlockDiagonalBlock)
    assert optimizer.layers[0].block.pieces == {"A": 2}
    assert not isinstance(optimizer.layers[2].block, BlockDiagonalBlock)
