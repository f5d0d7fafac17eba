"""Linear layers that store their weight as `[in, out]`, as Hugging Face's GPT-2 does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import layer_oracles, oracles
from tests.layers.kinds import GAMMA, WIDTH, Conv1D, Kind, Loss, N, loss_on, transposed
from tests.layers.watching import left_out, observed, stepped, watched
from tests.training import CLASSES, assert_close, assert_same

pytestmark = pytest.mark.usefixtures("double_precision")

SOLVERS = {"eigen": oracles.eigen_step, "cholesky": oracles.cholesky_step}


def real(nf: int, nx: int) -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(nf, nx)


MAKERS = {"stand-in": Conv1D, "transformers": real}


def expected_step(kind: Kind, loss: Loss, **how: Any) -> Tensor:
    model = layer_oracles.replaced(kind.model, "layer", layer_oracles.as_linear)
    return layer_oracles.linear_step(model, "layer", loss, GAMMA, N, **how)


def matrix(values: dict[str, Tensor]) -> Tensor:
    """What the layer has, as the matrix of a linear layer."""
    weight = values["layer.weight"].T
    if "layer.bias" not in values:
        return weight
    return torch.cat([weight, values["layer.bias"][:, None]], dim=1)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_one_step(make: str, uses: int, sharing: Any, solver: Any) -> None:
    kind = transposed(MAKERS[make], uses)
    loss = loss_on(kind.data())
    expected = expected_step(kind, loss, sharing=sharing, solve=SOLVERS[solver])
    optimizer = watched(kind.model, sharing=sharing, solver=solver)
    before, after = stepped(kind.model, optimizer, loss)
    assert_close(matrix(after), expected)
    assert not torch.allclose(matrix(after), matrix(before))
    assert left_out(optimizer) == {}


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_two_steps(decay: float) -> None:
    kind = transposed()
    losses = [loss_on(kind.data(0)), loss_on(kind.data(1, 4))]
    model = layer_oracles.replaced(kind.model, "layer", layer_oracles.as_linear)
    first = layer_oracles.linear_factors(model, "layer", losses[0], N)
    second = layer_oracles.linear_factors(model, "layer", losses[1], 4)
    A, G = (layer_oracles.decayed(*two, decay, (N, 4)) for two in zip(first, second, strict=True))
    optimizer = watched(kind.model, decay=decay)
    stepped(kind.model, optimizer, losses[0])
    before, after = stepped(kind.model, optimizer, losses[1])
    assert_close(matrix(after), oracles.eigen_step(A, G, matrix(before), GAMMA))


def test_exact_fisher() -> None:
    kind = transposed()
    x, _ = kind.data()
    loss = loss_on(kind.data())
    model = layer_oracles.replaced(kind.model, "layer", layer_oracles.as_linear)
    with layer_oracles.recorded(model.layer) as calls:
        outputs = model(x)
    sent = oracles.type2_output_gradients(outputs, calls[0].z, "categorical")
    A, G = oracles.type2_factors(model.layer, calls[0].x, sent)
    V = layer_oracles.linear_gradient(model, "layer", loss)
    observed(watched(kind.model, fisher="exact"), loss, lambda model: model(x))
    after = {f"layer.{n}": p.grad for n, p in kind.model.layer.named_parameters()}
    assert_close(matrix(after), oracles.eigen_step(A, G, V, GAMMA))


def test_a_frozen_bias_is_no_column() -> None:
    kind = transposed()
    kind.model.layer.bias.requires_grad_(False)
    loss = loss_on(kind.data())
    expected = expected_step(kind, loss)
    assert expected.shape == (5, WIDTH)
    optimizer = watched(kind.model)
    assert_close(matrix(stepped(kind.model, optimizer, loss)[1]), expected)
    assert left_out(optimizer) == {"layer.bias": "frozen"}


def test_a_frozen_weight_leaves_the_layer_out() -> None:
    kind = transposed()
    kind.model.layer.weight.requires_grad_(False)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(after["layer.bias"], before["layer.bias"])
    assert left_out(optimizer)["layer.weight"] == "frozen"


def test_a_square_weight_is_still_transposed() -> None:
    torch.manual_seed(0)
    kind = Kind(nn.Sequential(nn.Tanh(), Conv1D(CLASSES, CLASSES)), ((CLASSES,),))
    loss = loss_on(kind.data())
    model = layer_oracles.replaced(kind.model, "1", layer_oracles.as_linear)
    expected = layer_oracles.linear_step(model, "1", loss, GAMMA, N)
    _, after = stepped(kind.model, watched(kind.model), loss)
    assert_close(torch.cat([after["1.weight"].T, after["1.bias"][:, None]], dim=1), expected)


def test_another_class_of_that_name_is_listed() -> None:
    def make(nf: int, nx: int) -> nn.Module:
        module = Unlike(nf, nx)
        module.__class__.__name__ = "Conv1D"
        return module

    class Unlike(nn.Module):
        """A convolution without `nf`."""

        def __init__(self, outputs: int, inputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(outputs, inputs, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x.mT, self.weight).mT

    kind = transposed(make)
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(after["layer.weight"], before["layer.weight"])
    assert left_out(optimizer)["layer.weight"]


@pytest.mark.parametrize("name", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
def test_gpt2(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config).double()
    tokens = torch.randint(11, (N, 5))

    def loss(model: nn.Module) -> Tensor:
        scores = model(tokens).logits[:, :-1]
        terms = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return terms / N

    named = f"transformer.h.0.{name}"
    reference = layer_oracles.replaced(model, named, layer_oracles.as_linear)
    expected = layer_oracles.linear_step(reference, named, loss, GAMMA, N)
    optimizer = watched(model)
    _, after = stepped(model, optimizer, loss)
    found = torch.cat([after[f"{named}.weight"].T, after[f"{named}.bias"][:, None]], dim=1)
    assert_close(found, expected)
    assert left_out(optimizer) == {}
