"""Looking at an optimizer: numbers, times, layers and what is left out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from kronfac.capture.outputs import Outputs
from kronfac.optimizer.summary import describe, left_out
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Seconds
from kronfac.step.pipeline import Preconditioner


class Inspection:
    """Methods that change nothing."""

    base: Optimizer
    param_groups: list[dict[str, Any]]
    _preconditioner: Preconditioner
    _outputs: Outputs

    def _names(self) -> dict[nn.Parameter, str]:
        """Plain names of the model's and the base optimizer's parameters."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: what has been done, what went wrong, and what has travelled.

        - ``steps``, ``factor_updates``, ``refreshes``: completed steps, updates of the statistics,
          solutions that were made (one for each layer);
        - ``refresh_every``, its value now; ``refresh_lengthened`` and ``refresh_shortened``, what an
          interval that adapts itself has done;
        - ``damping``, its value now; ``damping_raised``, ``damping_lowered`` and ``damping_rejected``,
          what a damping that adapts itself has done;
        - ``kl_clip_steps``, ``kl_clip_active``: steps with ``rescale="kl-clip"``, and those that it
          shortened; ``trust_region_steps``, ``trust_region_active``: the same of ``"trust-region"``;
        - ``learning_rate``, ``momentum``: of the last step with ``rescale="quadratic"``, only then;
        - ``dropped``, ``failures``: by layer, contributions that were not finite and solutions that
          could not be found; ``without_solution``: layers that pass their raw gradient;
        - ``bytes``, ``messages``: what this rank took part in sending, by phase: ``reduce`` (statistics),
          ``share`` (solutions), ``spread`` (gradients or weights), ``rescale`` (norms);
          ``sent``: bytes that a rank sends for it by the formulas of rings; ``control``: bytes and
          messages by which ranks agreed;
        - ``waited``: seconds in which this rank did nothing but wait for statistics.
        """
        return self._preconditioner.stats()

    def timed(self) -> AbstractContextManager[Seconds]:
        """Add up the seconds of each phase of the steps inside; waits for the device.

        It gives seconds by phase, of this rank; their ``layers`` has those of single layers.
        """
        return self._preconditioner.phases.timed()

    @property
    def layers(self) -> list[LayerState]:
        """The layers that are preconditioned: those whose weight is not frozen."""
        return [state for state in self._trained() if state.has_curvature]

    def _trained(self) -> list[LayerState]:
        states = self._preconditioner.layers.values()
        return [state for state in states if state.layer.is_trained]

    def left_out(self) -> dict[str, tuple[int, str]]:
        """By name, the size of every parameter that is not preconditioned, and why.

        With ``rescale="auto"`` such parameters have steps by the same rule of lengths, unless ``exclude``
        or ``include`` leaves them to the base optimizer; the summary says which.
        """
        trained = {p for group in self.param_groups for p in group["params"]}
        return left_out(self._preconditioner, self._names(), trained)

    def owners(self, state: LayerState) -> str:
        """The ranks that solve a layer: ``"0"``, ``"0,3"`` for its two factors, ``"0+3"`` together."""
        return self._preconditioner.coordinator.solved_by(state)

    def value_now(self, name: str) -> float:
        """The value at this step of ``"damping"``, ``"momentum"`` and others that may be scheduled."""
        preconditioner = self._preconditioner
        return float(preconditioner.schedules.at(name, preconditioner.clock.step))

    @property
    def needs_observe(self) -> bool:
        """Whether :meth:`observe` has to be called after each forward pass."""
        preconditioner = self._preconditioner
        options = preconditioner.options
        by_options = options.sampled or options.rescale == "quadratic"
        return by_options or preconditioner.method.needs_observe

    def summary(self) -> str:
        """Return the table of layers, and every parameter that is not preconditioned and why.

        With several ranks it also names the scheme and, for each layer, the ranks that solve it:
        ``0`` for one, ``0,3`` for its two factors, ``0+3`` for a factor that ranks divide among them.
        """
        preconditioner = self._preconditioner
        states = self.layers
        names = self._names()
        by_length = [state for state in self._trained() if not state.has_curvature]
        lengths = {names[state.layer.weight]: state for state in by_length}
        trained = {p for group in self.param_groups for p in group["params"]}
        others = self.left_out()
        title = f"{type(self).__name__} over {type(self.base).__name__}, step {preconditioner.clock.step}"
        updates = trained if preconditioner.quadratic is not None else set()
        held = [p for p in updates if p.requires_grad and not isinstance(p, UninitializedParameter)]
        update_bytes = sum(p.numel() * p.element_size() for p in held)
        ranks = preconditioner.coordinator.overview(states)
        remark = self._outputs.remark(preconditioner.options)
        rows = preconditioner.rows.describe(states)
        inputs = preconditioner.inputs.describe(states)
        levers = [*rows, *inputs, *preconditioner.row_form.describe(states)]
        return describe(title, states, others, lengths, update_bytes, ranks, [*levers, *remark])

    def __repr__(self) -> str:
        return self.summary()
