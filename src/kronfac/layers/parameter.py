"""Parameters whose products nobody sees: they have no curvature, but steps of the right length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from kronfac.layers.layer import Layer
from kronfac.layers.rows import Rows

_PICKED = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
#: Matrices with a longer side are tables, of which each column is a step of its own.
_LONGEST = 8192

#: Blocks ``[k, m, n]`` of a tensor, and whether matrices are these the other way round.
_Form = tuple[tuple[int, int, int], bool]


class ParameterLayer(Layer):
    """One parameter of a module, with its gradient as the matrix that it most likely is.

    - weights of linear layers and convolutions: as theirs
    - recurrent weights: a matrix for each gate
    - transposed convolutions: ``[out·taps, in]`` for each group
    - embeddings that are not observed, and tables with a side above 8,192: a column for each token
    - otherwise, dimensions of size 1 left out: two are a matrix, three a batch of matrices (experts),
      more those of a convolution, and one or none are entries that scale or shift something

    Where it is not known which side of a matrix is the input's, it is taken to be the longer one, with
    which steps are shorter.

    Args:
        name: the parameter's full name.
        module: the module that has it.
        parameter: its name there.
        host: the module that it is part of: the one that is parametrized, otherwise the same.
        role: name of the tensor there that it makes, otherwise the same.
        beside: weights with which it is in a layer's matrix once one of them is trained.
    """

    is_observed = False

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameter: str,
        host: nn.Module | None = None,
        role: str = "",
        beside: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(name, module, weight_name=parameter, bias_name="")
        self.host, self.role, self.beside = host or module, role or parameter, beside
        sizes = [size for size in self.weight.shape if size != 1]
        self.unit_wise = len(sizes) < 2
        known = None if self.unit_wise else self._known_form()
        picked = isinstance(self.host, _PICKED) or (
            known is None and max(sizes, default=0) > _LONGEST
        )
        self.picks_columns = picked and len(sizes) == 2
        self._blocks, self._turned = known or self._guessed_form(sizes)

    @property
    def is_trained(self) -> bool:
        """See :attr:`Layer.is_trained`."""
        return super().is_trained and not any(weight.requires_grad for weight in self.beside)

    @property
    def kind(self) -> str:
        """See :attr:`Layer.kind`."""
        return "Parameter"

    def inputs(self, args: tuple[Any, ...]) -> Rows | None:
        """Nothing is observed."""
        return None

    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """Nothing is observed."""
        raise NotImplementedError(f"{self.name!r} has no rows")

    def _known_form(self) -> _Form | None:
        """How the module that it is part of uses it, if it looks like that module's weight."""
        host, shape = self.host, self.weight.shape
        first, rest = shape[0], math.prod(shape[1:])
        if isinstance(host, _PICKED):
            return (1, first, rest), True
        if isinstance(host, nn.Linear):
            return ((1, first, rest), False) if len(shape) == 2 else None
        if isinstance(host, _RECURRENT):
            hidden = int(host.hidden_size)
            stacked = self.role.startswith(("weight_ih", "weight_hh")) and first % hidden == 0
            gates = first // hidden if stacked else 1
            return (gates, first // gates, rest), False
        if isinstance(host, _ConvNd):
            turned = isinstance(host, _ConvTransposeNd)
            own = host.in_channels if turned else host.out_channels
            if len(shape) == len(host.kernel_size) + 2 and first == own:
                return (host.groups, first // host.groups, rest), turned
        return None

    def _guessed_form(self, sizes: Sequence[int]) -> _Form:
        total = math.prod(sizes)
        if self.unit_wise:
            return (total, 1, 1), False
        if len(sizes) > 3:
            return (1, sizes[0], total // sizes[0]), False
        rows, columns = sizes[-2:]
        return (total // (rows * columns), rows, columns), rows > columns

    def _weight_shape(self) -> tuple[int, ...]:
        count, rows, columns = self._blocks
        shape = (columns, rows) if self._turned else (rows, columns)
        return (count, *shape) if count > 1 or self.unit_wise else shape

    def _to_matrix(self, grad: Tensor) -> Tensor:
        blocks = grad.reshape(self._blocks)
        return (blocks.mT if self._turned else blocks).reshape(self._weight_shape())

    def _weight_place(self, grad: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return grad, (matrix.mT if self._turned else matrix).reshape(grad.shape)
