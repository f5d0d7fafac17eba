"""``kronfac.KFAC``, the optimizer that users hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from kronfac.adaptive.damping import LevenbergMarquardt, as_schedule
from kronfac.adaptive.interval import Interval, as_intervals
from kronfac.layers import Layer
from kronfac.layers.selection import Selection
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.optimizer.base import Preconditioned
from kronfac.options.calling import explained
from kronfac.options.config import (
    Fisher,
    Missing,
    Number,
    Options,
    Pattern,
    Rescale,
    Schedules,
    Sharing,
    SolverOption,
    as_patterns,
    check_non_negative,
    resolve_rescale,
)
from kronfac.placement.scheme import Distribute, Hybrid, as_distribute
from kronfac.protocol.block import Block
from kronfac.rescale.rules import no_matrix
from kronfac.step.validation import check_module


class KFAC(Preconditioned):
    """Kronecker-factored approximate curvature in front of any base optimizer.

    Args:
        model: the model to watch: plain or wrapped.
        base_optimizer: what takes the step: SGD, AdamW, RMSprop, NAdam, ...
        damping: γ in ``(G ⊗ A + γI)⁻¹``, in units of the loss's curvature; a
            :class:`kronfac.LevenbergMarquardt` adapts itself and needs ``step(closure)``.
        factor_every: steps between updates of the statistics.
        refresh_every: steps between renewals of the solutions; a :class:`kronfac.StaleInterval` adapts
            itself to how fast the statistics change.
        decay: weight of the old statistics at each update; 0 keeps the newest, 1 is a plain mean.
        fisher: where output gradients come from: ``"empirical"`` (the loss), ``"mc"`` or ``"exact"``
            (the model's own distribution, see :meth:`observe`), ``"forward"`` (none: ``G = I``).
        sharing: ``"expand"`` treats shared positions as samples, ``"reduce"`` sums over them first.
        solver: ``"eigen"``, ``"cholesky"`` or ``"newton-schulz"`` (products only, for accelerators);
            ``"auto"`` takes eigen up to a width of 2048 and Cholesky beyond.
        power: exponent p of ``(G ⊗ A + γI)⁻ᵖ``: 1 is K-FAC; 1/2, the square root as in Shampoo and Adam,
            may suit some models better. Below 1 only with the eigen solver.
        momentum: heavy ball taken before preconditioning; the base then usually has none.
        nesterov: look ahead with it.
        rescale: length of a step: ``None`` (as solved), ``"kl-clip"`` (bounded change of the model),
            ``"graft"`` (each layer keeps its gradient's norm), ``"unit"`` (Muon's norm), ``"orthogonal"``
            (as Muon's: the nearest orthogonal matrix, at that norm), ``"quadratic"`` (learning rate and
            momentum from a quadratic model, over SGD with ``lr=1``; needs ``step(closure)`` and
            :meth:`observe`). ``"auto"`` is ``"orthogonal"`` for convolutions and for linear layers of
            models that attend or have embeddings, ``"unit"`` for other linear layers, a root mean
            square of 1 for each token's vector, and ``"graft"`` for norms; it is ``None`` with a damping
            that adapts itself.
        kl_clip: bound κ of ``rescale="kl-clip"``.
        early_refresh: with ``refresh_every >= 10``, also take statistics and refresh at steps 1, 2, 4,
            8, ... of the first interval.
        stagger: spread refreshes over the interval, so that no step is a spike.
        max_dim: a side wider than this keeps only its diagonal.
        loss_average: what the loss was divided by: ``"batch"`` (samples), ``"token"`` (unmasked loss
            terms, for outputs with the classes last), a number, or ``None`` for a sum.
        include: only these modules, by name pattern (``"layer1.*"``) or type.
        exclude: not these modules; ``"*"`` leaves all of them to the base optimizer.
        on_missing: what to do about a layer with a gradient that was never observed: ``"warn"``,
            ``"raise"`` or ``"ignore"``.
        grad_scaler: the ``torch.amp.GradScaler`` in use, whose factor is in what is observed; one that
            steps this optimizer is found by itself.
        max_grad_norm: clip the norm of all gradients together to this, before they are preconditioned.
        distribute: how the work is shared out when there are several ranks: ``"auto"`` (the best of
            the others for this model and network, always with the same numbers), ``"replicated"``,
            ``"comm-opt"``, ``"mem-opt"``, :class:`kronfac.Hybrid`, ``"local"`` (statistics of the
            owner's own batches), ``"layer-parallel"``, ``"spd"``; a :class:`kronfac.Distribute` adds
            details.
        process_group: the ranks that train one model on different data; by default those of
            ``DistributedDataParallel``, else all of them.

    Attributes ``model`` and ``base`` are the watched model and the base optimizer.
    ``damping``, ``factor_every``, ``refresh_every`` and ``decay`` may be callables of the step number,
    and may be set as attributes later; so may ``momentum``, if it was not 0.
    """

    @explained
    def __init__(
        self,
        model: nn.Module,
        base_optimizer: Optimizer,
        *,
        damping: Number | LevenbergMarquardt = 1e-4,
        factor_every: Interval = 10,
        refresh_every: Interval = 100,
        decay: Number = 0.5,
        fisher: Fisher = "empirical",
        sharing: Sharing = "expand",
        solver: SolverOption = "auto",
        power: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        rescale: Rescale | None = "auto",
        kl_clip: float = 1e-3,
        early_refresh: bool = True,
        stagger: bool = False,
        max_dim: int = 8192,
        loss_average: Literal["batch", "token"] | float | None = "batch",
        include: Pattern | Sequence[Pattern] | None = None,
        exclude: Pattern | Sequence[Pattern] | None = None,
        on_missing: Missing = "warn",
        grad_scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        distribute: str | Hybrid | Distribute = "auto",
        process_group: Any = None,
    ) -> None:
        options = Options(
            fisher=fisher,
            sharing=sharing,
            solver=solver,
            momentum=momentum,
            nesterov=nesterov,
            rescale=resolve_rescale(rescale, isinstance(damping, LevenbergMarquardt)),
            kl_clip=kl_clip,
            early_refresh=early_refresh,
            stagger=stagger,
            max_dim=max_dim,
            loss_average=loss_average,
            include=as_patterns(include, "include"),
            exclude=as_patterns(exclude, "exclude"),
            on_missing=on_missing,
            max_grad_norm=max_grad_norm,
            power=power,
        )
        intervals = as_intervals(factor_every, refresh_every)
        schedules = Schedules(as_schedule(damping), *intervals, decay, momentum)
        settings = as_distribute(distribute)
        super().__init__(model, base_optimizer, options, schedules, settings, process_group)
        self.grad_scaler = grad_scaler

    def _make_block(self, layer: Layer, per_sample: bool) -> Block:
        options = self._preconditioner.options
        if layer.unit_wise:
            return UnitWiseBlock(
                layer.matrix_shape,
                layer.factor_dtype,
                per_sample=per_sample,
                power=options.power,
            )
        return KFACBlock(
            layer.matrix_shape,
            layer.factor_dtype,
            solver=options.solver if options.power == 1 else "eigen",
            power=options.power,
            max_dim=options.max_dim,
            output_factor=options.fisher != "forward",
            per_sample=per_sample,
            picks_columns=layer.picks_columns,
        )


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    other_lr: float,
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] | None = None,
    **other: Any,
) -> list[dict[str, Any]]:
    """Split parameters into those that K-FAC preconditions and the rest, for the base optimizer.

    With ``rescale="unit"`` or ``"orthogonal"`` a preconditioned step has a length of its own and wants
    its own learning rate; norms and embeddings, which are no matrices, are among the rest. Further
    keywords are options of the other group, for example ``momentum=0.9``.
    """
    check_module(model)
    check_non_negative("lr", lr)
    check_non_negative("other_lr", other_lr)
    selection = Selection(
        model, as_patterns(include, "include"), as_patterns(exclude, "exclude"), no_matrix
    )
    found = [p for layer in selection.layers for p in (layer.weight, layer.bias) if p is not None]
    chosen = list(dict.fromkeys(found))
    known = set(chosen)
    rest = [p for p in model.parameters() if p not in known]
    groups = [{"params": chosen, "lr": lr}, {"params": rest, "lr": other_lr, **other}]
    return [group for group in groups if group["params"]]
