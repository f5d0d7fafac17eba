"""``kronfac.KFAC``, the optimizer that users hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from kronfac.adaptive.relative import Relative
from kronfac.layers.selection import Selection
from kronfac.methods.kfac.block_diagonal import BlockDim
from kronfac.methods.kfac.method import KFACMethod, Sharing, SolverOption
from kronfac.optimizer.base import Preconditioned
from kronfac.optimizer.calling import explained
from kronfac.optimizer.common import Common
from kronfac.options.config import Pattern, as_patterns, check_non_negative
from kronfac.rescale.rules import no_matrix
from kronfac.step.validation import check_module


class KFAC(Preconditioned):
    """Kronecker-factored approximate curvature in front of any base optimizer.

    Args:
        model: the model to watch: plain or wrapped.
        base_optimizer: what takes the step, normally plain SGD.
        damping: γ in ``(G ⊗ A + γI)⁻¹``: :class:`kronfac.Relative` to each layer's mean curvature, or a
            number in units of the loss's curvature. A :class:`kronfac.LevenbergMarquardt` adapts itself
            and needs ``step(closure)``.
        factor_every: steps between updates of the statistics.
        refresh_every: steps between renewals of the solutions; a :class:`kronfac.StaleInterval` adapts
            itself to how fast the statistics change.
        decay: weight of the old statistics at each update; 0 keeps the newest, 1 is a plain mean.
        fisher: where output gradients come from: ``"empirical"`` (the loss), ``"mc"`` or ``"exact"``
            (the model's own distribution, see :meth:`observe`), ``"forward"`` (none: ``G = I``).
        sharing: ``"expand"`` treats shared positions as samples, ``"reduce"`` sums over them first.
        solver: ``"eigen"``, ``"cholesky"`` or ``"newton-schulz"`` (products only, for accelerators), or
            ``"separable"`` (the eigenbasis with two products a step instead of four, damped nearly as
            ``"eigen"`` is). ``"auto"`` takes eigen up to a width of 2048, Cholesky beyond, and separable
            instead of eigen where steps become orthogonal and damping is relative, as by default.
            ``"thermodynamic"``, or a :class:`kronfac.Thermodynamic`, simulates a physical system that
            inverts by its noise.
        power: exponent p of ``(G ⊗ A + γI)⁻ᵖ``: 1 is K-FAC; 1/2, the square root as in Shampoo and Adam,
            may suit some models better. Below 1 only with the eigen solver.
        momentum: heavy ball taken before preconditioning; the base then usually has none.
        nesterov: look ahead with it.
        rescale: length of a step: ``None`` (as solved), ``"kl-clip"`` (bounded change of the model),
            ``"trust-region"`` (predicted KL divergence of at most ``trust_radius``), ``"graft"`` (each
            layer keeps its gradient's norm), ``"unit"`` (Muon's norm), ``"orthogonal"`` (as Muon's: the
            nearest orthogonal matrix, at that norm), ``"quadratic"`` (learning rate and momentum from a
            quadratic model, over SGD with ``lr=1``; needs ``step(closure)`` and :meth:`observe`).
            ``"auto"`` is ``"orthogonal"`` for matrices, a root mean square of 1 for each token and of
            0.1 for norms, all of it shorter where recent gradients disagree, and the same for parameters
            without curvature; it is ``"kl-clip"`` with a damping that adapts itself.
        kl_clip: bound κ of ``rescale="kl-clip"``.
        trust_radius: bound δ of ``rescale="trust-region"``, as in ACKTR.
        early_refresh: with ``refresh_every >= 10``, also take statistics and refresh at steps 1, 2, 4,
            8, ... of the first interval.
        stagger: spread refreshes over the interval, so that no step is a spike.
        rows: about how many rows (positions of samples) a layer's statistics are taken from at a factor
            step, over all ranks and micro-batches: a number from 4096 on, ``None`` for all of them, or
            ``"auto"``, 4096 or 8 times the width of the layer's wider side, or of its blocks, if that is
            more.
        share_inputs: let layers that see the same tensor (queries, keys and values; gate and up) share
            its statistics, and what is solved from them alone. Nothing changes but the cost.
        row_form: precondition linear layers that are wider than a step has rows from these rows, if the
            solver finds one matrix for each side (not ``"eigen"``). Nothing changes but the cost.
        max_dim: a side wider than this keeps only its diagonal.
        block_dim: a side of a linear layer that is wider than this is cut into equal blocks, at most so
            wide, of which each is decomposed by itself (``G ⊗ A`` is then block-diagonal), whatever
            ``max_dim`` is. ``None`` cuts no side. ``"auto"`` cuts sides that are at least 256 wide
            and 2.5 to six times as wide as the other, into blocks about as wide as that (128 to 2048),
            as in most layers of a transformer; only where steps become orthogonal and damping is
            relative, as by default, and ``solver="auto"``.
        loss_average: what the loss was divided by: ``"batch"`` (samples), ``"token"`` (unmasked loss
            terms, for outputs with the classes last), a number, or ``None`` for a sum.
        include: only these modules, by name pattern (``"layer1.*"``) or type.
        exclude: not these modules; ``"*"`` leaves all of them to the base optimizer.
        on_missing: what to do about a layer with a gradient that was never observed: ``"warn"``,
            ``"raise"`` or ``"ignore"``.
        grad_scaler: the ``torch.amp.GradScaler`` in use, whose factor is in what is observed; one that
            steps this optimizer is found by itself.
        max_grad_norm: clip the norm of all gradients together to this, before they are preconditioned.
        products: ``"auto"`` multiplies large float32 matrices in bfloat16 where the hardware is faster at
            it and nothing amplifies the rounding: for orthogonal steps, to turn other steps back from the
            eigenbasis, and for second moments of linear layers under relative damping. ``"float32"``
            never does.
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

    method = KFACMethod

    @explained(Common, KFACMethod.defaults)
    def __init__(
        self,
        model: nn.Module,
        base_optimizer: Optimizer,
        *,
        sharing: Sharing = "expand",
        solver: SolverOption = "auto",
        power: float = 1.0,
        max_dim: int = 8192,
        block_dim: BlockDim = "auto",
        **common: Unpack[Common],
    ) -> None:
        method = KFACMethod(
            sharing=sharing,
            solver=solver,
            power=power,
            max_dim=max_dim,
            block_dim=block_dim,
            output_factor=common.get("fisher") != "forward",
            hides_form=_hides_form(common),
        )
        super().__init__(model, base_optimizer, method, **common)


def _hides_form(common: Common) -> bool:
    """Whether orthogonal steps leave little of how the curvature was damped.

    Not with a share that is scheduled: inverses would have to be prepared at every step.
    """
    damping = common.get("damping", KFACMethod.defaults.damping)
    fixed = isinstance(damping, Relative) and not callable(damping.share)
    return fixed and common.get("rescale", "auto") in ("auto", "orthogonal")


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
