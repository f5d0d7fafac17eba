"""What methods that keep exact per-sample gradients have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kronfac.layers import Layer
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.methods.sample_space.block import SampleBlock, UngroupedBlock
from kronfac.methods.sample_space.gradients import Keeping, SampleGradients, exact_gradients
from kronfac.options.config import Options, check_choice, check_count
from kronfac.protocol.block import Block
from kronfac.protocol.method import Method

#: Bytes of rows that one layer may keep until the step, unless the user says otherwise.
MAX_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class PerSampleMethod(Method):
    """Norms keep K-FAC's unit-wise Fisher, and embeddings are not preconditioned."""

    #: The block of a layer that multiplies by a matrix.
    made: ClassVar[type[SampleBlock]]
    #: Whether the gradients have to be those of the loss.
    of_the_loss: ClassVar[bool] = False

    keep: Keeping = "auto"
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, ("auto", "rows", "gradients"))
        check_count("max_bytes", self.max_bytes)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward" or (self.of_the_loss and options.fisher != "empirical"):
            supported = "'empirical'" if self.of_the_loss else "'empirical', 'mc' or 'exact'"
            raise ValueError(
                f"{self.name} is made of the gradients of each sample, which fisher={options.fisher!r} "
                f"does not observe; choose {supported}."
            )

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        return refuse_embeddings(layer)

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        if layer.unit_wise:
            return UnitWiseBlock(layer.matrix_shape, layer.factor_dtype, per_sample=grouped)
        gradients = exact_gradients(layer, self.keep)
        return self.matrix_block(layer, gradients) if grouped else UngroupedBlock(layer, gradients)

    def matrix_block(self, layer: Layer, gradients: SampleGradients) -> SampleBlock:
        """The block of a layer that multiplies by a matrix."""
        return self.made(layer, gradients, self.max_bytes)


def refuse_embeddings(layer: Layer) -> str | None:
    """Say why an embedding is not preconditioned; nothing for other layers."""
    if layer.picks_columns:
        return "its rows are one-hot, as wide as the vocabulary, and would be kept for every token"
    return None
