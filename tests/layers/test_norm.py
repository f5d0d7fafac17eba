"""Norm layers: for each channel the 2x2 Fisher of its weight and bias, from gradients of samples."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronfac.layers.channel_sums import ChannelSums, side_by_side
from kronfac.layers.norm import BatchNormLayer, LayerNormLayer
from kronfac.layers.norm_sums import normalised_sums, products_and_sums
from tests import layer_oracles
from tests.layers.kinds import GAMMA, MIXING, NORMS, PER_SAMPLE, Kind, Loss, N, loss_on, normed
from tests.layers.watching import assert_roughly, left_out, observed, stepped, watched
from tests.training import CLASSES, assert_close, assert_same

pytestmark = pytest.mark.usefixtures("double_precision")

SOLVERS = ["eigen", "cholesky"]
NAMES = ("norm.weight", "norm.bias")


def fisher(kind: Kind, loss: Loss, divisor: float | None = N, samples: int = N) -> Tensor:
    u = layer_oracles.norm_sample_gradients(kind.model, "norm", loss, samples)
    return layer_oracles.norm_fisher(u, divisor)


def channels(values: dict[str, Tensor]) -> Tensor:
    """Weight and bias of the norm layer side by side: `[C, 1 or 2]`."""
    names = [name for name in NAMES if name in values]
    return torch.stack([values[name].flatten() for name in names], dim=-1)


def assert_step(
    values: tuple[dict[str, Tensor], dict[str, Tensor]], matrices: Tensor, gamma: float = GAMMA
) -> None:
    before, after = map(channels, values)
    assert_close(after, layer_oracles.norm_step(matrices, before, gamma))
    assert not torch.allclose(after, before)


# --- one step --------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_one_step(name: str, uses: int, solver: Any) -> None:
    kind = normed(name, uses)
    loss = loss_on(kind.data())
    expected = fisher(kind, loss)
    optimizer = watched(kind.model, solver=solver)
    assert_step(stepped(kind.model, optimizer, loss), expected)
    assert left_out(optimizer) == {}


@pytest.mark.parametrize("name", ["batch2d", "layer-sequence"])
@pytest.mark.parametrize("average", [None, 2.5])
def test_other_divisors(name: str, average: float | None) -> None:
    kind = normed(name)
    x, labels = kind.data()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), labels, reduction="sum") / (average or 1.0)

    expected = fisher(kind, loss, average)
    assert_step(stepped(kind.model, watched(kind.model, loss_average=average), loss), expected)


@pytest.mark.parametrize("name", ["batch2d", "layer-sequence", "group"])
def test_sharing_makes_no_difference(name: str) -> None:
    kind = normed(name)
    loss = loss_on(kind.data())
    expected = fisher(kind, loss)
    assert_step(stepped(kind.model, watched(kind.model, sharing="reduce"), loss), expected)


@pytest.mark.parametrize("damping", [1e-8, 10.0])
def test_damping(damping: float) -> None:
    kind = normed("layer-sequence")
    loss = loss_on(kind.data())
    expected = fisher(kind, loss)
    assert_step(stepped(kind.model, watched(kind.model, damping=damping), loss), expected, damping)


@pytest.mark.parametrize("name", MIXING)
def test_running_statistics_are_those_of_one_forward(name: str) -> None:
    kind, twin = normed(name), normed(name)
    for number in range(2):
        loss_on(twin.data(number))(twin.model)
    optimizer = watched(kind.model)
    for number in range(2):
        stepped(kind.model, optimizer, loss_on(kind.data(number)))
    assert_same(dict(kind.model.named_buffers()), dict(twin.model.named_buffers()))


# --- rows that are not grouped by sample -----------------------------------------------------


class FlatNormed(nn.Module):
    """Positions of all samples in one dimension when the norm layer sees them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head(z.tanh().mean(1))


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm])
def test_every_entry_of_flattened_positions_is_a_sample(make: Any) -> None:
    kind = Kind(FlatNormed(make(4)), ((3, 4),))
    loss = loss_on(kind.data())
    expected = fisher(kind, loss, divisor=N, samples=3 * N)
    assert_step(stepped(kind.model, watched(kind.model), loss), expected)


# --- the Fisher of the model's own distribution ----------------------------------------------


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_exact_fisher_is_the_dense_ggn(name: str) -> None:
    kind = normed(name, uses=2)
    x, _ = kind.data()
    loss = loss_on(kind.data())
    expected = layer_oracles.norm_exact_fisher(kind.model, "norm", lambda model: model(x))
    with_gradient = {
        n: torch.autograd.grad(loss(kind.model), p)[0]
        for n, p in kind.model.named_parameters()
        if n.startswith("norm")
    }
    observed(watched(kind.model, fisher="exact"), loss, lambda model: model(x))
    after = {n: p.grad for n, p in kind.model.named_parameters() if n.startswith("norm")}
    assert_step((with_gradient, after), expected)


def test_sampled_labels_approach_the_exact_fisher() -> None:
    kind = normed("layer-sequence")
    x, _ = kind.data()
    loss = loss_on(kind.data())
    exact = layer_oracles.norm_exact_fisher(kind.model, "norm", lambda model: model(x))
    parameters = dict(kind.model.named_parameters())
    gradient = {n: torch.autograd.grad(loss(kind.model), parameters[n])[0] for n in NAMES}
    optimizer = watched(kind.model, fisher="mc")
    drawing = {"samples": 800, "generator": torch.Generator().manual_seed(1)}
    observed(optimizer, loss, lambda model: model(x), **drawing)
    after = channels({n: parameters[n].grad for n in NAMES})
    expected = layer_oracles.norm_step(exact, channels(gradient), GAMMA)
    assert_roughly(after, expected, 0.1)
    assert float((channels(gradient) - expected).norm()) > 0.5 * float(expected.norm())


# --- averages over time ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch1d", "layer-sequence", "rms", "group"])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_two_steps(name: str, decay: float) -> None:
    kind = normed(name)
    losses = [loss_on(kind.data(0)), loss_on(kind.data(1, 4))]
    first, second = fisher(kind, losses[0]), fisher(kind, losses[1], 4, 4)
    optimizer = watched(kind.model, decay=decay)
    stepped(kind.model, optimizer, losses[0])
    expected = layer_oracles.decayed(first, second, decay, (N, 4))
    assert_step(stepped(kind.model, optimizer, losses[1]), expected)


def test_statistics_stay_between_factor_steps() -> None:
    kind = normed("layer-sequence")
    expected = fisher(kind, loss_on(kind.data(0)))
    optimizer = watched(kind.model, factor_every=3, refresh_every=3)
    stepped(kind.model, optimizer, loss_on(kind.data(0)))
    assert_step(stepped(kind.model, optimizer, loss_on(kind.data(1))), expected)


# --- what is left out ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch2d", "layer-sequence", "instance2d"])
def test_a_frozen_bias_leaves_one_number_per_channel(name: str) -> None:
    kind = normed(name)
    kind.model.norm.bias.requires_grad_(False)
    loss = loss_on(kind.data())
    expected = fisher(kind, loss)
    assert expected.shape[1:] == (1, 1)
    optimizer = watched(kind.model)
    assert_step(stepped(kind.model, optimizer, loss), expected)
    assert left_out(optimizer) == {"norm.bias": "frozen"}


def test_a_bias_beside_a_frozen_weight_passes_raw_and_is_listed() -> None:
    kind = normed("layer-sequence")
    kind.model.norm.weight.requires_grad_(False)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(after["norm.bias"], before["norm.bias"])
    assert sorted(left_out(optimizer)) == ["norm.bias", "norm.weight"]


@pytest.mark.parametrize("options", [{"rescale": "unit"}, {"fisher": "forward"}], ids=str)
@pytest.mark.parametrize("name", ["batch2d", "layer", "layer-no-bias", "rms", "instance1d"])
def test_options_that_leave_norm_layers_to_the_base(name: str, options: dict[str, Any]) -> None:
    kind = normed(name)
    optimizer = watched(kind.model, **options)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(channels(after), channels(before))
    assert set(left_out(optimizer)) == {n for n in before if n.startswith("norm")}
    assert not torch.allclose(after["head.weight"], before["head.weight"])


def test_a_batch_norm_in_evaluation_mode_passes_its_gradient() -> None:
    kind = normed("batch1d")
    kind.model.norm.eval()
    optimizer = watched(kind.model, on_missing="ignore")
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(channels(after), channels(before))


class ChannelsFirst(nn.LayerNorm):
    """As in several vision models: channels are moved to the end and back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_a_subclass_with_its_own_forward_is_left_out() -> None:
    kind = normed("group")
    kind.model.norm = ChannelsFirst(4)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(channels(after), channels(before))
    assert set(left_out(optimizer)) == set(NAMES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(4, elementwise_affine=False),
        lambda: nn.RMSNorm(4, elementwise_affine=False),
        lambda: nn.BatchNorm1d(4, affine=False),
        lambda: nn.GroupNorm(2, 4, affine=False),
    ],
    ids=["layer", "rms", "batch", "group"],
)
def test_norm_layers_without_parameters_are_not_in_the_way(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, CLASSES))
    optimizer = watched(model)
    before, after = stepped(model, optimizer, loss_on(Kind(model, ((4,),)).data()))
    assert left_out(optimizer) == {}
    assert not torch.allclose(after["0.weight"], before["0.weight"])


# --- length of the step ----------------------------------------------------------------------


def test_graft_keeps_the_norm_of_the_layer() -> None:
    kind = normed("layer-sequence")
    loss = loss_on(kind.data())
    matrices = fisher(kind, loss)
    before, after = stepped(kind.model, watched(kind.model, rescale="graft"), loss)
    solved = layer_oracles.norm_step(matrices, channels(before), GAMMA)
    assert_close(channels(after), solved * channels(before).norm() / solved.norm())


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 2, 5)])
def test_devices_that_need_few_kernels_compute_the_same(shape: tuple[int, ...]) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    layer = BatchNormLayer("norm", kind(3))
    x, grad = 3 + torch.randn(shape), torch.randn(shape)
    assert_close(layer._by_norm(grad, x), layer._by_sums(grad, x))


@pytest.mark.parametrize("bias", [True, False])
def test_norms_side_by_side_are_those_one_after_another(bias: bool) -> None:
    """Sums of a whole network become rows at once, with means taken off late."""
    late, expected = [], []
    for channels in (3, 5):
        module = nn.BatchNorm2d(channels)
        if not bias:
            module.bias.requires_grad_(False)
        layer = BatchNormLayer("norm", module)
        x, grad = 3 + torch.randn(4, channels, 2, 5), torch.randn(4, channels, 2, 5)
        output = module(x.requires_grad_())
        kept, mean, scale = layer.keep_call([x], output)
        assert kept.data_ptr() == x.data_ptr()
        sums = products_and_sums(grad.flatten(2), kept.flatten(2))
        late.append(ChannelSums(*sums, (mean, scale), bias=bias))
        expected.append(layer.outputs(grad, (kept,)))
    for ours, theirs in zip(side_by_side(late), expected, strict=True):
        assert_close(ours.dense(), theirs.dense())
        assert_close(ours.covariance(), theirs.covariance())


@pytest.mark.parametrize("bias", [True, False])
def test_sums_of_layer_norms_need_no_normalised_input(bias: bool) -> None:
    module = nn.LayerNorm(5, bias=bias)
    layer, grad = LayerNormLayer("norm", module), torch.randn(4, 3, 5)
    x = (3 + torch.randn(4, 5, 3)).mT.requires_grad_()
    kept, mean, scale = layer.keep_call([x], module(x))
    assert kept.data_ptr() == x.data_ptr()  # autograd protects it, whatever its layout is
    sums = normalised_sums(grad, kept, mean, scale, bias)
    assert_close(ChannelSums(*sums, bias=bias).dense(), layer.outputs(grad, (kept,)).dense())


def test_gradients_of_single_positions_are_copied() -> None:
    """What is kept until the step must not change with the gradient."""
    layer, grad = BatchNormLayer("norm", nn.BatchNorm1d(3)), torch.randn(6, 3)
    rows = layer.outputs(grad, (torch.randn(6, 3),))
    before = rows.dense()
    grad.zero_()
    assert_same(rows.dense(), before)
