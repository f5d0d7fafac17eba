"""Kronecker factors of which some statistics need both sides of the same rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.methods.kfac.block import KFACBlock
from kronfac.protocol.block import NOTHING, Context, Tensors

#: How many numbers of rows, or of per-sample gradients, are in memory at once.
CHUNK = 1 << 22


class PairedBlock(KFACBlock):
    """K-FAC that looks at both sides of a few samples at a time, so that memory stays bounded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.leaves_out = "nothing"

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        """See :meth:`Block.observe_pair`."""
        if inputs.positions != outputs.positions:
            return {}  # one of several uses of the layer had no part in the loss
        found: dict[str, Tensor] = {}
        for some_inputs, some_outputs in self._chunks(inputs, outputs):
            a, g = some_inputs.dense(), some_outputs.dense()
            for name, value in self.observe_rows(a, g, context.solution).items():
                found[name] = found[name].add_(value) if name in found else value
        return found

    def observe_rows(self, a: Tensor, g: Tensor, solution: Tensors | None) -> dict[str, Tensor]:
        """Contributions of rows ``a: [*b, n, S, d_in]`` and ``g: [*b, n, S, d_out]`` of samples."""
        return {}

    def _chunks(self, inputs: Rows, outputs: Rows) -> Iterator[tuple[Rows, Rows]]:
        *batch, d_out, d_in = self.shape
        rows = inputs.positions * (d_in + d_out)
        largest = rows if inputs.positions == 1 else max(rows, d_out * d_in)
        return chunks(inputs, outputs, math.prod(batch) * largest)


def chunks(inputs: Rows, outputs: Rows, numbers: int) -> Iterator[tuple[Rows, Rows]]:
    """Both sides of a few samples at a time, each of which takes so many numbers."""
    size = max(1, CHUNK // max(1, numbers))
    for start in range(0, inputs.samples, size):
        stop = min(start + size, inputs.samples)
        yield inputs.part(start, stop), outputs.part(start, stop)
