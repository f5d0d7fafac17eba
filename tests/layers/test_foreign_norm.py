"""Root-mean-square norms that are not torch's: those of Hugging Face, found by what they look like."""

import pytest
import torch
from torch import Tensor, nn

from tests import layer_oracles
from tests.layers.kinds import GAMMA, Kind, N, loss_on
from tests.layers.test_norm import FlatNormed, assert_step, channels, fisher
from tests.layers.watching import assert_roughly, left_out, stepped, watched
from tests.training import CLASSES, assert_same

pytestmark = pytest.mark.usefixtures("double_precision")


def llama_style(norm: nn.Module) -> Kind:
    torch.manual_seed(0)
    nn.init.uniform_(norm.weight, 0.5, 1.5)  # type: ignore[arg-type]
    return Kind(FlatNormed(norm), ((3, 4),))


def test_root_mean_square_norm_of_llama() -> None:
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    kind = llama_style(module.LlamaRMSNorm(4, eps=1e-3))
    loss = loss_on(kind.data())
    expected = fisher(kind, loss, samples=3 * N)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss)
    solved = layer_oracles.norm_step(expected, channels(before), GAMMA)
    assert_roughly(channels(after), solved, 1e-5)  # it works in single precision inside
    assert left_out(optimizer) == {}


class SinglePrecisionRMSNorm(nn.Module):
    """Works on a copy, so that its input may be overwritten before the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        copied = x.float()
        scale = torch.rsqrt(copied.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (copied * scale).to(x.dtype)


class Residual(nn.Module):
    """Adds to the input of its norm layer, in place or not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 4), SinglePrecisionRMSNorm(4)
        self.head, self.in_place = nn.Linear(4, CLASSES), False

    def forward(self, x: Tensor) -> Tensor:
        z = self.stem(x)
        change = self.norm(z).tanh()
        if self.in_place:
            z += change
        else:
            z = z + change
        return self.head(z.mean(1))


def test_an_input_that_is_overwritten_after_the_call() -> None:
    torch.manual_seed(0)
    kind = Kind(Residual(), ((3, 4),))
    loss = loss_on(kind.data())
    expected = fisher(kind, loss)
    kind.model.in_place = True
    before, after = stepped(kind.model, watched(kind.model), loss)
    solved = layer_oracles.norm_step(expected, channels(before), GAMMA)
    assert_roughly(channels(after), solved, 1e-5)


class OffsetRMSNorm(nn.Module):
    """In the style of Gemma: multiplies by one plus its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def test_a_norm_layer_with_an_offset_is_exact_or_listed() -> None:
    """Its weight has the same gradient as one without, wherever the loss is."""
    kind = llama_style(OffsetRMSNorm(4))
    loss = loss_on(kind.data())
    plain = llama_style(nn.RMSNorm(4, eps=1e-3))
    plain.model.load_state_dict(kind.model.state_dict())
    with torch.no_grad():
        plain.model.norm.weight += 1
    expected = fisher(plain, loss, samples=3 * N)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss)
    if "norm.weight" in left_out(optimizer):
        assert_same(after["norm.weight"], before["norm.weight"])
    else:
        assert_step((before, after), expected)
