"""What a user has hardly meant, seen when an optimizer is built and at its factor steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from kronfac.optimizer.common import DEFAULTS
from kronfac.options.advice import Advice
from kronfac.options.config import Options, Schedules, is_adaptive
from kronfac.step.pipeline import Preconditioner
from kronfac.step.sampled_rows import may_leave_out

Groups = Sequence[Mapping[str, Any]]

#: Preconditioners whose optimizer is still there.
_LIVE: weakref.WeakSet[Preconditioner] = weakref.WeakSet()

#: Bases that divide each entry of a gradient by a measure of its size.
_DIVIDING = (
    *(torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.AdamW),
)

#: Bounds of a step by name, and the rule that each belongs to.
_BOUNDS = {"kl_clip": "kl-clip", "trust_radius": "trust-region"}


def enlist(preconditioner: Preconditioner) -> None:
    """Let other optimizers on the same model know of this one, as long as it lives."""
    _LIVE.add(preconditioner)


def advise_on_arguments(advice: Advice, preconditioner: Preconditioner, base: Optimizer) -> None:
    """Look at what an optimizer was built of."""
    groups = base.param_groups
    lazy = _lazy(preconditioner, groups)
    advice.give("lazy", lazy)
    if lazy is None:
        advice.give("nothing", _no_layer(preconditioner, base, groups))
    advice.give("momentum", _two_momenta(preconditioner, groups))
    advice.give("adaptive base", _divides(preconditioner.options, base))
    advice.give("nested", _nested(base))
    advice.give("intervals", _intervals(preconditioner.schedules))
    for sentence in _without_effect(preconditioner.options, preconditioner.schedules):
        advice.give(sentence, sentence)
    advice.give("rows", _rows_without_effect(preconditioner))


def advise_on_step(advice: Advice, preconditioner: Preconditioner, base: Optimizer) -> None:
    """Look at what may have changed since."""
    advice.give("intervals", _intervals(preconditioner.schedules))
    if not advice.knows("twice"):
        advice.give("twice", _watched_twice(preconditioner, base))
        advice.skip("twice")  # looking once is enough


# --- at construction ----------------------------------------------------------------------------


def _divides(options: Options, base: Optimizer) -> str | None:
    """A base that divides each entry by its own size undoes what preconditioning has done."""
    if not isinstance(base, _DIVIDING) or options.rescale not in ("auto", "unit", "orthogonal"):
        return None
    name = type(base).__name__
    return (
        f"{name} divides each entry of a step by its average size, which undoes K-FAC's steps: alone it "
        "does better than under K-FAC. Give torch.optim.SGD(model.parameters(), lr=0.1) as the base, "
        "and momentum=0.9, nesterov=True."
    )


def _no_layer(preconditioner: Preconditioner, base: Optimizer, groups: Groups) -> str | None:
    """Say why nothing is preconditioned; ``exclude="*"`` says that this is meant."""
    states = preconditioner.layers.values()
    watched = [state.layer for state in states if state.has_curvature]
    if (
        any(layer.weight.requires_grad for layer in watched)
        or "*" in preconditioner.options.exclude
    ):
        return None
    trained = {p for group in groups for p in group["params"]}
    if not any(p in trained for p in preconditioner.model.parameters()):
        why = "the base optimizer has no parameter of this model: build it with model.parameters()"
    elif watched:
        why = f"all layers are frozen, {watched[0].name!r} for example"
    else:
        why = _first_reasons(preconditioner.reasons)
    found = f"no layer of the {type(preconditioner.model).__name__} is preconditioned"
    steps = f"every step is that of {type(base).__name__} alone"
    if any(p in trained for state in states for p in state.layer.parameters):
        steps = "steps have a length by their rule, but no curvature"
    return (
        f"{found}: {steps}; {why}. print(optimizer) lists all parameters; exclude='*' says that this is "
        "meant."
    )


def _first_reasons(reasons: Mapping[str, str], shown: int = 3) -> str:
    distinct: dict[str, str] = {}
    for name, reason in reasons.items():
        distinct.setdefault(reason, name)
    parts = [f"{name} ({reason})" for reason, name in list(distinct.items())[:shown]]
    return "; ".join(parts) + ("; ..." if len(distinct) > shown else "") or "it has no parameters"


def _lazy(preconditioner: Preconditioner, groups: Groups) -> str | None:
    trained = {p for group in groups for p in group["params"]}
    found = [
        name
        for name, module in preconditioner.model.named_modules()
        for p in module.parameters(recurse=False)
        if isinstance(p, UninitializedParameter) and p in trained
    ]
    if not found or "*" in preconditioner.options.exclude:
        return None
    names = ", ".join(repr(name or "(model)") for name in dict.fromkeys(found))
    return (
        f"layers {names} are lazy and not initialised yet, so they are left to the base optimizer; run "
        "one forward pass before the optimizer is built."
    )


def _two_momenta(preconditioner: Preconditioner, groups: Groups) -> str | None:
    """Momentum before and after preconditioning, for the same parameters."""
    if not preconditioner.options.momentum:
        return None
    preconditioned = {p for layer in preconditioner.watched() for p in (layer.weight, layer.bias)}
    for number, group in enumerate(groups):
        own = _momentum_of(group)
        if own is not None and any(p in preconditioned for p in group["params"]):
            return (
                f"momentum={preconditioner.options.momentum!r} comes on top of the base optimizer's own "
                f"({own} in group {number}), so steps are averaged twice; leave one of the two out."
            )
    return None


def _momentum_of(group: Mapping[str, Any]) -> str | None:
    for name in ("momentum", "betas"):
        value = group.get(name)
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, int | float | Tensor) and bool(first):
            return f"{name}={value}"
    return None


def _nested(base: Optimizer) -> str | None:
    inner = getattr(base, "_advice", None)
    if not isinstance(inner, Advice):
        return None
    inner.skip("twice")
    return (
        f"the base optimizer is a {type(base).__name__} itself, so gradients are preconditioned twice; "
        "give the optimizer that it wraps, its .base, instead."
    )


def _without_effect(options: Options, schedules: Schedules) -> Iterable[str]:
    """Options that ask for something which the others rule out.

    What describes the training (``loss_average``, ``grad_scaler``, ``distribute``) or bounds it
    (``max_dim``, ``on_missing``) may well find nothing to do.
    """
    for name, rule in _BOUNDS.items():
        bound = getattr(options, name)
        if bound != DEFAULTS[name] and options.rescale != rule:
            yield (
                f"{name}={bound!r} has no effect with rescale={options.rescale!r}; give "
                f"rescale={rule!r} to use it."
            )
    if options.stagger and schedules.get("refresh_every") == 1:
        yield "stagger=True has no effect with refresh_every=1: every layer is refreshed at every step."


def _rows_without_effect(preconditioner: Preconditioner) -> str | None:
    states, rows = preconditioner.layers.values(), preconditioner.options.rows
    if rows in (None, "auto") or not states or any(map(may_leave_out, states)):
        return None
    return (
        f"rows={rows!r} has no effect with {preconditioner.method.name}, whose statistics need all rows; "
        "leave it out."
    )


# --- at a step ----------------------------------------------------------------------------------


def _intervals(schedules: Schedules) -> str | None:
    """Solving old statistics again changes nothing, unless the damping does."""
    factor, refresh = schedules.get("factor_every"), schedules.get("refresh_every")
    damping = schedules.given("damping")
    changes = (
        callable(damping)
        or callable(getattr(damping, "share", None))
        or is_adaptive(schedules.get("damping"))
    )
    if callable(factor) or callable(refresh) or changes:
        return None
    if refresh >= factor:
        return None
    return (
        f"refresh_every={refresh} is less than factor_every={factor}, so the same statistics are solved "
        f"several times; give factor_every={refresh}, or a larger refresh_every."
    )


def _watched_twice(preconditioner: Preconditioner, base: object) -> str | None:
    """Another optimizer that lives and watches one of our layers."""
    if _other(preconditioner, base) is None:
        return None
    gc.collect()  # one that was replaced may only be waiting to be collected
    name = _other(preconditioner, base)
    if name is None:
        return None
    return (
        f"another K-FAC optimizer watches layer {name!r} of this model as well: both observe every "
        "pass, and the second step would precondition a gradient twice; keep one, and call detach() on "
        "the other."
    )


def _other(preconditioner: Preconditioner, base: object) -> str | None:
    inner = getattr(base, "_preconditioner", None)  # K-FAC over K-FAC has a sentence of its own
    for other in list(_LIVE):
        if other is preconditioner or other is inner:
            continue
        for key, state in preconditioner.layers.items():
            if key in other.layers:
                return state.name
    return None
