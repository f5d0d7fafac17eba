"""Recurrent layers are named as not preconditioned, and their gradients pass as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers.kinds import LENGTH, WIDTH, Kind, loss_on
from tests.layers.watching import left_out, stepped, watched
from tests.training import CLASSES, assert_same

pytestmark = pytest.mark.usefixtures("double_precision")

LAYERS = {
    "lstm": (nn.LSTM, {"batch_first": True}),
    "lstm-deep": (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
    "lstm-projected": (nn.LSTM, {"batch_first": True, "proj_size": 2}),
    "gru": (nn.GRU, {"batch_first": True, "bias": False}),
    "rnn": (nn.RNN, {"batch_first": True}),
    "lstm-cell": (nn.LSTMCell, {}),
    "gru-cell": (nn.GRUCell, {}),
    "rnn-cell": (nn.RNNCell, {"bias": False}),
}


class Recurrent(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        make, options = LAYERS[name]
        self.cells = make(WIDTH, 3, **options)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.cells, nn.RNNBase):
            return self.head(self.cells(x)[0].mean(1))
        state = None
        for position in x.unbind(1):
            state = self.cells(position, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def recurrent(name: str) -> Kind:
    torch.manual_seed(0)
    kind = Kind(Recurrent(name), ((LENGTH, WIDTH),))
    kind.model(kind.data()[0])  # the head learns its width
    return kind


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_is_listed_with_a_reason(name: str) -> None:
    kind = recurrent(name)
    reasons = left_out(watched(kind.model))
    cells: Any = kind.model.cells
    assert set(reasons) == {f"cells.{n}" for n, _ in cells.named_parameters()}
    assert all(type(cells).__name__ in reason for reason in reasons.values())


@pytest.mark.parametrize("options", [{}, {"rescale": "graft"}, {"fisher": "forward"}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_pass_as_they_are(name: str, options: dict[str, Any]) -> None:
    kind = recurrent(name)
    before, after = stepped(kind.model, watched(kind.model, **options), loss_on(kind.data()))
    cells = [n for n in before if n.startswith("cells.")]
    assert all(before[n].any() for n in cells)
    assert_same({n: after[n] for n in cells}, {n: before[n] for n in cells})
    assert not torch.allclose(after["head.weight"], before["head.weight"])
