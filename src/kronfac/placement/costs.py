"""The work of a model in numbers: all that placement, fusion and planning know about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StatisticUnit:
    """A statistic that is added over ranks.

    Args:
        key: ``"<layer>/<statistic>"``.
        elements: how many numbers of it are sent (one triangle if it is symmetric).
        itemsize: bytes of each.
        times: how often it is added up in one refresh interval; 0 if it never travels.
    """

    key: str
    elements: int
    itemsize: int = 4
    times: float = 1.0

    @property
    def bytes(self) -> int:
        """Bytes that are sent."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class PartUnit:
    """A part of a layer's solution that can be solved on its own.

    Args:
        name: the part's name within its layer.
        statistics: keys of the statistics that it is solved from.
        flops: operations to solve it.
        solution_elements: size of its solution.
        shared_flops: if several ranks can solve it together, the operations that each of them repeats;
            the rest is divided. ``None`` if it cannot be divided.
        times: how often it is solved in one refresh interval.
        by_each: whether every rank that works on the layer solves it itself.
    """

    name: str
    statistics: tuple[str, ...]
    flops: int
    solution_elements: int
    shared_flops: int | None = None
    times: float = 1.0
    by_each: bool = False


@dataclass(frozen=True)
class LayerUnit:
    """One layer.

    Args:
        name: the layer's name, unique in the model.
        statistics: what is observed.
        parts: what is solved.
        precondition_flops: operations to apply the solution and make the step orthogonal, at every step.
        gradient_elements: size of its gradient.
        itemsize: bytes of each number of solution and gradient.
        tied_to: name of the first layer whose parameters it shares (itself if none). Such layers
            must have one owner where parameters have owners.
        beside: name of the layer whose input it shares, which the same ranks work on.
        sliced: whether all ranks work on it, each on its slice of the gradient, which then does not
            travel.
    """

    name: str
    statistics: tuple[StatisticUnit, ...]
    parts: tuple[PartUnit, ...]
    precondition_flops: int
    gradient_elements: int
    itemsize: int = 4
    tied_to: str = ""
    beside: str = ""
    sliced: bool = False

    @property
    def solution_bytes(self) -> int:
        """Bytes of the whole solution."""
        return sum(part.solution_elements for part in self.parts) * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.gradient_elements * self.itemsize


@dataclass(frozen=True)
class Link:
    """The time that a message of ``m`` bytes takes: ``latency + m·seconds_per_byte``.

    ``seconds_per_byte`` is the inverse of the bandwidth from one rank to another.
    """

    latency: float = 5e-5
    seconds_per_byte: float = 1e-10

    def all_reduce(self, size: int, ranks: int) -> float:
        """Ring: every rank sends ``2(P-1)/P·m``."""
        return self._time(size * 2 * (ranks - 1) / ranks, ranks)

    def reduce(self, size: int, ranks: int) -> float:
        """Every rank sends ``m``."""
        return self._time(size, ranks)

    def broadcast(self, size: int, ranks: int) -> float:
        """Every rank forwards ``m``."""
        return self._time(size, ranks)

    def _time(self, sent: float, ranks: int) -> float:
        return 0.0 if ranks == 1 or sent == 0 else self.latency + sent * self.seconds_per_byte


@dataclass(frozen=True)
class Compute:
    """The time that operations take on one rank."""

    solve_flops_per_second: float = 2e10
    product_flops_per_second: float = 1e11
    overhead: float = 2e-5

    def solve(self, flops: float) -> float:
        """Seconds of a decomposition or inverse."""
        return self.overhead + flops / self.solve_flops_per_second if flops else 0.0

    def product(self, flops: float) -> float:
        """Seconds of matrix products."""
        return self.overhead + flops / self.product_flops_per_second if flops else 0.0
