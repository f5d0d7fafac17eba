"""Rules that change a gradient after clipping and before it is preconditioned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from kronfac.layers import Layer
from kronfac.protocol.block import Tensors


class Transform(ABC):
    """One such rule. It keeps named tensors for each layer, which are saved and moved with the layer."""

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what is kept for a layer; names differ from those of other rules."""
        return {}

    @abstractmethod
    def __call__(
        self, gradient: Tensor, buffers: dict[str, Tensor], solution: Tensors | None, step: int
    ) -> Tensor:
        """Return what takes the place of a gradient matrix ``[*b, d_out, d_in]``.

        ``buffers`` are the layer's own, to be changed in place, and empty before the first call;
        ``solution`` is the one in use, ``None`` before the first.
        """
