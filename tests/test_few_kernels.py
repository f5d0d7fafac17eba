"""What devices other than CPUs do, done on a CPU: the same numbers, in fewer kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import kronfac
from kronfac.capture import capture
from kronfac.capture.waiting import WaitingInputs
from kronfac.layers import together
from kronfac.layers.rows import DenseRows, MapRows, PatchRows, Rows
from kronfac.linalg import devices
from kronfac.linalg.patches import Window
from tests.operations import Operations
from tests.shapes import Bottleneck, VisionBlock

pytestmark = pytest.mark.usefixtures("double_precision")


@contextmanager
def few_kernels() -> Iterator[None]:
    """Take the CPU for an accelerator."""
    with mock.patch.object(devices, "wants_few_kernels", return_value=True):
        yield


def convolutional() -> tuple[nn.Module, Tensor]:
    blocks = [Bottleneck(8, 2, 1) for _ in range(3)]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *blocks
    )
    return nn.Sequential(model, nn.Flatten(), nn.Linear(8 * 16, 5)), torch.randn(6, 3, 8, 8)


def attentive() -> tuple[nn.Module, Tensor]:
    blocks = [VisionBlock(8, 2) for _ in range(3)]
    return nn.Sequential(*blocks, nn.LayerNorm(8), nn.Linear(8, 5)), torch.randn(6, 7, 8)


class Branches(nn.Module):
    """Layers that see the same input, and others of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        y = torch.tanh(a(x)) + torch.sigmoid(b(x))
        return self.last(torch.tanh(c(y)) + d(x).relu_())


class Checkpointed(Branches):
    """The same, of which a part is computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def branching() -> tuple[nn.Module, Tensor]:
    return Branches(), torch.randn(6, 8)


def checkpointed() -> tuple[nn.Module, Tensor]:
    return Checkpointed(), torch.randn(6, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutional": convolutional,
    "attentive": attentive,
    "branching": branching,
    "checkpointed": checkpointed,
}


def trained(name: str, **options: Any) -> list[Tensor]:
    """Parameters after some steps, of two micro-batches each."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    base = SGD(model.parameters(), lr=0.1)
    options = {"factor_every": 1, "refresh_every": 2, "rows": None, **options}
    optimizer = kronfac.KFAC(model, base, **options)
    for _ in range(4):
        optimizer.zero_grad()
        for part in x.split(3):
            scores = model(part).flatten(0, -2)
            F.cross_entropy(scores, torch.arange(len(scores)) % 5).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"share_inputs": False}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same(name: str, options: dict[str, Any]) -> None:
    expected = trained(name, **options)
    with few_kernels():
        actual = trained(name, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("name", "saved"), [("convolutional", 6), ("attentive", 11)])
def test_equal_shapes_are_multiplied_together(name: str, saved: int) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1))
    with mock.patch.object(capture, "may_wait", return_value=False), Operations() as one_by_one:
        model(x)
    with few_kernels(), Operations() as counted:
        model(x)
    assert one_by_one.products.total() - counted.products.total() == saved
    del optimizer


@pytest.mark.parametrize(("images", "waits"), [(8, 2), (1100, 0)])
def test_a_cpu_takes_few_images_of_convolutions_together(images: int, waits: int) -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2)))
    model.append(nn.Flatten()).append(nn.Linear(1024, 3)).append(nn.Linear(3, 3))
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), rows=None)
    with mock.patch.object(WaitingInputs, "add", autospec=True) as added:
        model(torch.randn(images, 4, 16, 16))
    assert added.call_count == waits
    del optimizer


def test_inputs_that_autograd_does_not_keep_do_not_wait() -> None:
    model, x = branching()
    model, x = model.float(), x.float()
    optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.1))
    with few_kernels(), mock.patch.object(WaitingInputs, "add") as waits:
        with torch.autograd.graph.save_on_cpu():
            model(x)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        assert not waits.called
        model(x)
        assert waits.called
    del optimizer


WINDOWS = {
    "pointwise": Window((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0))),
    "pointwise, strided": Window((1, 1), (2, 2), (1, 1), ((0, 0), (0, 0))),
    "padded": Window((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    "strided": Window((3, 3), (2, 2), (1, 1), ((1, 1), (1, 1))),
    "grouped": Window((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), groups=2),
    "pointwise, grouped": Window((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), groups=2),
}


@pytest.mark.parametrize("most", [1 << 26, 1200])
@pytest.mark.parametrize("kind", [*WINDOWS, "dense", "with ones"])
def test_second_moments_of_several_layers(kind: str, most: int) -> None:
    torch.manual_seed(0)
    rows: list[Rows] = []
    for _ in range(3):
        if kind in WINDOWS:
            rows.append(PatchRows(torch.randn(2, 4, 7, 6), WINDOWS[kind], ones=False))
        else:
            rows.append(DenseRows(torch.randn(4, 5, 6), ones=kind == "with ones"))
    with few_kernels(), mock.patch.object(together, "_MOST_ELEMENTS", most):
        actual = together.covariances(rows)
    for one, found in zip(rows, actual, strict=True):
        dense = one.dense().flatten(-3, -2)
        torch.testing.assert_close(found, dense.mT @ dense)


@pytest.mark.parametrize("groups", [1, 2])
def test_chosen_rows_are_the_same(groups: int) -> None:
    x = torch.randn(4, 6, 5, 3)
    window = Window((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), groups=groups)
    sides: list[Rows] = [MapRows(x, groups), PatchRows(x, window, True)]
    for rows in sides:
        expected = [rows.some_positions(7, 4), rows.every(1, 2)]
        with few_kernels():
            actual = [rows.some_positions(7, 4), rows.every(1, 2)]
            for ours, theirs in zip(actual, expected, strict=True):
                assert torch.equal(ours.dense(), theirs.dense())
                torch.testing.assert_close(ours.covariance(), theirs.covariance())
