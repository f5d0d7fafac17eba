"""The keywords that every method shares, typed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch

from kronfac.adaptive.damping import LevenbergMarquardt
from kronfac.adaptive.interval import Interval
from kronfac.adaptive.relative import Relative
from kronfac.options.config import (
    Fisher,
    Missing,
    Number,
    Pattern,
    Products,
    Rescale,
    RowsOption,
)
from kronfac.placement.scheme import Distribute, Hybrid
from kronfac.protocol.method import Defaults


class Common(TypedDict, total=False):
    """See :class:`kronfac.KFAC` for what they mean."""

    damping: Number | LevenbergMarquardt | Relative
    factor_every: Interval
    refresh_every: Interval
    decay: Number
    fisher: Fisher
    momentum: float
    nesterov: bool
    rescale: Rescale | None
    kl_clip: float
    trust_radius: float
    early_refresh: bool
    stagger: bool
    rows: RowsOption
    share_inputs: bool
    row_form: bool
    loss_average: Literal["batch", "token"] | float | None
    include: Pattern | Sequence[Pattern] | None
    exclude: Pattern | Sequence[Pattern] | None
    on_missing: Missing
    grad_scaler: torch.amp.GradScaler | None
    max_grad_norm: float | None
    products: Products
    distribute: str | Hybrid | Distribute
    process_group: Any


#: Values of those that no method says otherwise of.
DEFAULTS: dict[str, Any] = {
    "momentum": 0.0,
    "nesterov": False,
    "kl_clip": 1e-3,
    "trust_radius": 1e-3,
    "early_refresh": True,
    "stagger": False,
    "rows": "auto",
    "share_inputs": True,
    "row_form": True,
    "loss_average": "batch",
    "include": None,
    "exclude": None,
    "on_missing": "warn",
    "grad_scaler": None,
    "max_grad_norm": None,
    "products": "auto",
    "distribute": "auto",
    "process_group": None,
}


def all_defaults(defaults: Defaults) -> dict[str, Any]:
    """Every common keyword with its value where a user says nothing, in the order of help."""
    return {**vars(defaults), **DEFAULTS}
