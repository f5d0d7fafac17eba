"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

#: Name of the method, and its own options.
Variant = tuple[str, dict[str, Any]]

VARIANTS: dict[str, Variant] = {
    "EmpiricalNGD": ("EmpiricalNGD", {}),
    "EmpiricalNGD gradients": ("EmpiricalNGD", {"keep": "gradients"}),
    "KFAC": ("KFAC", {}),
}
