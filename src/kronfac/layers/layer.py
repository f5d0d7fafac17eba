"""What the rest of the library knows of a module: its rows, and its gradient as a matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.layers.parameter_view import ParameterView
from kronfac.layers.rows import Rows
from kronfac.layers.shards import accumulates, in_use, is_gathered_form, plain_type

#: Called for one product of a module's forward with the layer's part, the inputs and the output. The
#: forward continues with the output that it returns.
See = Callable[[str, tuple[Any, ...], Tensor], Tensor]


class Layer(ABC):
    """A weight, with or without a bias, whose gradient is ``Σ g aᵀ`` over rows.

    Subclasses describe one module type. The gradient matrix is ``V: [*b, d_out, d_in]``, weight
    first and the bias, when it trains, as the last column.

    Args:
        name: the layer's full name.
        module: the module whose calls are observed.
        weight_name: attribute of the module that holds the weight.
        bias_name: attribute that holds the bias.
        part: which of the module's layers this is, when it has several.
    """

    #: Whether the weight scales channels one by one (norms) instead of multiplying vectors.
    unit_wise = False
    #: Whether each row picks a column of the weight (embeddings), which makes ``A`` diagonal.
    picks_columns = False
    #: Whether the rows of neighbouring positions consist of the same inputs, for the most part.
    overlaps = False
    #: Whether its rows are observed; without them it has no curvature.
    is_observed = True
    #: Whether :meth:`outputs` needs the inputs of the call, which are then kept until the backward pass.
    keeps_inputs = False

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        weight_name: str = "weight",
        bias_name: str = "bias",
        part: str = "",
    ) -> None:
        self.name = name
        self.module = module
        self.part = part
        self.weight_name = weight_name
        weight, bias = getattr(module, weight_name, None), getattr(module, bias_name, None)
        if not isinstance(weight, nn.Parameter) or not isinstance(bias, nn.Parameter | None):
            raise TypeError(
                f"layer {name!r}: {weight_name!r} of {type(module).__name__} must be a "
                f"torch.nn.Parameter, and {bias_name!r} one or None; a layer type may name others "
                "by weight_name= and bias_name=."
            )
        self.weight: nn.Parameter = weight
        self.bias: nn.Parameter | None = bias
        #: What FSDP2 knows of the weight, if it shards it.
        self.handle: Any = None
        self.bias_trains = self._bias_trains()

    @property
    def key(self) -> tuple[nn.Parameter, str]:
        """What identifies the layer: its weight, and the part of it."""
        return self.weight, self.part

    @property
    def is_trained(self) -> bool:
        """Whether its gradient is worked on: that of a frozen weight is not."""
        return self.weight.requires_grad

    @property
    def kind(self) -> str:
        """The module type's name."""
        return plain_type(self.module).__name__

    @property
    def factor_dtype(self) -> torch.dtype:
        """Statistics and solutions are at least single precision."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradient is in the matrix."""
        bias = self.bias
        return [self.weight, bias] if bias is not None and self.bias_trains else [self.weight]

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the gradient matrix, ``(*b, d_out, d_in)``."""
        *batch, d_out, d_in = self._weight_shape()
        return (*batch, d_out, d_in + self.bias_trains)

    @property
    def weight_in_use(self) -> nn.Parameter:
        """What forwards compute with: the weight, or what FSDP2 has gathered of it."""
        return in_use(self.handle, self.weight)

    @property
    def holds_gradient(self) -> bool:
        """Whether the weight has a gradient, or FSDP2 has one of it that it has not reduced yet."""
        return self.weight.grad is not None or accumulates(self.handle)

    def _bias_trains(self) -> bool:
        bias = self.bias
        return bias is not None and bias.requires_grad

    def stale(self) -> bool:
        """Whether ``requires_grad`` of the bias has changed since the matrix shape was computed."""
        return self._bias_trains() != self.bias_trains

    def renew(self) -> None:
        """Compute the matrix shape again."""
        self.bias_trains = self._bias_trains()

    # --- calls ----------------------------------------------------------------------------------

    @staticmethod
    def split(
        see: See, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        """Show the products inside one call of the module, and return what replaces its output."""
        return see("", args if args else tuple(kwargs.values()), output)

    @property
    def geometry(self) -> Hashable:
        """What else determines the rows: modules that share a weight must have the same value."""
        return None

    @property
    def has_units(self) -> bool:
        """Whether rows are the vectors of a call themselves, and a one for the bias.

        A side may then be cut into blocks of such units.
        """
        return False

    @property
    def input_form(self) -> Hashable:
        """How rows are made of inputs: layers of equal forms make the same rows of the same tensor.

        ``None`` if a layer's inputs are never taken for those of another layer.
        """
        return None

    def keep(self, value: Any) -> Any:
        """An input of a call as it is kept until the backward pass."""
        return value.detach() if isinstance(value, Tensor) else value

    def keep_call(self, inputs: Sequence[Any], product: Tensor) -> list[Any]:
        """The inputs of a call that are kept, given its output too; others may follow them."""
        return [self.keep(value) for value in inputs]

    def uses(self, module: nn.Module) -> bool:
        """Whether a module computes with this weight now (not ``torch.func.functional_call``)."""
        found = getattr(module, self.weight_name, None)
        return found is self.weight or is_gathered_form(self.handle, found)

    @abstractmethod
    def inputs(self, args: tuple[Any, ...]) -> Rows | None:
        """Rows of a call's inputs, in factor precision; ``None`` if this side alone is not observed."""

    @abstractmethod
    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """Rows of the gradient with respect to a call's output, in factor precision.

        ``args`` are the call's inputs, or empty unless :attr:`keeps_inputs`.
        """

    def ungrouped_outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """The same where dimension 0 is not the batch: each position counts as a sample."""
        return self.outputs(grad, args)

    # --- the gradient matrix, of which a ParameterView reads and writes the tensors --------------

    def gradient(self) -> Tensor:
        """The gradient matrix ``V`` of whole parameters, to compare rows with: ``V = Σ g aᵀ``."""
        return ParameterView(self).gradient()

    def matrix_dim(self, dim: int) -> int | None:
        """The dimension of the matrix, ``-2`` or ``-1``, in which a dimension of the weight lies.

        A chunk of the weight is then that chunk of the matrix. ``None`` if it is not.
        """
        return None

    def _own_bias(self, bias: Tensor) -> Tensor:
        """The part of a bias-shaped tensor that belongs to this layer, as a view."""
        return bias

    @abstractmethod
    def _weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight as a matrix, ``(*b, d_out, d_in)`` without the bias."""

    def as_matrix(self, tensor: Tensor) -> Tensor:
        """The layer's part of a tensor that is shaped as its weight, as a matrix without the bias."""
        return self._to_matrix(tensor)

    @abstractmethod
    def _to_matrix(self, grad: Tensor) -> Tensor:
        """View the weight's gradient as a matrix."""

    def _weight_place(self, grad: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A view of the weight's gradient, and the matrix in its shape."""
        return self._to_matrix(grad), matrix
