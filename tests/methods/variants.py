"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

#: Name of the method, and its own options.
Variant = tuple[str, dict[str, Any]]

VARIANTS: dict[str, Variant] = {
    "DualGaussNewton": ("DualGaussNewton", {}),
    "DualGaussNewton 3": ("DualGaussNewton", {"iterations": 3}),
    "EmpiricalNGD": ("EmpiricalNGD", {}),
    "EmpiricalNGD gradients": ("EmpiricalNGD", {"keep": "gradients"}),
    "FNGD": ("FNGD", {}),
    "HyLo": ("HyLo", {}),
    "HyLo kis": ("HyLo", {"mode": "kis", "rank": 0.5}),
    "HyLo switch": ("HyLo", {"mode": ((0, "kid"), (3, "kis")), "rank": 0.5}),
    "HyLo exact": ("HyLo", {"mode": "kis", "rank": 1.0}),
    "IEF": ("IEF", {}),
    "KFAC": ("KFAC", {}),
    "MLBFGS": ("MLBFGS", {}),
    "MLBFGS classical": ("MLBFGS", {"beta": 0.0, "bounds": (0.0, 1e9), "history": 3}),
}

#: Those whose ranks sketch their own rows, so that they do not equal one process.
SKETCHED = frozenset({"HyLo", "HyLo kis", "HyLo switch"})
