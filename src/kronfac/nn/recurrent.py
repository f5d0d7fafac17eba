"""Recurrent layers whose matrices are Kronecker products (Thakker et al. 2019).

They take and return what their counterparts in :mod:`torch.nn` do. All gates of a layer are one product,
or one sum of products: each has rows of the left factors of its own, and they share the right ones.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from kronfac.nn.linear import KroneckerLinear
from kronfac.nn.nearest import Shapes

_T = TypeVar("_T")

#: Shapes of the products for the input and for the state of one layer.
LayerShapes = tuple[Shapes | None, Shapes | None]
#: Numbers of products for the input and for the state of one layer.
LayerTerms = tuple[int, int]


class _Recurrent(nn.Module):
    """What the three kinds share: layers, states, and the loop over time."""

    gates: ClassVar[int]
    torch_type: ClassVar[type[nn.RNNBase]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        *,
        shapes: list[LayerShapes] | None = None,
        terms: list[LayerTerms] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first = batch_first
        chosen: list[LayerShapes] = _each("shapes", shapes, (None, None), num_layers)
        sums: list[LayerTerms] = _each("terms", terms, (1, 1), num_layers)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        rows = self.gates * hidden_size
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        layers = list(zip(sizes, chosen, sums, strict=True))
        self.inputs = nn.ModuleList(
            KroneckerLinear(size, rows, shapes=one[0], terms=number[0], **options)
            for size, one, number in layers
        )
        self.states = nn.ModuleList(
            KroneckerLinear(hidden_size, rows, shapes=one[1], terms=number[1], **options)
            for _, one, number in layers
        )

    @classmethod
    def nearest(
        cls,
        layer: nn.RNNBase,
        shapes: list[LayerShapes] | None = None,
        terms: list[LayerTerms] | None = None,
    ) -> Self:
        """The layer whose matrices are nearest to those of one of torch's; biases are the same."""
        check_plain(layer)
        weight = next(layer.parameters())
        found = cls(
            layer.input_size,
            layer.hidden_size,
            layer.num_layers,
            layer.bias,
            layer.batch_first,
            shapes=shapes,
            terms=terms,
            device=weight.device,
            dtype=weight.dtype,
        )
        found._set_nearest(layer)
        return found

    def _set_nearest(self, layer: nn.RNNBase) -> None:
        for number in range(self.num_layers):
            for kind, products in (("ih", self.inputs), ("hh", self.states)):
                bias = getattr(layer, f"bias_{kind}_l{number}", None)
                products[number].set_nearest(getattr(layer, f"weight_{kind}_l{number}"), bias)  # type: ignore[operator]

    @torch.no_grad()
    def expand(self) -> nn.RNNBase:
        """Torch's layer with the matrices of the products: large again, and quicker if it is narrow."""
        first: Any = self.inputs[0]
        weight, make = first.left.weight, cast(Any, self.torch_type)
        found: nn.RNNBase = make(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            bias=first.bias is not None,
            batch_first=self.batch_first,
            device=weight.device,
            dtype=weight.dtype,
        )
        for number in range(self.num_layers):
            for kind, products in (("ih", self.inputs), ("hh", self.states)):
                product: Any = products[number]
                getattr(found, f"weight_{kind}_l{number}").copy_(product.dense())
                if product.bias is not None:
                    getattr(found, f"bias_{kind}_l{number}").copy_(product.bias)
        return found

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Outputs of the last layer at every time, and the last state of every layer."""
        x = x.transpose(0, 1) if self.batch_first else x
        first = self._first(x, state)
        last = []
        for number in range(self.num_layers):
            seen = self.inputs[number](x)
            outputs, now = [], tuple(one[number] for one in first)
            for at_time in seen.unbind(0):
                now = self._step(at_time, self.states[number](now[0]), now)
                outputs.append(now[0])
            x = torch.stack(outputs)
            last.append(now)
        ends = tuple(torch.stack(one) for one in zip(*last, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, self._last(ends)

    def _first(self, x: Tensor, state: Any) -> tuple[Tensor, ...]:
        """The state to begin with, ``[num_layers, N, hidden_size]`` each."""
        if state is None:
            return (x.new_zeros(self.num_layers, x.shape[1], self.hidden_size),)
        return (state,)

    def _last(self, ends: tuple[Tensor, ...]) -> Any:
        return ends[0]

    def _step(self, seen: Tensor, before: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The state after one time, from the products with the input and with the state before."""
        raise NotImplementedError


class KroneckerRNN(_Recurrent):
    """:class:`torch.nn.RNN` with Kronecker products: ``h ← tanh(W x + U h)``."""

    gates = 1
    torch_type = nn.RNN

    def _step(self, seen: Tensor, before: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.tanh(seen + before),)


class KroneckerGRU(_Recurrent):
    """:class:`torch.nn.GRU` with Kronecker products."""

    gates = 3
    torch_type = nn.GRU

    def _step(self, seen: Tensor, before: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        reset, update, new = seen.chunk(3, -1)
        old_reset, old_update, old_new = before.chunk(3, -1)
        candidate = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
        return (torch.lerp(candidate, now[0], torch.sigmoid(update + old_update)),)


class KroneckerLSTM(_Recurrent):
    """:class:`torch.nn.LSTM` with Kronecker products; the state is ``(h, c)``."""

    gates = 4
    torch_type = nn.LSTM

    def _first(self, x: Tensor, state: Any) -> tuple[Tensor, ...]:
        if state is not None:
            return tuple(state)
        zeros = x.new_zeros(self.num_layers, x.shape[1], self.hidden_size)
        return zeros, zeros

    def _last(self, ends: tuple[Tensor, ...]) -> Any:
        return ends

    def _step(self, seen: Tensor, before: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        takes, keeps, content, shows = (seen + before).chunk(4, -1)
        cell = torch.sigmoid(keeps) * now[1] + torch.sigmoid(takes) * torch.tanh(content)
        return torch.sigmoid(shows) * torch.tanh(cell), cell


def _each(name: str, given: list[_T] | None, default: _T, layers: int) -> list[_T]:
    """One entry for each layer, or an error."""
    if given is not None and len(given) != layers:
        raise ValueError(f"{name} has {len(given)} entries for {layers} layers; give one for each.")
    return [default] * layers if given is None else given


def check_plain(layer: nn.RNNBase) -> None:
    """Raise if a recurrent layer does what ours do not."""
    asked = {
        "bidirectional": layer.bidirectional,
        "proj_size": layer.proj_size > 0,
        "dropout": layer.dropout > 0,
        "nonlinearity": getattr(layer, "nonlinearity", "tanh") != "tanh",
    }
    having = [name for name, wanted in asked.items() if wanted]
    if having:
        raise ValueError(
            f"{type(layer).__name__} with {having[0]} cannot be a Kronecker layer; supported are layers "
            "in one direction with tanh, without projections and dropout. Name it in exclude."
        )


def counterpart(layer: nn.RNNBase) -> type[_Recurrent]:
    """The Kronecker layer for one of torch's."""
    kinds = (KroneckerRNN, KroneckerGRU, KroneckerLSTM)
    return next(one for one in kinds if isinstance(layer, one.torch_type))
