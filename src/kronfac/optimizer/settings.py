"""From the keywords of a method's optimizer to what the engine works with."""

from __future__ import annotations

from typing import Any

from kronfac.adaptive.damping import as_schedule
from kronfac.adaptive.interval import as_intervals
from kronfac.optimizer.common import Common, all_defaults
from kronfac.options.config import (
    Options,
    Schedules,
    as_patterns,
    is_adaptive,
    resolve_rescale,
)
from kronfac.protocol.method import Defaults, Method

#: The damping of quadratic steps if none is given: they need one in units of the loss's curvature.
_QUADRATIC_DAMPING = 1e-3


def with_defaults(defaults: Defaults, common: Common) -> dict[str, Any]:
    """Every common keyword with its value, in the order in which help shows them."""
    values = all_defaults(defaults)
    unknown = [name for name in common if name not in values]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; choose among {', '.join(values)}.")
    if common.get("rescale") == "quadratic":
        values["damping"] = _QUADRATIC_DAMPING
    return {**values, **common}


def engine_options(method: Method, values: dict[str, Any], schedules: Schedules) -> Options:
    """Those that do not change during training."""
    adaptive = is_adaptive(schedules.get("damping"))
    options = Options(
        fisher=values["fisher"],
        momentum=values["momentum"],
        nesterov=values["nesterov"],
        rescale=resolve_rescale(values["rescale"], adaptive),
        kl_clip=values["kl_clip"],
        trust_radius=values["trust_radius"],
        early_refresh=values["early_refresh"],
        stagger=values["stagger"],
        rows=values["rows"],
        share_inputs=values["share_inputs"],
        row_form=values["row_form"],
        loss_average=values["loss_average"],
        include=as_patterns(values["include"], "include"),
        exclude=as_patterns(values["exclude"], "exclude"),
        on_missing=values["on_missing"],
        max_grad_norm=values["max_grad_norm"],
        products=values["products"],
    )
    method.check(options)
    return options


def schedules_of(values: dict[str, Any]) -> Schedules:
    """Those that may change."""
    intervals = as_intervals(values["factor_every"], values["refresh_every"])
    return Schedules(
        as_schedule(values["damping"]), *intervals, values["decay"], values["momentum"]
    )
