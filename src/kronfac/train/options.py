"""Which options each kind of optimizer takes in a recipe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from kronfac.kfac import KFAC
from kronfac.train.errors import UserError
from kronfac.train.hints import advice

_SGD = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
_ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_OTHER = ("other_lr", "other_betas", "other_eps", "other_weight_decay")
#: What a program sets itself, and what cannot be written in a recipe.
_NOT_HERE = ("self", "model", "base_optimizer", "grad_scaler", "process_group")

#: Keywords of ``kronfac.KFAC`` that a recipe may set.
KFAC_KEYS = tuple(
    name for name in inspect.signature(KFAC.__init__).parameters if name not in _NOT_HERE
)
#: The base optimizers that K-FAC may have, with their options.
BASES: dict[str, tuple[str, ...]] = {
    "sgd": ("base_momentum", "base_nesterov", "weight_decay"),
    "adamw": ("betas", "eps", "weight_decay"),
}

KEYS: dict[str, tuple[str, ...]] = {
    "sgd": _SGD,
    "adamw": _ADAMW,
    "muon": ("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "adjust_lr_fn", *_OTHER),
    "soap": (
        "lr",
        "betas",
        "shampoo_beta",
        "weight_decay",
        "precondition_frequency",
        "max_precondition_dim",
        "merge_dims",
        "normalize_gradient",
        "correct_bias",
        "eps",
    ),
    "kfac": (
        "lr",
        "base",
        *KFAC_KEYS,
        *dict.fromkeys(key for keys in BASES.values() for key in keys),
        "other",
        "other_lr",
        "other_betas",
        "other_momentum",
        "other_weight_decay",
    ),
}


def check_options(kind: str, options: Mapping[str, Any], where: str) -> None:
    """Raise unless every option is one of this kind and learning rates are usable."""
    for key, value in options.items():
        if key not in KEYS[kind]:
            raise UserError(f"unknown key {key!r} in [{where}]; {advice(key, KEYS[kind])}")
        if key in ("lr", "other_lr") and not _is_rate(value):
            raise UserError(f"{where}.{key} = {value!r} must be a number of at least 0.")
    if "lr" not in options:
        raise UserError(f"[{where}] has no 'lr'; give one, for example {where}.lr = 0.1")
    base = options.get("base", "sgd")
    if base not in BASES:
        raise UserError(f"{where}.base = {base!r} is not supported; {advice(str(base), BASES)}")
    if kind == "kfac":
        for key in options:
            own = [name for name, keys in BASES.items() if key in keys]
            if own and base not in own and key not in KFAC_KEYS:
                raise UserError(f"{where}.{key} is an option of base {own[0]!r}, not of {base!r}.")


def _is_rate(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < math.inf
