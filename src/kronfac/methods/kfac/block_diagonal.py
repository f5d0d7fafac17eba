"""K-FAC whose wide sides keep diagonal blocks only.

In most linear layers of a transformer one side is three or four times as wide as the other (queries,
keys and values together; the hidden units of an MLP). A second moment of width ``k·d`` takes ``k²`` times
the operations of one of width ``d``, and its decomposition ``k³`` times. Cut into ``k`` blocks of width
``d``, of which each is decomposed by itself, both take ``k`` times. What is left out is the correlation
of units in different blocks. The constant input of a bias is a block of its own: its second moment is 1.

With ``A = diag(A_1, …, A_k)`` all of the eigen form stays as it is: eigenvectors are ``[k, d, d]`` and
eigenvalues stand one block after the other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.rows import DenseRows, Rows
from kronfac.linalg.narrow import matmul
from kronfac.linalg.precision import full_precision
from kronfac.linalg.solve import eigen, eigen_batch
from kronfac.methods.kfac.block import EIGEN_MAX_WIDTH, KFACBlock
from kronfac.protocol.block import NOTHING, Context, Cost, Given, Tensors

BlockDim = int | None | Literal["auto"]
#: Numbers of blocks of the sides that are cut, by side.
Pieces = Mapping[str, int]

#: ``block_dim="auto"`` cuts sides from this width on, that are so many times as wide as the other side,
#: at least and at most, if that is no narrower than this, and no wider than what is decomposed. Still
#: wider sides belong to layers that read flattened maps, or to heads of few classes: what they know of
#: their inputs is worth its price there.
LEAST_CUT, LEAST_RATIO, MOST_RATIO, LEAST_OTHER = 256, 2.5, 6, 128
#: Widths of blocks are multiples of this, which products are fast at, and differ from that of the other
#: side by no more than this factor.
MULTIPLE, MOST_UNLIKE = 16, 1.5


def pieces_of(layer: Layer, block_dim: BlockDim, max_dim: int) -> dict[str, int]:
    """Into how many blocks the sides of a layer are cut; those that are not are missing."""
    if block_dim is None or not layer.has_units or layer.picks_columns:
        return {}
    if len(layer.matrix_shape) > 2:
        return {}
    d_out, d_in = layer.matrix_shape[-2:]
    widths = {"A": d_in - layer.bias_trains, "G": d_out}
    found = {}
    for side, width in widths.items():
        if block_dim == "auto":
            count = _natural(width, min(widths.values())) if width <= max_dim else 1
        else:
            count = _least(width, block_dim)
        if count > 1:
            found[side] = count
    return found


def _natural(width: int, other: int) -> int:
    """Blocks that are about as wide as the other side, if there are equal ones and they save much."""
    if width < LEAST_CUT or not LEAST_OTHER <= other <= EIGEN_MAX_WIDTH:
        return 1
    if not LEAST_RATIO <= width / other <= MOST_RATIO:
        return 1
    counts = [n for n in range(1, width // MULTIPLE + 1) if width % (n * MULTIPLE) == 0]
    counts = [n for n in counts if width <= n * EIGEN_MAX_WIDTH]
    unlike = {n: max(width / n / other, other * n / width) for n in counts}
    best = min(unlike, key=unlike.__getitem__, default=1)
    return best if unlike.get(best, math.inf) <= MOST_UNLIKE else 1


def _least(width: int, block_dim: int) -> int:
    """The fewest equal blocks that are no wider; one if they were less than a quarter as wide."""
    for count in range(-(-width // block_dim), 4 * width // block_dim + 1):
        if width % count == 0:
            return count
    return 1


class BlockDiagonalBlock(KFACBlock):
    """The curvature of one linear layer of which a side, or both, is cut into equal blocks."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        pieces: Pieces,
        bias: bool,
        **common: Any,
    ) -> None:
        super().__init__(shape, dtype, solver="eigen", cut=frozenset(pieces), **common)
        self.pieces = dict(pieces)
        #: Whether the last column of the gradient is a bias whose input is a block of its own.
        self.bias = bias and "A" in pieces
        for side, count in self.pieces.items():
            width = (self.widths[side] - (self.bias and side == "A")) // count
            blocks = (count, width, width)
            one = replace(self.statistics[side], shape=blocks)
            self.statistics = {**self.statistics, side: one}
            self.solution_shapes = {**self.solution_shapes, f"{side}.vectors": blocks}
        self.widest = max(one.shape[-1] for one in self.statistics.values())
        cut = [f"{side} in {count} blocks" for side, count in self.pieces.items()]
        self.label = ", ".join([self.label, *cut])

    # --- observing ------------------------------------------------------------------------------

    @property
    def input_key(self) -> Hashable:
        """See :attr:`Block.input_key`: a side that is not cut is that of other blocks."""
        if self.holds_rows:
            return None
        return KFACBlock, self.statistics["A"], self.dtype, True

    @property
    def input_moment(self) -> str | None:
        """See :attr:`Block.input_moment`."""
        return None if self.holds_rows or "A" in self.pieces else super().input_moment

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        return super().observe_input(self._cut("A", inputs), context)

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return super().observe_output(self._cut("G", outputs), context)

    def _cut(self, side: str, rows: Rows) -> Rows:
        """Rows of the blocks, ``[k, N, S, d]``, without a view of the constant input."""
        if side not in self.pieces:
            return rows
        whole = rows.rows if isinstance(rows, DenseRows) else rows.dense()
        count, width, _ = self.statistics[side].shape
        features = whole[..., : count * width]
        return DenseRows(features.unflatten(-1, (count, width)).movedim(-2, 0))

    # --- solving --------------------------------------------------------------------------------

    def solve_key(self, part: str) -> Hashable:
        """See :meth:`Block.solve_key`."""
        known = super().solve_key(part)
        return (known, self.bias and part == "A") if part in self.pieces else known

    def batch_key(self, part: str) -> Hashable:
        """See :meth:`Block.batch_key`."""
        return self.solve_key(part)

    def solve_batch(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve_batch`."""
        if part not in self.pieces:
            return super().solve_batch(part, given)
        return self._named(part, eigen_batch(given.means[part]))

    def _decompose(self, side: str, mean: Tensor) -> dict[str, Tensor] | None:
        if side not in self.pieces:
            return super()._decompose(side, mean)
        return self._named(side, eigen(mean))

    def _named(self, side: str, solved: tuple[Tensor, Tensor] | None) -> dict[str, Tensor] | None:
        """Eigenvectors ``[*n, k, d, d]`` and eigenvalues, those of all blocks in one dimension."""
        if solved is None:
            return None
        vectors, values = solved[0], solved[1].flatten(-2)
        if self.bias and side == "A":
            values = torch.cat([values, values.new_ones(*values.shape[:-1], 1)], -1)
        return {f"{side}.vectors": vectors, f"{side}.values": values}

    # --- applying -------------------------------------------------------------------------------

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return super().signature, *self.pieces.items(), self.bias

    @full_precision
    def _turn(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`KFACBlock._turn`."""
        rotate_in, rotate_out = solution.get("A.vectors"), solution.get("G.vectors")
        turned = matrix if rotate_out is None else self._left(rotate_out.mT, matrix)
        return turned if rotate_in is None else self._right(turned, rotate_in)

    def _turn_back(self, solution: Tensors, turned: Tensor, rounded: bool = False) -> Tensor:
        """See :meth:`KFACBlock._turn_back`."""
        rotate_in, rotate_out = solution.get("A.vectors"), solution.get("G.vectors")
        if rotate_in is not None:
            turned = self._right(turned, rotate_in.mT, rounded)
        return turned if rotate_out is None else self._left(rotate_out, turned, rounded)

    def _left(self, blocks: Tensor, matrix: Tensor, rounded: bool = False) -> Tensor:
        """The product of the output side's rotation and a matrix ``[*n, d_out, d_in]``."""
        if "G" not in self.pieces:
            return matmul(blocks, matrix, rounded)
        rows = matrix.unflatten(-2, blocks.shape[-3:-1])
        return matmul(blocks, rows, rounded).flatten(-3, -2)

    def _right(self, matrix: Tensor, blocks: Tensor, rounded: bool = False) -> Tensor:
        """The product of a matrix and the input side's rotation, which leaves a bias as it is."""
        if "A" not in self.pieces:
            return matmul(matrix, blocks, rounded)
        count, width = blocks.shape[-3:-1]
        columns = matrix[..., : count * width].unflatten(-1, (count, width)).movedim(-2, -3)
        turned = torch.empty_like(matrix)
        places = turned[..., : count * width].unflatten(-1, (count, width)).movedim(-2, -3)
        places.copy_(matmul(columns, blocks, rounded))
        if self.bias:
            turned[..., -1] = matrix[..., -1]
        return turned

    # --- cost -----------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`: blocks turn the rows, or columns, that they have."""
        whole = super().cost
        saved = sum(
            4 * math.prod(self.shape) * (self.widths[side] - self.statistics[side].shape[-1])
            for side in self.pieces
        )
        return replace(whole, precondition_flops=whole.precondition_flops - saved)

    def _cubes(self, side: str) -> int:
        """Operations to solve a side."""
        if side not in self.pieces:
            return super()._cubes(side)
        count, width, _ = self.statistics[side].shape
        return 9 * count * width**3
