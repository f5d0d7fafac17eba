"""Optimizers of a recipe, by kind."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from kronfac.layers.selection import unwrap
from kronfac.methods.kfac.front import param_groups
from kronfac.placement.scheme import Hybrid
from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Timetable
from kronfac.train.optim.composite import Composite
from kronfac.train.optim.kfac_schedules import SCHEDULED, as_callable
from kronfac.train.optim.muon import muon_with_adamw
from kronfac.train.recipe.options import method_keys, methods
from kronfac.train.recipe.recipe import OptimizerPart

#: Packages that some kinds of optimizers come from.
_PACKAGES = {"soap": "pytorch_optimizer"}
#: What recipes say for ``None``, which TOML does not know, by option.
_NOTHING = {"rescale": "none", "rows": "all", "block_dim": "none"}


def missing_package(kind: str) -> str | None:
    """The package that a kind of optimizer needs, if it is not installed."""
    package = _PACKAGES.get(kind)
    return package if package and importlib.util.find_spec(package) is None else None


class Steppable(Protocol):
    """What the loop needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups whose learning rates the schedule sets."""
        ...

    def step(self) -> Any:
        """Take a step."""
        ...

    def zero_grad(self) -> None:
        """Clear gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint contains."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        ...


def build(part: OptimizerPart, model: nn.Module, *, timetable: Timetable, kind: str) -> Steppable:
    """The optimizer of a table for a model, wrapped or not; ``kind`` is that of the data.

    Each group then has its ``initial_lr``, of which the schedule takes a share.
    """
    options = _tuples(part.options)
    try:
        optimizer = _build(part.kind, unwrap(model), model, options, timetable, kind)
    except (ValueError, TypeError, IndexError) as error:
        sentence = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"[optimizers.{part.name}]: {sentence}.") from error
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _build(
    name: str,
    plain: nn.Module,
    model: nn.Module,
    options: dict[str, Any],
    timetable: Timetable,
    kind: str,
) -> Steppable:
    if name == "sgd":
        return torch.optim.SGD(plain.parameters(), **options)
    if name == "adamw":
        return torch.optim.AdamW(plain.parameters(), **options)
    if name == "muon":
        return _muon(plain, options)
    if name == "soap":
        return _soap(plain, options)
    return _method(name, model, options, timetable, kind)


def _muon(model: nn.Module, options: dict[str, Any]) -> Steppable:
    own, other = _split(options)
    other.setdefault("lr", 1e-3)
    other.setdefault("weight_decay", own.get("weight_decay", 0.0))
    own.setdefault("weight_decay", 0.0)
    return muon_with_adamw(model, own, other)


def _soap(model: nn.Module, options: dict[str, Any]) -> Steppable:
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise UserError(
            "optimizer 'soap' needs the package pytorch_optimizer: pip install pytorch_optimizer"
        ) from error
    optimizer: Optimizer = SOAP(model.parameters(), **options)
    return optimizer


def _method(
    name: str, model: nn.Module, options: dict[str, Any], timetable: Timetable, kind: str
) -> Steppable:
    """K-FAC or another registered method."""
    make = methods()[name]
    own = {key: options[key] for key in method_keys(name) if key in options}
    base = {key: value for key, value in options.items() if key not in own}
    for option in SCHEDULED:
        if option in own:
            own[option] = as_callable(option, own[option], timetable)
    for option, word in _NOTHING.items():
        if own.get(option) == word:
            own[option] = None
    if isinstance(own.get("distribute"), float):
        own["distribute"] = Hybrid(own["distribute"])
    if kind == "text":
        own.setdefault("loss_average", "token")
    groups = _kfac_groups(unwrap(model), base, own)
    if base.get("other", "same") == "same":
        found: Steppable = make(model, _kfac_base(groups, base), **own)
        return found
    matrices, *rest = groups
    kfac = make(model, _kfac_base([matrices], base), **own)
    return Composite(kfac, _adamw_on_rest(rest, base))


def _kfac_groups(
    model: nn.Module, base: Mapping[str, Any], own: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Parameter groups: those that K-FAC preconditions, and the others.

    With unit and orthogonal steps K-FAC's momentum does not reach the others. They get the same
    from the base optimizer.
    """
    own_length = own.get("rescale") in ("unit", "orthogonal")
    given = any(key in base for key in ("other_lr", "other_momentum", "other_weight_decay"))
    apart = given or own_length or base.get("other") == "adamw"
    if not apart:
        return [{"params": list(model.parameters()), "lr": base["lr"]}]
    other: dict[str, Any] = {}
    if base.get("base", "sgd") == "sgd":
        same = own.get("momentum", 0.0) if own_length else 0.0
        other["momentum"] = base.get("other_momentum", same)
        other["nesterov"] = bool(own.get("nesterov", False) and other["momentum"])
    if "other_weight_decay" in base:
        other["weight_decay"] = base["other_weight_decay"]
    chosen = {key: own[key] for key in ("include", "exclude") if key in own}
    rate = base.get("other_lr", base["lr"])
    return param_groups(model, lr=base["lr"], other_lr=rate, **chosen, **other)


def _adamw_on_rest(groups: list[dict[str, Any]], base: Mapping[str, Any]) -> Optimizer | None:
    """AdamW for what K-FAC does not step: embeddings and norms."""
    if not groups:
        return None
    options = {"lr": base.get("other_lr", base["lr"])}
    options |= {"weight_decay": base.get("other_weight_decay", 0.0)}
    if "other_betas" in base:
        options["betas"] = base["other_betas"]
    return torch.optim.AdamW([{"params": group["params"]} for group in groups], **options)


def _kfac_base(groups: list[dict[str, Any]], base: Mapping[str, Any]) -> Optimizer:
    lr, decay = base["lr"], base.get("weight_decay", 0.0)
    if base.get("base", "sgd") == "adamw":
        options = {key: base[key] for key in ("betas", "eps") if key in base}
        return torch.optim.AdamW(groups, lr=lr, weight_decay=decay, **options)
    return torch.optim.SGD(
        groups,
        lr=lr,
        momentum=base.get("base_momentum", 0.0),
        nesterov=base.get("base_nesterov", False),
        weight_decay=decay,
    )


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for the main part, and those that begin with ``other_`` for the rest."""
    mark = "other_"
    own = {key: value for key, value in options.items() if not key.startswith(mark)}
    other = {key[len(mark) :]: value for key, value in options.items() if key.startswith(mark)}
    return own, other


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with tuples for TOML's lists, which torch wants for betas."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
