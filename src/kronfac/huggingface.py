"""One argument for ``transformers.Trainer``; nothing of transformers is imported here.

    Trainer(model, arguments, ..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, lr=0.1))

Trainer makes its optimizer from a class and keywords, out of parameters that it has already split into
those with weight decay and those without. The class here takes the same parameters and puts K-FAC in
front of a base optimizer on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from kronfac.methods.kfac.front import KFAC
from kronfac.options.config import check_non_negative
from kronfac.step.validation import check_module

#: Names and types of parameters without weight decay: Trainer's own rule, and torch's other norms.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NO_DECAY_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


def optimizer_cls_and_kwargs(
    model: nn.Module,
    base: Callable[..., Optimizer] | None = None,
    *,
    lr: float,
    weight_decay: float | None = None,
    base_options: Mapping[str, Any] | None = None,
    loss_average: Literal["batch", "token"] | float | None = "token",
    **kfac_options: Any,
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the pair that ``transformers.Trainer(optimizer_cls_and_kwargs=...)`` takes.

    Without Trainer, ``cls, options = optimizer_cls_and_kwargs(model, ...)`` and
    ``cls(model.parameters(), **options)`` make the same optimizer.

    Args:
        model: the model that Trainer trains.
        base: class of the optimizer that takes the step; by default SGD, with ``momentum=0.9`` and
            ``nesterov=True`` of K-FAC's own unless something else is given.
        lr: its learning rate, 0.1 to start with; Trainer's scheduler acts on it, but
            ``TrainingArguments.learning_rate`` does not reach optimizers that are given in this way.
        weight_decay: ``None`` leaves Trainer's groups as they are, with
            ``TrainingArguments.weight_decay``, and means zero for plain parameters. A number is for all
            but biases and norms, whose decay is zero.
        base_options: further keywords of the base optimizer, for example ``{"dampening": 0.1}``.
        loss_average: as in :class:`kronfac.KFAC`. The losses of transformers are means over labelled
            tokens, which Trainer takes over all micro-batches of a step: that is ``"token"``.
        **kfac_options: further keywords of :class:`kronfac.KFAC`, for example ``damping``.
    """
    check_module(model)
    if base is None:
        base, kfac_options = torch.optim.SGD, {"momentum": 0.9, "nesterov": True, **kfac_options}
    if not callable(base) or isinstance(base, Optimizer):
        raise TypeError(f"base={base!r} must be an optimizer's class, torch.optim.SGD for example.")
    check_non_negative("lr", lr)
    if weight_decay is not None:
        check_non_negative("weight_decay", weight_decay)
    if base_options is not None and not isinstance(base_options, Mapping):
        raise TypeError(f"base_options={base_options!r} must be a dict of the base's keywords.")
    options = {
        "watched": model,
        "base": base,
        "weight_decay": weight_decay,
        "base_options": {"lr": lr, **(base_options or {})},
        "kfac_options": {"loss_average": loss_average, **kfac_options},
    }
    return TrainerKFAC, options


class TrainerKFAC(KFAC):
    """:class:`kronfac.KFAC`, made from parameters or groups of them as Trainer makes optimizers."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        watched: nn.Module,
        base: Callable[..., Optimizer],
        weight_decay: float | None,
        base_options: Mapping[str, Any],
        kfac_options: Mapping[str, Any],
    ) -> None:
        groups = _with_decay(watched, list(params), weight_decay)
        known = set(watched.parameters())
        if any(p not in known for group in groups for p in group["params"]):
            raise ValueError(
                "the parameters to train are not those of the model that optimizer_cls_and_kwargs was "
                "given: give it the same model as Trainer(model=...), and no model_init."
            )
        super().__init__(watched, base(groups, **base_options), **kfac_options)


def _with_decay(
    model: nn.Module, params: list[Any], weight_decay: float | None
) -> list[dict[str, Any]]:
    """Turn parameters or groups into groups of which each has one weight decay."""
    if params and isinstance(params[0], dict):
        if weight_decay is None:
            return params
        for group in params:
            if group.get("weight_decay", 0.0) not in (0.0, weight_decay):
                raise ValueError(
                    f"weight_decay={weight_decay} was given to optimizer_cls_and_kwargs and "
                    f"{group['weight_decay']} to TrainingArguments: give it in one place."
                )
    else:
        params = [{"params": params}]
    without = _without_decay(model)
    split = []
    for group in params:
        chosen = list(group["params"])
        decayed = [p for p in chosen if p not in without]
        others = [p for p in chosen if p in without]
        split.append({**group, "params": decayed, "weight_decay": weight_decay or 0.0})
        split.append({**group, "params": others, "weight_decay": 0.0})
    return [group for group in split if group["params"]]


def _without_decay(model: nn.Module) -> set[nn.Parameter]:
    found = set()
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            if isinstance(module, _NO_DECAY_TYPES) or _NO_DECAY_NAME.search(own.lower()):
                found.add(parameter)
    return found
