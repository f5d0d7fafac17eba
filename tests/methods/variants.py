"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

#: Name of the method, and its own options.
Variant = tuple[str, dict[str, Any]]

VARIANTS: dict[str, Variant] = {
    "KFAC": ("KFAC", {}),
    "KLDWRM": ("KLDWRM", {}),
    "KLDWRM, quadratic": ("KLDWRM", {"variant": "q", "rho": 0.9}),
    "Shampoo": ("Shampoo", {}),
    "Shampoo, sums": ("Shampoo", {"accumulate": "sum"}),
    "Shampoo, square roots": ("Shampoo", {"power": 0.5}),
    "Shampoo, narrow": ("Shampoo", {"max_dim": 4}),
    "Jorge": ("Jorge", {}),
    "Jorge, as printed": ("Jorge", {"series": "paper", "beta2": 0.0}),
    "Jorge, narrow": ("Jorge", {"max_dim": 4}),
}
