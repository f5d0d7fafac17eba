"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

#: Name of the method, and its own options.
Variant = tuple[str, dict[str, Any]]

VARIANTS: dict[str, Variant] = {
    "AdaFisher": ("AdaFisher", {}),
    "AdaFisher true": ("AdaFisher", {"average": "true"}),
    "AdaFisher unscaled": ("AdaFisher", {"average": "true", "normalize": False}),
    "Eva": ("Eva", {}),
    "Eva input": ("Eva", {"form": "input"}),
    "Eva gradient": ("Eva", {"form": "gradient"}),
    "KFAC": ("KFAC", {}),
    "MKOR": ("MKOR", {}),
    "MKOR paper": ("MKOR", {"update": "paper"}),
    "MKOR code": ("MKOR", {"update": "code", "damping": 10.0}),
    "MKOR half": ("MKOR", {"half": True}),
    "MKOR hybrid": ("MKOR", {"hybrid": True}),
}
