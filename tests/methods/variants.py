"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

#: Name of the method, and its own options.
Variant = tuple[str, dict[str, Any]]

VARIANTS: dict[str, Variant] = {
    "KFAC": ("KFAC", {}),
    "EKFAC": ("EKFAC", {}),
    "EKFAC-gradient": ("EKFAC", {"moments": "gradient"}),
    "EKFAC-reduce": ("EKFAC", {"sharing": "reduce", "moments_decay": 0.9}),
    "EKFAC-narrow": ("EKFAC", {"max_dim": 5, "power": 0.5}),
    "TKFAC": ("TKFAC", {}),
    "TKFAC-cholesky": ("TKFAC", {"solver": "cholesky", "sharing": "reduce"}),
    "TEKFAC": ("TEKFAC", {}),
    "TEKFAC-gradient": ("TEKFAC", {"moments": "gradient"}),
}
