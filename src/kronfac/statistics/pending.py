"""What one layer has observed since the last step. Nothing here reads a number back from the device."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from kronfac.layers.channel_sums import ChannelSums
from kronfac.layers.rows import DenseRows, Rows
from kronfac.protocol.block import Block, Tensors
from kronfac.statistics.contributions import Summed, Unscreened, context_of, largest_sum
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.running import count_dtype, new_count

_generations = itertools.count()


def _as_tensor(held: Tensor | Rows) -> Tensor:
    return held.summed() if isinstance(held, Rows) else held


class Pending:
    """What one layer has observed since the last step."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.sums: dict[str, Tensor] = {}
        self.rows: Tensor | None = None
        self.finite: dict[Pass, Tensor] = {}
        #: Input rows of a pass, and what their sum over positions is to be divided by.
        self.held_inputs: dict[Pass, tuple[Rows, int]] = {}
        self.held_outputs: dict[tuple[Pass, int], tuple[Tensor | Rows, float]] = {}
        #: Rows by draw, and what they contribute once they are added up over ranks.
        self.summed: dict[int, Summed] = {}
        self.shared_sums: dict[str, Tensor] = {}
        self.shared_count: Tensor | None = None
        #: Sums and counts of all ranks that have arrived here, by statistic.
        self.landed: dict[str, tuple[Tensor, Tensor]] = {}
        #: What was taken out of output gradients after some of them may have left.
        self.divided: Tensor | None = None
        self.gradients: Tensor | None = None
        self.dropped: Tensor | None = None
        #: By side; a step screens all layers at once, and whoever needs to know earlier does it alone.
        self.unscreened: dict[str, Unscreened] = {}
        self.calls = 0
        #: By pass, rows of the input side and how many samples they are grouped by; chosen rows of the
        #: output side and all of them, if not all are chosen.
        self.whole: dict[Pass, tuple[int, int]] = {}
        self.chosen: dict[Pass, tuple[int, int]] = {}
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
        return "input" in self.unscreened or self.rows is not None or bool(self.held_inputs)

    @property
    def has_outputs(self) -> bool:
        """Whether the output side has observed anything."""
        seen = "output" in self.unscreened
        return seen or bool(self.finite or self.held_outputs or self.summed)

    def has_observed(self, name: str) -> bool:
        """Whether anything of a statistic has been observed."""
        return name in self.sums or name in self.shared_sums

    def count_dropped(self, device: torch.device) -> None:
        """Begin to count what is dropped."""
        if self.dropped is None:
            self.dropped = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def summed_size(self) -> int:
        """How many numbers :attr:`summed` holds."""
        return sum(one.rows.numel() for one in self.summed.values())

    def add_input(self, contributions: Mapping[str, Tensor], rows: int | Tensor) -> None:
        """Add one call's input side; a non-finite one is dropped and counted."""
        if not contributions:
            return
        self.versions["input"] += 1
        if self.rows is None and "input" not in self.unscreened:
            self.unscreened["input"] = Unscreened(contributions, rows)
            self._accumulate(contributions)
            return
        self.screen("input")
        finite = self._screen(contributions)
        self._accumulate(contributions)
        self.count_rows(finite.to(count_dtype(finite.device)) * rows)

    def count_rows(self, counted: Tensor) -> None:
        """Count input rows that were finite."""
        self.rows = counted if self.rows is None else self.rows + counted

    def add_inputs_of(self, other: Pending, copy: bool = False) -> None:
        """Add everything that another layer's input side has observed, or a copy of it."""
        for forward_pass, (rows, entries) in other.whole.items():
            before = self.whole.get(forward_pass, (0, 0))
            self.whole[forward_pass] = (before[0] + rows, before[1] + entries)
        if not other.has_inputs:
            return
        calls = self.versions["input"] + other.versions["input"]
        first = other.unscreened.get("input")
        if first is not None:
            values = {n: v.clone() if copy else v for n, v in first.values.items()}
            self.add_input(values, first.rows)
        else:
            self.screen("input")
            own = {n: v for n, v in other.sums.items() if self._is_input(n)}
            self._accumulate({n: v.clone() if copy else v for n, v in own.items()})
            assert other.rows is not None
            self.count_rows(other.rows)
        self.versions["input"] = calls

    def clear_inputs(self) -> None:
        """Forget the input side, which another layer observes."""
        self.unscreened.pop("input", None)
        self.rows = None
        self.whole.clear()
        self.versions["input"] = 0
        self.generations["input"] = next(_generations)
        for held in (self.sums, self.landed):
            for name in [name for name in held if self._is_input(name)]:
                del held[name]

    def _is_input(self, name: str) -> bool:
        return self.block.statistics[name].source == "input"

    def add_output(
        self, contributions: Mapping[str, Tensor], forward_pass: Pass, share: float = 1.0
    ) -> None:
        """Add one call's output side, weighted; a non-finite one is dropped and counted."""
        if not contributions:
            return
        self.versions["output"] += 1
        if share != 1:
            for name, value in contributions.items():
                value.mul_(self.block.weight(name, share))
        if not self.finite and "output" not in self.unscreened:
            self.unscreened["output"] = Unscreened(contributions, forward_pass=forward_pass)
            self._accumulate(contributions)
            return
        self.screen("output")
        finite = self._screen(contributions)
        self._accumulate(contributions)
        before = self.finite.get(forward_pass)
        self.finite[forward_pass] = finite if before is None else before | finite

    def count_whole(self, rows: Rows, forward_pass: Pass) -> None:
        """Count the rows of one call's input side, or its samples if their positions stay together."""
        found, entries = self.whole.get(forward_pass, (0, 0))
        size = rows.samples * (rows.positions if self.block.leaves_out == "rows" else 1)
        self.whole[forward_pass] = (found + size, entries + rows.samples)

    def count_chosen(self, chosen: Rows | None, rows: Rows, forward_pass: Pass) -> None:
        """Count how many rows of one call's output side were chosen."""
        found, whole = self.chosen.get(forward_pass, (0, 0))
        if chosen is not None:
            found += chosen.samples * chosen.positions
        self.chosen[forward_pass] = (found, whole + rows.samples * rows.positions)

    def skip_input(self, device: torch.device) -> None:
        """Take note of a call of which no row was chosen."""
        self.versions["input"] += 1
        self.rows = new_count(0.0, device) if self.rows is None else self.rows

    def skip_output(self, forward_pass: Pass, device: torch.device) -> None:
        """The same for the output side."""
        self.versions["output"] += 1
        nothing = torch.zeros((), dtype=torch.bool, device=device)
        self.finite.setdefault(forward_pass, nothing)

    def shares(self) -> dict[Pass, float]:
        """The share of rows that were chosen, by pass, where that is not all of them."""
        return {one: found / max(1, whole) for one, (found, whole) in self.chosen.items()}

    def screen(self, *sides: str) -> None:
        """Find out whether the first contributions of some sides are finite."""
        for side in sides:
            first = self.unscreened.pop(side, None)
            if first is None:
                continue
            finite = self._screen(first.values)
            if first.forward_pass is None:
                self.count_rows(finite.to(count_dtype(finite.device)) * first.rows)
            else:
                self.finite[first.forward_pass] = finite

    def add_gradient(self, contributions: Mapping[str, Tensor]) -> None:
        """Add what the gradient matrix and the weights of this step show."""
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
            kept = rows.kept()
            self.held_inputs[forward_pass] = (before[0].beside(kept) if before else kept, 1)
            return
        total, positions = rows.summed().unsqueeze(-2), rows.positions
        if before is not None:
            total, positions = before[0].dense() + total, before[1] + positions
        self.held_inputs[forward_pass] = (DenseRows(total), positions)

    def hold_output(self, rows: Rows, forward_pass: Pass, draw: int, share: float) -> None:
        """The same for output rows; several backward passes of one draw add up."""
        key = (forward_pass, draw)
        held = self.held_outputs.get(key)
        if held is None and self.block.keeps == "summed" and isinstance(rows, ChannelSums):
            self.held_outputs[key] = (rows, share)  # they become rows with those of others
            return
        before = None if held is None else _as_tensor(held[0])
        kept = rows.kept().dense() if self.block.keeps == "dense" else rows.summed()
        if before is not None and self.block.keeps == "dense":
            inputs = self.held_inputs.get(forward_pass)
            if inputs is not None and before.shape[-2] < inputs[0].positions:
                # The uses of a pass come back in the opposite order.
                self.held_outputs[key] = (torch.cat([kept, before], dim=-2), share)
                return
        self.held_outputs[key] = (kept if before is None else before + kept, share)

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
            context = context_of(forward_pass, solution)
            self.add_input(self.block.observe_input(rows, context), rows.count)
            del self.held_inputs[forward_pass]

    def _input_rows(self, forward_pass: Pass) -> Rows:
        rows, positions = self.held_inputs[forward_pass]
        return rows if positions == 1 else DenseRows(rows.dense() / positions)

    def _held(self, rows: Tensor | Rows) -> Rows:
        if isinstance(rows, Rows):
            return rows
        return DenseRows(rows if self.block.keeps == "dense" else rows.unsqueeze(-2))

    def settle(self, solution: Tensors | None) -> None:
        """Turn held rows into contributions."""
        inputs = {forward_pass: self._input_rows(forward_pass) for forward_pass in self.held_inputs}
        for forward_pass, rows in inputs.items():
            context = context_of(forward_pass, solution)
            self.add_input(self.block.observe_input(rows, context), rows.count)
        for (forward_pass, _), (held, share) in self.held_outputs.items():
            outputs, context = self._held(held), context_of(forward_pass, solution)
            found = self.block.observe_output(outputs, context)
            if forward_pass in inputs:
                found |= self.block.observe_pair(inputs[forward_pass], outputs, context)
            self.add_output(found, forward_pass, share)
        self.held_inputs.clear()
        self.held_outputs.clear()

    def contribution(
        self,
        name: str,
        normalizer: Normalizer | None,
        in_place: bool = False,
        share: float = 1.0,
    ) -> tuple[Tensor, Tensor] | None:
        """What this step adds to a statistic's sum and count, if anything.

        ``in_place`` uses up what is pending. ``share`` is this rank's share of what it has observed
        itself. What was added up over ranks, and what all ranks see alike, stays as it is.
        """
        if name in self.shared_sums and self.shared_count is not None:
            return self._with_shared(name, normalizer, share)
        if name in self.landed:
            return self.landed.pop(name)
        own, statistic = self._observed(name, normalizer, in_place), self.block.statistics[name]
        if own is None or share == 1.0 or statistic.combine == "gather" or statistic.is_replicated:
            return own
        return own[0] * share, own[1] * share

    def _observed(
        self, name: str, normalizer: Normalizer | None, in_place: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Sum and count of what this layer has observed itself, if anything.

        Output statistics need the normaliser; one that would overflow is dropped.
        """
        self.screen("input", "output")
        total, statistic = self.sums.get(name), self.block.statistics[name]
        if total is None:
            return None
        if statistic.source == "input":
            return None if self.rows is None else (total, self.rows)
        if statistic.is_replicated:
            return None if self.gradients is None else (total, self.gradients)
        if normalizer is None or not self.finite:
            return None
        scale = normalizer.scale(statistic.degree)
        fits = self._size(name, total).abs() * scale < largest_sum(total.dtype)
        kept = fits.to(total.dtype) * scale
        count = normalizer.count(self.finite, self.shares()) * fits
        if in_place and self.dropped is not None:
            self.dropped = self.dropped + ~fits
        return (total.mul_(kept) if in_place else total * kept), count

    def _with_shared(
        self, name: str, normalizer: Normalizer | None, share: float
    ) -> tuple[Tensor, Tensor]:
        assert self.shared_count is not None
        total, count = self.shared_sums.pop(name), self.shared_count
        own = self.contribution(name, normalizer, share=share)
        if own is None:
            return total, count
        return self.together(name, total, own[0]), count + own[1]

    def _size(self, name: str, value: Tensor) -> Tensor:
        """A number that bounds a contribution: a second moment bounds its entries by its trace."""
        if self.block.statistics[name].symmetric:
            return value.diagonal(dim1=-2, dim2=-1).sum()
        return value.sum()

    def leave(self, name: str, divisor: float | Tensor) -> Tensor | None:
        """Give away what has been observed of a statistic, if anything; what counts it stays here.

        Output statistics are multiplied as if ``divisor`` were N.
        """
        self.screen("input", "output")
        total, statistic = self.sums.pop(name, None), self.block.statistics[name]
        if total is None or statistic.source == "input":
            return total
        scale = divisor**statistic.degree
        fits = self._size(name, total).abs() * scale < largest_sum(total.dtype)
        if self.dropped is not None:
            self.dropped = self.dropped + ~fits
        newest = next(reversed(self.finite))
        self.finite[newest] = self.finite[newest] & fits
        return total.mul_(fits.to(total.dtype) * scale)

    def count(self, name: str, normalizer: Normalizer, without: Collection[Pass]) -> Tensor | None:
        """What has been counted of a statistic, but for some passes; ``None`` if nothing."""
        self.screen("input", "output")
        if self._is_input(name):
            return self.rows
        finite = {one: flag for one, flag in self.finite.items() if one not in without}
        return normalizer.count(finite, self.shares()) if finite else None

    def divide_outputs(self, scale: Tensor) -> None:
        """Take a factor out of the output gradients that have been observed so far."""
        self.divided = scale if self.divided is None else self.divided * scale
        self.versions["output"] += 1
        for name, statistic in self.block.statistics.items():
            if statistic.source == "output" and name in self.sums:
                total = self.sums[name]
                for _ in range(statistic.degree):
                    total.div_(scale.to(total.device, total.dtype))
        for key, (held, share) in self.held_outputs.items():
            rows = _as_tensor(held)
            self.held_outputs[key] = (rows / scale.to(rows.device, rows.dtype), share)
        for one in self.summed.values():
            one.rows = one.rows / scale.to(one.rows.device, one.rows.dtype)

    def clear_outputs(self) -> None:
        """Forget the output side, as ``zero_grad`` forgets gradients."""
        self.screen("output")  # what is dropped counts
        self.versions["output"] = 0
        self.generations["output"] = next(_generations)
        self.finite.clear()
        self.chosen.clear()
        self.held_outputs.clear()
        self.summed.clear()
        self.shared_sums.clear()
        self.shared_count = self.divided = None
        for name, statistic in self.block.statistics.items():
            if statistic.source == "output":
                self.sums.pop(name, None)
                self.landed.pop(name, None)

    def clear_gradients(self, names: Collection[str]) -> None:
        """Forget what the gradient and the weights have shown."""
        self.gradients = None
        for name in names:
            self.sums.pop(name, None)

    def clear(self) -> None:
        """Forget both sides."""
        self.screen("input")
        self.clear_outputs()
        self.sums.clear()
        self.landed.clear()
        self.held_inputs.clear()
        self.whole.clear()
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
                self.sums[name] = self.together(name, before, value)
            else:
                before.add_(value)

    def together(self, name: str, one: Tensor, other: Tensor) -> Tensor:
        """Two contributions to a statistic: their sum, or gathered rows side by side."""
        if self.block.statistics[name].combine == "gather":
            return torch.cat([one, other], dim=-2)
        return one + other

    def _screen(self, contributions: Mapping[str, Tensor]) -> Tensor:
        """Zero contributions that are not finite and return, on the device, whether they were."""
        finite: Tensor | None = None
        for name, value in contributions.items():
            size = self._size(name, value)
            ok = size - size == 0  # as torch.isfinite, in half the operations
            finite = ok if finite is None else finite & ok
        assert finite is not None
        bad = ~finite
        for value in contributions.values():
            value.masked_fill_(bad, 0)
        self.dropped = bad.to(torch.int64) if self.dropped is None else self.dropped + bad
        return finite
