"""Kronecker recurrent layers: those of torch with the dense matrices of the products."""

from typing import Any

import pytest
import torch
from torch import nn

import kronfac
from kronfac.nn import KroneckerGRU, KroneckerLSTM, KroneckerRNN
from tests.training import assert_close

pytestmark = pytest.mark.usefixtures("double_precision")

KINDS: list[Any] = [KroneckerRNN, KroneckerGRU, KroneckerLSTM]


def dense(layer: Any, num_layers: int, batch_first: bool) -> nn.RNNBase:
    """torch's layer with the same matrices."""
    other = layer.torch_type(6, 8, num_layers, batch_first=batch_first)
    with torch.no_grad():
        for number in range(num_layers):
            for kind, products in (("ih", layer.inputs), ("hh", layer.states)):
                getattr(other, f"weight_{kind}_l{number}").copy_(products[number].dense())
                getattr(other, f"bias_{kind}_l{number}").copy_(products[number].bias)
    return other


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("terms", [None, (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_states_are_those_of_torch(
    kind: Any, terms: tuple[int, int] | None, num_layers: int, batch_first: bool
) -> None:
    given = None if terms is None else [terms] * num_layers
    layer = kind(6, 8, num_layers, batch_first=batch_first, terms=given)
    other = dense(layer, num_layers, batch_first)
    x = torch.randn(4, 5, 6)
    outputs, state = layer(x)
    expected, expected_state = other(x)
    assert_close(outputs, expected)
    assert_close(state, expected_state)
    again, last = layer(x, state)
    expected_again, expected_last = other(x, expected_state)
    assert_close(again, expected_again)
    assert_close(last, expected_last)


@pytest.mark.parametrize("terms", [None, [(2, 3), (1, 2)]])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_found_again(kind: Any, terms: Any) -> None:
    layer = kind(6, 8, 2, terms=terms)
    shapes = [(a.shapes, b.shapes) for a, b in zip(layer.inputs, layer.states, strict=True)]
    found = kind.nearest(dense(layer, 2, False), shapes, terms)
    x = torch.randn(4, 5, 6)
    assert_close(found(x)[0], layer(x)[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_expanded_layer_is_that_of_torch(kind: Any, bias: bool) -> None:
    layer = kind(6, 8, 2, bias, batch_first=True, terms=[(2, 3), (1, 2)])
    expanded, x = layer.expand(), torch.randn(4, 5, 6)
    assert type(expanded) is layer.torch_type
    assert_close(expanded(x), layer(x))


@pytest.mark.parametrize(
    "options", [{"bidirectional": True}, {"proj_size": 2}, {"dropout": 0.1, "num_layers": 2}]
)
def test_what_is_not_supported_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"LSTM with {next(iter(options))} cannot be a Kronecker layer"
    ):
        KroneckerLSTM.nearest(nn.LSTM(6, 8, **options))


@pytest.mark.parametrize("name", ["shapes", "terms"])
def test_one_entry_for_each_layer_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 1 entries for 2 layers"):
        KroneckerGRU(6, 8, 2, **{name: [(1, 1)]})


class Classifier(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_kfac_trains_them(kind: Any) -> None:
    """Their factors are used at every time: all uses count."""
    torch.manual_seed(0)
    model = Classifier(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True)
    assert "cell.states.0.left" in {one.name for one in optimizer.layers}
    x, y = torch.randn(32, 5, 6), torch.randint(3, (32,))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
