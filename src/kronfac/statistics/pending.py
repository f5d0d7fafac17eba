"""Running averages as (sum, count) pairs, and what has been observed since the last step.

Sums and counts add, over calls, micro-batches, steps and ranks, so that accumulation and deferral are
exact by construction. Nothing here reads a number back from the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.layers.rows import DenseRows, Rows
from kronfac.protocol.block import Block, Statistic, Tensors


class Pass:
    """One outermost forward: its number of samples, and of loss terms once that is known."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.terms: Tensor | None = None
        #: Dimensions and width of scores whose gradient is seen at the product that made them only.
        self.hidden_scores: tuple[int, int] | None = None

    def count_terms(self, grad: Tensor) -> None:
        """Loss terms are the output positions that receive a gradient: masked ones receive none."""
        self.terms = (grad.detach() != 0).any(-1).sum(dtype=count_dtype(grad.device))
        self.hidden_scores = None

    def see_scores(self, dims: int, width: int, grad: Tensor | None) -> None:
        """The gradient of the scores; ``None`` if it stays in a graph, since the loss is there too."""
        if grad is None:
            self.hidden_scores = (dims, width)
        else:
            self.count_terms(grad)

    def count_hidden_terms(self, grad: Tensor) -> None:
        """The same for a product's output, if that is what the scores are: the last one comes first."""
        if self.hidden_scores == (grad.dim(), grad.shape[-1]):
            self.count_terms(grad)


class Running:
    """A decayed ``(sum, count)`` pair, used as ``sum/count``.

    Decay stops before a count gets so small that the sum would underflow: the mean of a layer that is
    not observed for a long time stays its last mean.
    """

    def __init__(self, statistic: Statistic) -> None:
        self.statistic = statistic
        self.sum: Tensor | None = None
        self.count: Tensor | None = None
        #: Whether something was observed since the last refresh, and (for occurrences) the share of
        #: one row among those of the last refresh at which that was so.
        self.fresh = False
        self.row_share = 0.0

    def decay(self, decay: float) -> None:
        """Let the past fade; a step that contributes nothing does only this."""
        if self.sum is None or self.count is None or self.statistic.combine == "gather":
            return
        factor, occurred = self._fading(decay), self._occurred()
        _above_zero(self.sum.mul_(factor), occurred)
        self.count.mul_(factor)

    def faded(self, decay: float) -> Running:
        """What :meth:`decay` would leave, in tensors of its own."""
        left = Running(self.statistic)
        if self.sum is not None and self.count is not None:
            factor = self._fading(decay)
            left.sum = _above_zero(self.sum * factor, self._occurred())
            left.count = self.count * factor
        return left

    def _fading(self, decay: float) -> Tensor:
        assert self.sum is not None
        assert self.count is not None
        return (_least_count(self.sum.dtype) / self.count).clamp(max=1).clamp(min=decay)

    def _occurred(self) -> Tensor | None:
        """What has ever occurred, where that matters."""
        assert self.sum is not None
        return self.sum > 0 if self.statistic.occurrences else None

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add a contribution; gathered rows replace the old ones."""
        self.fresh = True
        if self.sum is None or self.count is None or self.statistic.combine == "gather":
            self.sum, self.count = total, count.clone()  # several statistics share one count
        else:
            self.sum.add_(total)
            self.count.add_(count)

    def mean(self) -> Tensor | None:
        """The mean, or ``None`` when nothing has been counted (reads the count)."""
        if self.sum is None or self.count is None:
            return None
        count = float(self.count)
        return self.mean_of(self.sum, count) if count > 0 else None

    def mean_of(self, total: Tensor, count: float) -> Tensor:
        """The mean for a sum over all ranks and its count; gathered rows as they are."""
        if self.statistic.combine == "gather":
            return total
        mean = total / count
        if not self.statistic.occurrences:
            return mean
        self.agree(count, self.fresh)
        return mean.clamp_(min=self.row_share).mul_(total > 0)

    def agree(self, count: float, fresh: bool) -> None:
        """Take note of the count over all ranks, and whether any of them has observed something."""
        self.fresh = fresh
        if fresh and count > 0:
            self.row_share = 1 / count

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make empty tensors of the final shapes, for loaders that fill what exists."""
        if self.sum is None and self.statistic.combine == "sum":
            self.sum = torch.zeros(self.statistic.shape, dtype=dtype, device=device)
            self.count = new_count(0.0, device)


def _above_zero(total: Tensor, where: Tensor | None) -> Tensor:
    """Keep from underflow, in place, what must not be mistaken for nothing."""
    if where is None:
        return total
    return total.clamp_(min=torch.finfo(total.dtype).tiny).mul_(where)


def _least_count(dtype: torch.dtype) -> float:
    """Where decay stops: nothing beside new data, and far from the smallest number of the precision."""
    return 2.0**-200 if dtype == torch.float64 else 2.0**-30


def count_dtype(device: torch.device) -> torch.dtype:
    """Counts go further than single precision can, where the device allows it."""
    return torch.float32 if device.type == "mps" else torch.float64


def new_count(value: float, device: torch.device) -> Tensor:
    """A scalar that counts."""
    return torch.full((), value, dtype=count_dtype(device), device=device)


_generations = itertools.count()


@dataclass
class Summed:
    """Output gradients of inputs that stand for all samples, added up over the calls of a step."""

    rows: Tensor
    share: float
    passes: dict[Pass, None]


class Pending:
    """What one layer has observed since the last step."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.sums: dict[str, Tensor] = {}
        self.rows: Tensor | None = None
        self.finite: dict[Pass, Tensor] = {}
        self.held_inputs: dict[Pass, tuple[Tensor, int]] = {}
        self.held_outputs: dict[tuple[Pass, int], tuple[Tensor, float]] = {}
        #: Rows by draw, and what they contribute once they are added up over ranks.
        self.summed: dict[int, Summed] = {}
        self.shared_sums: dict[str, Tensor] = {}
        self.shared_count: Tensor | None = None
        self.gradients: Tensor | None = None
        self.dropped: Tensor | None = None
        self.calls = 0
        #: How often each side has been observed since it was last cleared, and a number of that time.
        self.versions = {"input": 0, "output": 0, "gradient": 0}
        self.generations = dict.fromkeys(self.versions, next(_generations))

    @property
    def empty(self) -> bool:
        """Whether neither side has observed anything."""
        return not self.has_inputs and not self.has_outputs

    @property
    def has_inputs(self) -> bool:
        """Whether the input side has observed anything."""
        return self.rows is not None or bool(self.held_inputs)

    @property
    def has_outputs(self) -> bool:
        """Whether the output side has observed anything."""
        return bool(self.finite or self.held_outputs or self.summed)

    @property
    def summed_size(self) -> int:
        """How many numbers :attr:`summed` holds."""
        return sum(one.rows.numel() for one in self.summed.values())

    def add_input(self, contributions: Mapping[str, Tensor], rows: int | Tensor) -> None:
        """Add one call's input side; a non-finite one is dropped and counted."""
        if not contributions:
            return
        self.versions["input"] += 1
        finite = self._screen(contributions)
        self._accumulate(contributions)
        counted = finite.to(count_dtype(finite.device)) * rows
        self.rows = counted if self.rows is None else self.rows + counted

    def add_output(
        self, contributions: Mapping[str, Tensor], forward_pass: Pass, share: float = 1.0
    ) -> None:
        """Add one call's output side, weighted; a non-finite one is dropped and counted."""
        if not contributions:
            return
        self.versions["output"] += 1
        if share != 1:
            for name, value in contributions.items():
                gathered = self.block.statistics[name].combine == "gather"
                value.mul_(math.sqrt(share) if gathered else share)
        finite = self._screen(contributions)
        self._accumulate(contributions)
        before = self.finite.get(forward_pass)
        self.finite[forward_pass] = finite if before is None else before | finite

    def add_gradient(self, contributions: Mapping[str, Tensor]) -> None:
        """Add what the gradient matrix of this step shows."""
        if not contributions:
            return
        # They may be the gradient itself, which is overwritten in this step.
        contributions = {name: value.clone() for name, value in contributions.items()}
        finite = self._screen(contributions)
        self.gradients = finite.to(count_dtype(finite.device))
        self._accumulate(contributions)

    def hold_input(self, rows: Rows, forward_pass: Pass) -> None:
        """Keep rows until the step: summed over positions, of all uses in a pass, or side by side."""
        before = self.held_inputs.get(forward_pass)
        if self.block.keeps == "dense":
            kept = rows.dense()
            kept = kept if before is None else torch.cat([before[0], kept], dim=-2)
            self.held_inputs[forward_pass] = (kept, 1)
            return
        kept, positions = rows.summed(), rows.positions
        if before is not None:
            kept, positions = before[0] + kept, before[1] + positions
        self.held_inputs[forward_pass] = (kept, positions)

    def hold_output(self, rows: Rows, forward_pass: Pass, draw: int, share: float) -> None:
        """The same for output rows; several backward passes of one draw add up."""
        key = (forward_pass, draw)
        before = self.held_outputs.get(key)
        kept = rows.dense() if self.block.keeps == "dense" else rows.summed()
        if before is not None and self.block.keeps == "dense":
            inputs = self.held_inputs.get(forward_pass)
            if inputs is not None and before[0].shape[-2] < inputs[0].shape[-2]:
                # The uses of a pass come back in the opposite order.
                self.held_outputs[key] = (torch.cat([kept, before[0]], dim=-2), share)
                return
        self.held_outputs[key] = (kept if before is None else before[0] + kept, share)

    def hold_summed(self, rows: Tensor, forward_pass: Pass, draw: int, share: float) -> bool:
        """Add rows ``[*b, 1, S, d]`` to those of other calls; false if these are of another size."""
        before = self.summed.get(draw)
        if before is None:
            self.summed[draw] = Summed(rows, share, {forward_pass: None})
            return True
        if before.rows.shape != rows.shape:
            return False
        before.rows = before.rows + rows
        before.passes[forward_pass] = None
        return True

    def release_inputs(self, solution: Tensors | None) -> None:
        """Turn held input rows of all passes but the newest into contributions."""
        for forward_pass in list(self.held_inputs)[:-1]:
            rows = self._input_rows(forward_pass)
            self.add_input(self.block.observe_input(rows, solution), rows.count)
            del self.held_inputs[forward_pass]

    def _input_rows(self, forward_pass: Pass) -> DenseRows:
        rows, positions = self.held_inputs[forward_pass]
        return self._held(rows if positions == 1 else rows / positions)

    def _held(self, rows: Tensor) -> DenseRows:
        return DenseRows(rows if self.block.keeps == "dense" else rows.unsqueeze(-2))

    def settle(self, solution: Tensors | None) -> None:
        """Turn held rows into contributions."""
        inputs = {forward_pass: self._input_rows(forward_pass) for forward_pass in self.held_inputs}
        for rows in inputs.values():
            self.add_input(self.block.observe_input(rows, solution), rows.count)
        for (forward_pass, _), (held, share) in self.held_outputs.items():
            outputs = self._held(held)
            found = self.block.observe_output(outputs, solution)
            if forward_pass in inputs:
                found |= self.block.observe_pair(inputs[forward_pass], outputs, solution)
            self.add_output(found, forward_pass, share)
        self.held_inputs.clear()
        self.held_outputs.clear()

    def contribution(
        self, name: str, normalizer: Normalizer | None, in_place: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """What this step adds to a statistic's sum and count, if anything.

        ``in_place`` uses up what is pending. Output statistics need the normaliser; one that would
        overflow is dropped.
        """
        total, statistic = self.sums.get(name), self.block.statistics[name]
        if name in self.shared_sums and self.shared_count is not None:
            return self._with_shared(name, normalizer)
        if total is None:
            return None
        if statistic.source == "input":
            return None if self.rows is None else (total, self.rows)
        if statistic.source == "gradient":
            return None if self.gradients is None else (total, self.gradients)
        if normalizer is None or not self.finite:
            return None
        scale = normalizer.scale(statistic.degree)
        fits = self._size(name, total).abs() * scale < torch.finfo(total.dtype).max * 2.0**-16
        kept = fits.to(total.dtype) * scale
        count = normalizer.count(self.finite) * fits
        if in_place and self.dropped is not None:
            self.dropped = self.dropped + ~fits
        return (total.mul_(kept) if in_place else total * kept), count

    def _with_shared(self, name: str, normalizer: Normalizer | None) -> tuple[Tensor, Tensor]:
        assert self.shared_count is not None
        total, count = self.shared_sums.pop(name), self.shared_count
        own = self.contribution(name, normalizer)
        return (total, count) if own is None else (total + own[0], count + own[1])

    def _size(self, name: str, value: Tensor) -> Tensor:
        """A number that bounds a contribution: a second moment bounds its entries by its trace."""
        if self.block.statistics[name].symmetric:
            return value.diagonal(dim1=-2, dim2=-1).sum()
        return value.sum()

    def divide_outputs(self, scale: Tensor) -> None:
        """Take a factor out of the output gradients that have been observed so far."""
        self.versions["output"] += 1
        for name, statistic in self.block.statistics.items():
            if statistic.source == "output" and name in self.sums:
                total = self.sums[name]
                for _ in range(statistic.degree):
                    total.div_(scale.to(total.device, total.dtype))
        for key, (rows, share) in self.held_outputs.items():
            self.held_outputs[key] = (rows / scale.to(rows.device, rows.dtype), share)
        for one in self.summed.values():
            one.rows = one.rows / scale.to(one.rows.device, one.rows.dtype)

    def clear_outputs(self) -> None:
        """Forget the output side, as ``zero_grad`` forgets gradients."""
        self.versions["output"] = 0
        self.generations["output"] = next(_generations)
        self.finite.clear()
        self.held_outputs.clear()
        self.summed.clear()
        self.shared_sums.clear()
        self.shared_count = None
        for name, statistic in self.block.statistics.items():
            if statistic.source == "output":
                self.sums.pop(name, None)

    def clear(self) -> None:
        """Forget both sides."""
        self.clear_outputs()
        self.sums.clear()
        self.held_inputs.clear()
        self.rows = self.gradients = None
        self.calls = 0
        self.versions["input"] = self.versions["gradient"] = 0
        self.generations["input"] = next(_generations)

    def _accumulate(self, contributions: Mapping[str, Tensor]) -> None:
        for name, value in contributions.items():
            before = self.sums.get(name)
            if before is None:
                self.sums[name] = value
            elif self.block.statistics[name].combine == "gather":
                self.sums[name] = torch.cat([before, value], dim=-2)
            else:
                before.add_(value)

    def _screen(self, contributions: Mapping[str, Tensor]) -> Tensor:
        """Zero contributions that are not finite and return, on the device, whether they were."""
        finite: Tensor | None = None
        for name, value in contributions.items():
            ok = torch.isfinite(self._size(name, value))
            finite = ok if finite is None else finite & ok
        assert finite is not None
        bad = ~finite
        for value in contributions.values():
            value.masked_fill_(bad, 0)
        self.dropped = bad.to(torch.int64) if self.dropped is None else self.dropped + bad
        return finite


class Normalizer:
    """N of the whole step: what the loss was divided by, and how much of it each layer saw."""

    def __init__(
        self, passes: Iterable[Pass], loss_average: str | float | None, unscaled: bool
    ) -> None:
        self.passes = list(passes)
        self.loss_average = loss_average
        self.unscaled = unscaled
        self._total = sum((self._weight(forward_pass) for forward_pass in self.passes), start=0.0)

    def _weight(self, forward_pass: Pass) -> float | Tensor:
        if self.loss_average == "token":
            if forward_pass.terms is None:
                raise RuntimeError(
                    "loss_average='token' could not count the loss terms: the model's own forward was "
                    "not called, or no output of it received a gradient. Call the model as a whole, or "
                    "give the number that the loss was divided by."
                )
            return forward_pass.terms
        return float(forward_pass.samples)

    @property
    def samples(self) -> float | Tensor:
        """``N``."""
        if self.loss_average is None:
            return 1.0
        if isinstance(self.loss_average, str):
            return self._total
        return float(self.loss_average)

    def scale(self, degree: int) -> float | Tensor:
        """Factor that turns sums of loss gradients into sums of per-sample gradients."""
        return 1.0 if self.unscaled else self.samples**degree

    def count(self, finite: Mapping[Pass, Tensor]) -> Tensor:
        """``N`` times the share of samples in passes that this layer saw and that were finite."""
        device = next(iter(finite.values())).device
        forward_pass = new_count(0.0, device)
        for one, flag in finite.items():
            forward_pass = forward_pass + flag.to(forward_pass.dtype) * self._weight(one)
        if isinstance(self.loss_average, str):
            return forward_pass
        return forward_pass * (self.samples / max(self._total, 1.0))
