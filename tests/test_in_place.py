"""Operations in place on a layer's output leave its statistics as they are, views included."""

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac

pytestmark = pytest.mark.usefixtures("double_precision")

Operation = Callable[[Tensor, Tensor], Tensor]


def relu_(h: Tensor, x: Tensor) -> Tensor:
    return F.relu_(h)


def residual_(h: Tensor, x: Tensor) -> Tensor:
    h += x
    return h


def dropout_(h: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(h, 0.4, inplace=True)


def used_before_(h: Tensor, x: Tensor) -> Tensor:
    early = h.mean(1, keepdim=True)
    h.mul_(3.0)
    return early + h


def part_(h: Tensor, x: Tensor) -> Tensor:
    h[:, 1:].mul_(2.0)
    return h


OPERATIONS = [relu_, residual_, dropout_, used_before_, part_]


class Conv1D(nn.Module):
    """A linear layer as GPT-2 writes it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(shape)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


class Net(nn.Module):
    """A layer, an operation on its output, and a head."""

    def __init__(self, layer: nn.Module, operation: Operation, copies: bool) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(6, 3)
        self.operation = operation
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = self.operation(h.clone() if self.copies else h, x)
        out: Tensor = self.head(h).mean(1)
        return out


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 6), (8, 5, 6)),
    "linear 4-D": (lambda: nn.Linear(6, 6), (4, 5, 2, 6)),
    "linear no bias": (lambda: nn.Linear(6, 6, bias=False), (8, 5, 6)),
    "instance norm": (lambda: nn.InstanceNorm1d(5, affine=True), (8, 5, 6)),
    "Conv1D": (lambda: Conv1D(6, 6), (8, 5, 6)),
    "attention": (lambda: Attention(6), (4, 5, 6)),
    "attention at batch 1": (lambda: Attention(6), (1, 5, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (8, 5, 6)),
}


def steps(
    name: str, operation: Operation, copies: bool, **options: object
) -> tuple[dict[str, Tensor], list[str]]:
    """Parameters after two steps, and the layers without a solution."""
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    model = Net(build(), operation, copies)
    x = torch.randn(shape)
    optimizer = kronfac.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        factor_every=1,
        refresh_every=1,
        damping=1e-2,
        rescale=None,
        **options,  # type: ignore[arg-type]
    )
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x).flatten(1)
        if "fisher" in options:
            optimizer.observe(out, "gaussian", generator=torch.Generator().manual_seed(5))
        out.square().sum(-1).mean().backward()
        optimizer.step()
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return state, optimizer.stats()["without_solution"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_does_not_notice(name: str, operation: Operation) -> None:
    found, without = steps(name, operation, copies=False)
    expected, _ = steps(name, operation, copies=True)
    assert without == []
    assert_close(found, expected)


@pytest.mark.parametrize("options", [{"fisher": "mc"}, {"sharing": "reduce"}])
@pytest.mark.parametrize("operation", [relu_, used_before_])
def test_nor_with_other_statistics(operation: Operation, options: dict[str, str]) -> None:
    found, without = steps("linear", operation, copies=False, **options)
    assert without == []
    assert_close(found, steps("linear", operation, copies=True, **options)[0])


def test_scores_scaled_in_place_are_still_counted_by_token() -> None:
    def trained(copies: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = kronfac.KFAC(model, base, rescale=None, loss_average="token")
        scores = model(torch.randn(2, 5, 4))
        scores = scores.clone() if copies else scores
        scores /= 2.0
        F.cross_entropy(scores.flatten(0, 1), torch.arange(10) % 3).backward()
        optimizer.step()
        return model.weight.detach()

    assert_close(trained(copies=False), trained(copies=True))


def test_a_hook_keeps_no_output_alive() -> None:
    model = nn.Linear(4, 3)
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    freed = []
    for _ in range(2):
        out = model(torch.randn(2, 5, 4))
        weakref.finalize(out._base, freed.append, True)
        del out
    assert len(freed) == 2
    assert optimizer.stats()["steps"] == 0
