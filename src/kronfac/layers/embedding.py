"""nn.Embedding: a linear layer on one-hot rows, whose input factor is diagonal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from kronfac.layers.linear import TransposedLinearLayer
from kronfac.layers.rows import DenseRows, Rows, TokenRows


class EmbeddingLayer(TransposedLinearLayer):
    """The weight is ``[tokens, width]``; padding tokens have no gradient and do not count as rows."""

    module: nn.Embedding
    picks_columns = True
    keeps_inputs = True

    @property
    def geometry(self) -> Hashable:
        """See :attr:`Layer.geometry`."""
        return self.module.padding_idx

    def inputs(self, args: tuple[Any, ...]) -> Rows:
        """See :meth:`Layer.inputs`."""
        module = self.module
        return TokenRows(args[0], module.num_embeddings, module.padding_idx, self.factor_dtype)

    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """See :meth:`Layer.outputs`."""
        padding = self.module.padding_idx
        if padding is not None:
            grad = grad.masked_fill((args[0] == padding)[..., None], 0)
        return DenseRows(self.rows(grad))
