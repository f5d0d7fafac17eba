"""The row form of preconditioning, for layers that are wider than a step has rows.

A solution with one matrix for each side is linear in the rows that make the gradient ``V = Σ g aᵀ``:
    ``G⁻¹ V A⁻¹ = (g G⁻¹)ᵀ (a A⁻¹)``,
``2R(d_A² + d_G² + d_A d_G)`` operations for R rows instead of ``2 d_A d_G (d_A + d_G)``. Momentum M comes
before preconditioning, but ``P̄ = G⁻¹ M A⁻¹`` follows it as long as the solution stays:
    ``M ← μM + V`` and ``P̄ ← μP̄ + P(V)``.
A new solution makes P̄ again out of M, by the product form, and so does every step before which there
were no rows to be sure of: rounding adds up over a refresh interval at most, with weights ``μᵏ``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.capture.capture import Capture
from kronfac.capture.gradient_rows import GradientRows, can_follow
from kronfac.options.config import Options, Schedules
from kronfac.protocol.block import Block, Tensors
from kronfac.protocol.transform import Transform
from kronfac.state.layer_state import LayerState
from kronfac.state.row_choice import BUFFER, RowChoice
from kronfac.step.batching import Damping, Group
from kronfac.step.transforms import Momentum

#: Operations that have to be saved in a step: following a gradient takes a processor as long as about
#: this many, and small layers are multiplied in batches.
LEAST_SAVING = 2**24
#: How far the products of rows may be from the gradient at the first step, relative to its norm.
TOLERANCE = 1e-2

#: Outputs ``[R, d_out]`` and inputs ``[R, d_in]``.
RowPair = tuple[Tensor, Tensor]
#: Applies the solutions of a group to matrices ``[k, d_out, d_in]``, by products.
Product = Callable[[Group, Tensor], Tensor]


class RowForm:
    """Chooses the layers of one model, holds their rows until the step, and preconditions by them."""

    def __init__(
        self,
        options: Options,
        schedules: Schedules,
        transforms: Sequence[Transform],
        capture: Capture,
    ) -> None:
        self.schedules = schedules
        self.capture = capture
        self.nesterov = options.nesterov
        self.momentum = bool(transforms)
        # Other rules may change what follows from rows.
        self._allowed = options.row_form and all(type(one) is Momentum for one in transforms)
        self._watched: dict[LayerState, GradientRows] = {}
        self._rows: dict[LayerState, RowPair] = {}

    # --- which layers ---------------------------------------------------------------------------

    def watch(self, state: LayerState, tied: bool) -> None:
        """Hold the rows of a layer from now on, if they may be fewer than it is wide.

        ``tied`` says that other modules use its weight.
        """
        limit = 0 if state.block.due_parts("step") else most_rows(state.block)
        if not self._allowed or tied or limit < 1 or not can_follow(state.layer):
            return
        if state.layer.weight.device.type != "cpu":
            return  # layers of equal shape are one product there, and rows would be many
        state.row_form = RowChoice(possible=_is_alone(), momentum=self.momentum)
        if state.row_form.possible:
            self._watched[state] = GradientRows(state.layer, limit)
            self._watched[state].attach()

    def detach(self) -> None:
        """Watch no layer any longer, for good."""
        for rows in self._watched.values():
            rows.detach()
        self._watched.clear()
        self._rows.clear()

    def resume(self) -> None:
        """Watch the layers that a checkpoint has chosen, or has not decided on."""
        self._rows.clear()
        for state, rows in self._watched.items():
            rows.detach()
            if _choice(state).chosen is not False:
                rows.attach()

    def settle(self) -> None:
        """Find the rows of this step; choose where a layer has them for the first time.

        A gradient scaler has divided gradients, which no version counter shows.
        """
        self._rows.clear()
        scaler = self.capture.scaler
        usable = _is_alone() and (scaler is None or not scaler.is_enabled())
        for state, watched in self._watched.items():
            found = watched.rows() if usable and state.has_gradient else None
            if found is not None:
                self._rows[state] = found
        new = [s for s, one in self._watched.items() if one.seen and _choice(s).chosen is None]
        if new:
            self._choose(new)

    def _choose(self, states: Sequence[LayerState]) -> None:
        """Choose the layers whose gradients are the sums of few enough rows; the host looks once."""
        found = [state for state in states if state in self._rows]
        right = dict(zip(found, _are_right([(s, *self._rows[s]) for s in found]), strict=True))
        for state in states:
            chosen = _choice(state).chosen = right.get(state, False)
            if not chosen:
                self._rows.pop(state, None)
            if chosen is False:
                self._watched[state].detach()

    def clear(self) -> None:
        """Forget the rows of a step."""
        self._rows.clear()
        for rows in self._watched.values():
            rows.clear()

    def describe(self, states: Iterable[LayerState]) -> list[str]:
        """Lines of the summary: which layers are preconditioned from their rows."""
        chosen = [s.name or "(model)" for s in states if s.row_form and s.row_form.chosen]
        if not chosen:
            return []
        title = "Preconditioned from the rows of a step, fewer than they are wide:"
        return [title, f"  {' '.join(chosen)}"]

    # --- a step ---------------------------------------------------------------------------------

    def precondition(
        self, group: Group, before: Tensor, step: int, product: Product, damping: Damping
    ) -> Tensor:
        """Precondition a group; its gradients with momentum are ``before``, ``[k, *b, d_out, d_in]``."""
        for state in group.states:
            if state.row_form is not None and state not in self._rows:
                state.row_form.solved_at = None
                state.buffers.pop(BUFFER, None)
        if not any(state in self._rows for state in group.states):
            return product(group, before)
        # A run that was resumed multiplies in the same memory.
        group.batch.place(group.states, damping)
        value = float(self.schedules.at("damping", step))
        whole = [i for i, state in enumerate(group.states) if not self._follows(state, value)]
        found: dict[int, Tensor] = {}
        if whole:
            states = [group.states[index] for index in whole]
            matrices = [self._matrix(group.states[index], before[index]) for index in whole]
            made = product(Group(states, group.batch), _stack(matrices))
            found = dict(zip(whole, made.unbind(), strict=True))
        mu = float(self.schedules.at("momentum", step))
        after = []
        for index, state in enumerate(group.states):
            if state in self._rows:
                if index in found:
                    _choice(state).solved_at, _choice(state).damping = state.solved_at, value
                with self.capture.phases.part("precondition", state.name):
                    applied = state.applied(damping[state])
                    after.append(self._from_rows(state, applied, found.get(index), mu))
            else:
                after.append(found[index])
        return _stack(after)

    def _follows(self, state: LayerState, damping: float) -> bool:
        """Whether rows are enough: what they are added to was made with what is applied now."""
        if state not in self._rows:
            return False
        choice = _choice(state)
        same = choice.solved_at == state.solved_at and choice.damping == damping
        return (same and BUFFER in state.buffers) or not self.momentum

    def _matrix(self, state: LayerState, before: Tensor) -> Tensor:
        """What the product form is applied to: the momentum that is to be followed, or the gradient."""
        return state.buffers["momentum"] if state in self._rows else before

    def _from_rows(
        self, state: LayerState, applied: Tensors, made: Tensor | None, mu: float
    ) -> Tensor:
        """The update of a layer; ``made`` is its momentum, preconditioned again, if it had to be."""
        buffers = state.buffers
        if made is not None:
            buffers[BUFFER] = made.clone()
            if not self.nesterov:
                return made
        fresh = state.block.precondition_rows(applied, *self._rows[state])
        if not self.momentum:
            return fresh
        kept = buffers[BUFFER]
        if made is None:
            kept.mul_(mu).add_(fresh)
        return fresh.add_(kept, alpha=mu) if self.nesterov else kept.clone()


def most_rows(block: Block) -> int:
    """The largest number of rows with which the row form saves operations; 0 if there is none."""
    each = block.row_flops
    return 0 if each is None else max(0, block.cost.precondition_flops - LEAST_SAVING) // each


def _is_alone() -> bool:
    """Whether all rows are in this process; collectives change gradients and leave no trace."""
    several = dist.is_available() and dist.is_initialized()
    return not several or dist.get_world_size() == 1


def _are_right(found: Sequence[tuple[LayerState, Tensor, Tensor]]) -> list[bool | None]:
    """Whether gradients are the sums of these rows: not all that changes them leaves a trace.

    ``None`` if they are not finite, which says nothing.
    """
    if not found or any(rows.device.type == "meta" for _, rows, _ in found):
        return [True] * len(found)
    sizes: list[Tensor] = []
    for state, outputs, inputs in found:
        gradient = state.view.gradient()
        error = torch.addmm(gradient, outputs.mT, inputs, alpha=-1)
        sizes += [error.norm(), gradient.norm()]
    pairs = torch.stack([one.to("cpu", torch.float64) for one in sizes]).reshape(-1, 2).tolist()
    return [e <= TOLERANCE * n if math.isfinite(n) else None for e, n in pairs]


def _choice(state: LayerState) -> RowChoice:
    assert state.row_form is not None
    return state.row_form


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(list(matrices))
