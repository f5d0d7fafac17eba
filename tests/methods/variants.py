"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

import kronfac

#: Name of the method, and its own options.
Variant = tuple[str, dict[str, Any]]

VARIANTS: dict[str, Variant] = {
    "KFAC": ("KFAC", {}),
    "KFAC thermodynamic": (
        "KFAC",
        {"solver": kronfac.Thermodynamic(samples=500, bits=8, noise=0.01)},
    ),
    "KFAC thermodynamic systems": ("KFAC", {"solver": kronfac.Thermodynamic(method=2, bits=8)}),
    "TNGD": ("TNGD", {}),
    "TNGD cold, noisy": ("TNGD", {"start": "gradient", "time": 2.0, "noise": 1e-4}),
}
