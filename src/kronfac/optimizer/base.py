"""The optimizer that every method shares: a base optimizer behind a preconditioner.

This file is the part that torch, schedulers, scalers and trainers see.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kronfac.capture.hooks import remove_inert_hooks
from kronfac.capture.outputs import Outputs
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.distributed.consistency import described, group_of, shape_of, uses_ddp, version
from kronfac.distributed.distributed import Distributed
from kronfac.distributed.sharded.sharding import Sharding, sharding_of
from kronfac.layers.selection import outermost
from kronfac.optimizer.base_steps import BaseSteps
from kronfac.optimizer.binding import Binding
from kronfac.optimizer.closures import Closures
from kronfac.optimizer.common import Common
from kronfac.optimizer.hyperparameters import Hyperparameters
from kronfac.optimizer.inspection import Inspection
from kronfac.optimizer.oversights import advise_on_arguments, advise_on_step, enlist
from kronfac.optimizer.settings import engine_options, schedules_of, with_defaults
from kronfac.optimizer.state_view import StateView
from kronfac.optimizer.trial import Trial
from kronfac.options.advice import Advice
from kronfac.options.config import Options, Schedules, is_adaptive
from kronfac.placement.place import Placement
from kronfac.placement.scheme import Distribute, as_distribute
from kronfac.protocol.method import Method
from kronfac.state import state_dict as checkpoint
from kronfac.state.integrity import check_entries, check_saved
from kronfac.step.pipeline import Preconditioner
from kronfac.step.validation import (
    check_base,
    check_closure,
    check_join,
    check_model,
    check_param_group,
    check_process_group,
    check_rank,
    check_ranks,
    check_sharded,
    check_tensors,
    narrow_products,
)

if dist.is_available():
    from torch.distributed.algorithms.join import Joinable, JoinHook

    from kronfac.distributed.join import ShadowHook, is_joining
else:

    class Joinable:  # type: ignore[no-redef]
        """Stands in where torch was built without distributed training."""


class Preconditioned(Hyperparameters, Binding, Inspection, Optimizer, Joinable):
    """A ``torch.optim.Optimizer`` that preconditions gradients and lets a base optimizer step.

    ``param_groups``, ``state`` and ``defaults`` are the base optimizer's own, so schedulers, scalers and
    trainers see nothing unusual. What belongs to us lives in objects of ours and enters ``state_dict()``
    only.
    """

    def __init__(
        self,
        model: nn.Module,
        base_optimizer: Optimizer,
        method: Method,
        **common: Unpack[Common],
    ) -> None:
        check_model(model)
        check_base(base_optimizer)
        values = with_defaults(method.defaults, common)
        check_process_group(values["process_group"])
        schedules = schedules_of(values)
        engine = (engine_options(method, values, schedules), schedules)
        distribute = as_distribute(values["distribute"])
        self._build(model, base_optimizer, method, *engine, distribute, values["process_group"])
        self.grad_scaler = values["grad_scaler"]
        advise_on_arguments(self._advice, self._preconditioner, base_optimizer)

    def _build(
        self,
        model: nn.Module,
        base: Optimizer,
        method: Method,
        options: Options,
        schedules: Schedules,
        distribute: Distribute,
        process_group: Any = None,
    ) -> None:
        self.model = model
        self.base = base
        if dist.is_available():
            Joinable.__init__(self)
        self._distribute = distribute
        #: The members of the process group that was given, if any, and how long its messages may take.
        self._ranks: list[int] | None = None
        self._timeout: timedelta | None = None
        remove_inert_hooks(model)
        # Optimizer.__init__ would make groups and state of its own; this makes its hooks only.
        Optimizer.__setstate__(self, {})
        self._bound = {}
        self._preconditioner = Preconditioner(model, method, options, schedules)
        self._preconditioner.attach(self.param_groups)
        for module in outermost(model):
            self._preconditioner.capture.attach_model(module)
        self._binding = self._watch_binding()
        enlist(self._preconditioner)
        self._advice, self._outputs = Advice(), Outputs(outermost(model))
        self._closures = Closures(self._advice)
        self._base_steps = BaseSteps(base, self._advice, self._preconditioner.capture)
        if dist.is_available() and dist.is_initialized():
            world = ProcessGroup(group_of(model) if process_group is None else process_group)
            sharding = sharding_of(world, model, self._names(), distribute)
            if process_group is not None:
                self._ranks, self._timeout = world.global_ranks, world.timeout
            if world.size > 1:
                self._join(world, sharding)

    def _join(self, world: ProcessGroup, sharding: Sharding | None) -> None:
        """Share the work out over ranks, after it is clear that they have the same in mind."""
        preconditioner = self._preconditioner
        world.check_equal(self._fingerprint())
        rescale = preconditioner.options.rescale
        adapts_damping = is_adaptive(preconditioner.schedules.get("damping"))
        check_ranks(self._distribute.scheme, rescale, adapts_damping)
        if sharding is not None:
            check_sharded(rescale, adapts_damping)
        averaged = uses_ddp(self.model)
        coordinator = Distributed(
            world, self._distribute, preconditioner.phases, not averaged, sharding
        )
        preconditioner.join(coordinator, self.param_groups)

    def _fingerprint(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        preconditioner = self._preconditioner
        return {
            "version": version("kronfac"),
            "torch": str(torch.__version__),
            "method": type(self).__name__,
            "base optimizer": type(self.base).__name__,
            "bfloat16": narrow_products(preconditioner.options, preconditioner.watched()),
            "option": described(preconditioner.method.described() | vars(preconditioner.options)),
            "hyperparameter": described(preconditioner.schedules.values()),
            "distribute": repr(self._distribute),
            "parameter": {name: shape_of(p) for p, name in self._names().items()},
            "layer": {
                f"{state.name}{state.layer.part}": f"{state.layer.matrix_shape} {state.block.label}"
                for state in preconditioner.layers.values()
            },
        }

    # --- what torch expects of an optimizer -----------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's parameter groups."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's state; an entry that is asked for also shows what is ours."""
        return StateView(self.base.state, self._own_entry)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's defaults."""
        return self.base.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the base optimizer a group of parameters and precondition their layers."""
        check_param_group(param_group)
        self.base.add_param_group(param_group)
        self._preconditioner.attach(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and the output gradients that were observed with them."""
        self.base.zero_grad(set_to_none=set_to_none)
        self._preconditioner.capture.zero_grad()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run the closure if there is one, precondition the gradients, step the base optimizer.

        :class:`kronfac.LevenbergMarquardt` and ``rescale="quadratic"`` need the closure and run it
        again on the same random numbers; the loss of the first run is returned, and further runs
        change neither buffers nor gradients nor statistics.
        """
        check_closure(closure)
        self._before_loading()
        preconditioner = self._preconditioner
        trial = Trial(preconditioner, self.base, self.param_groups, closure)
        loss: float | None = None
        run = partial(self._closures.run, closure, self.param_groups)
        if closure is not None:
            loss = run()
        if preconditioner.capture.due:
            check_tensors(preconditioner.watched(), self.param_groups)
            advise_on_step(self._advice, preconditioner, self.base)
        if preconditioner.is_empty_step(self.param_groups):
            preconditioner.allocate(self.param_groups)
            with preconditioner.coordinator.only_own(), self._base_steps.preconditioner():
                self.base.step()
            return loss
        preconditioner.coordinator.meet(self.param_groups, self._is_joining, active=True)
        loss = trial.begin(loss, run)
        preconditioner.run(self.param_groups)
        trial.choose_update()
        self._step_base()
        trial.judge()
        self._closures.end_step(self.param_groups)
        preconditioner.advance()
        return loss

    def _step_base(self) -> None:
        preconditioner = self._preconditioner
        with (
            preconditioner.phases("base"),
            preconditioner.coordinator.only_own(),
            self._base_steps.preconditioner(),
        ):
            self.base.step()
        preconditioner.coordinator.spread_weights()

    # --- several ranks --------------------------------------------------------------------------

    @property
    def placement(self) -> Placement | None:
        """Which rank does what; ``None`` in one process."""
        return self._preconditioner.coordinator.placement

    def _is_joining(self) -> bool:
        """Whether a step is taken inside ``Join``."""
        joining = is_joining(self)
        if joining:
            self._check_join()
        return joining

    def _check_join(self) -> None:
        preconditioner = self._preconditioner
        adapts_damping = is_adaptive(preconditioner.schedules.get("damping"))
        check_join(preconditioner.options.rescale, adapts_damping)

    @torch.no_grad()
    def shadow_step(self) -> None:
        """The step of a rank that has run out of batches."""
        preconditioner, coordinator = self._preconditioner, self._preconditioner.coordinator
        if coordinator.size == 1:
            return
        preconditioner.capture.clear()
        if coordinator.separate_gradients:
            self.base.zero_grad()
        self._check_join()
        coordinator.meet(self.param_groups, lambda: True, active=False)
        preconditioner.run(self.param_groups)
        self._step_base()
        preconditioner.advance()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See :class:`torch.distributed.algorithms.Joinable`."""
        return ShadowHook(self)

    @property
    def join_device(self) -> torch.device:
        """See :class:`torch.distributed.algorithms.Joinable`."""
        return next(self.model.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """See :class:`torch.distributed.algorithms.Joinable`."""
        return self._preconditioner.coordinator.process_group

    def consolidate(self) -> None:
        """Add up what ranks have observed since the last refresh; all of them call it together.

        Training goes on from the same tensors, so that a state saved afterwards resumes exactly.
        """
        self._preconditioner.consolidate()

    def full_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Return the whole state on rank ``to``, and ``None`` elsewhere; all ranks call it together.

        It is the same for any number of ranks and any scheme, its tensors are on the CPU, and every
        rank can load it. (``torch.distributed.checkpoint`` saves :meth:`state_dict` without this.)
        """
        coordinator = self._preconditioner.coordinator
        check_rank(to, coordinator.size)
        self.consolidate()
        return coordinator.gather_state(self.state_dict(), to)

    # --- observing ------------------------------------------------------------------------------

    def observe(
        self,
        outputs: Tensor,
        likelihood: str = "categorical",
        mask: Tensor | None = None,
        ignore_index: int | None = None,
        samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        """Observe the Fisher of the model's own distribution, for ``fisher="mc"`` and ``"exact"``.

        Call it once after each forward pass and before ``backward()``. It does nothing on steps that
        take no statistics. ``rescale="quadratic"`` needs it as well, with any Fisher, and so do methods
        that look at the model's outputs; :attr:`needs_observe` says whether to call it.

        Args:
            outputs: what the likelihood's parameters are, ``[N, ..., C]``: samples first, classes or
                values last (``outputs.movedim(1, -1)`` for channels-first maps).
            likelihood: ``"categorical"`` (logits), ``"bernoulli"`` (logits, each value on its own) or
                ``"gaussian"`` (unit variance, a loss of ``½‖f - y‖²`` per term).
            mask: one flag per loss term, ``outputs.shape[:-1]``; zero where a term does not count.
            ignore_index: with it, ``mask`` holds the targets, and terms of this target do not count.
            samples: draws per term for ``"mc"``.
            generator: source of randomness; by default one of our own, which checkpoints contain.
        """
        self._preconditioner.observer.observe(
            outputs, likelihood, mask, ignore_index, samples, generator
        )

    def no_capture(self) -> AbstractContextManager[None]:
        """Observe nothing inside: for attacks, penalties, teachers and other extra passes."""
        return self._preconditioner.capture.paused()

    def detach(self) -> None:
        """Remove every hook; from now on steps are the base optimizer's own."""
        self._release()

    def _release(self) -> None:
        self._preconditioner.detach()
        self._binding.remove()
        self._outputs.remove()
        self._base_steps.remove()

    # --- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state with ours beside it, under ``kronfac.*`` keys."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        preconditioner = self._preconditioner
        if self.base.state and not preconditioner.clock.step:
            # Loaders fill what exists. They make it exist by an empty step (see `is_empty_step`), but
            # not if the base has state from the start, as Adagrad does.
            preconditioner.allocate(self.param_groups)
        entries = preconditioner.entries(self._names())
        plan = preconditioner.coordinator.describe()
        preconditioner.coordinator.warn_if_partial()
        result = checkpoint.merge(self.base.state_dict(), *self._names_and_shapes(), entries, plan)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, result)
            result = result if replaced is None else replaced
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore base optimizer and preconditioner; parameters are matched by name and shape."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        check_saved(state_dict)
        self._before_loading()
        base, entries = checkpoint.split(state_dict, *self._names_and_shapes())
        check_entries(
            entries or {},
            expected=entries is not None and bool(self._preconditioner.layers),
        )
        if entries is None:
            warnings.warn(
                "the checkpoint has no K-FAC state: the base optimizer's part was loaded, and "
                "statistics start again.",
                stacklevel=2,
            )
        self._preconditioner.check_entries(self._names(), entries or {})
        plan = checkpoint.plan_of(state_dict)
        self._preconditioner.resume(plan, self.param_groups, self._names(), entries or {})
        self.base.load_state_dict(self._placed(base))
        self._forget_others()
        self._preconditioner.load_entries(self._names(), entries or {})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _forget_others(self) -> None:
        """Drop the base optimizer's state of parameters that other ranks step: it would grow old."""
        steps, state = self._preconditioner.coordinator.steps, self.state
        for parameter in [p for p in state if not steps(p)]:
            del state[parameter]

    def __getstate__(self) -> dict[str, Any]:
        """Keep what pickles and copies need; hooks are made again by :meth:`__setstate__`."""
        preconditioner = self._preconditioner
        return {
            "model": self.model,
            "base": self.base,
            "method": preconditioner.method,
            "options": preconditioner.options,
            "schedules": preconditioner.schedules,
            "scaler": self.grad_scaler,
            "detached": preconditioner.detached,
            "distribute": self._distribute,
            "ranks": self._ranks,
            "timeout": self._timeout,
            "plan": preconditioner.coordinator.describe(),
            "entries": preconditioner.entries(self._names()),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Watch the copied model and continue from the copied tensors; all ranks do so together."""
        given = (state["method"], state["options"], state["schedules"], state["distribute"])
        group = None
        if state["ranks"] is not None and dist.is_available() and dist.is_initialized():
            group = dist.new_group(
                state["ranks"], timeout=state["timeout"], use_local_synchronization=True
            )
        self._build(state["model"], state["base"], *given, group)
        plan, entries = state["plan"], state["entries"]
        self._preconditioner.resume(plan, self.param_groups, self._names(), entries)
        self._preconditioner.load_entries(self._names(), state["entries"])
        self.grad_scaler = state["scaler"]
        if state["detached"]:
            self.detach()
