"""The methods of the family with the options that change what they compute, by name of the case."""

from __future__ import annotations

from typing import Any

import kronfac

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
    "KFAC blocks": ("KFAC", {"block_dim": 3}),
    "EKFAC": ("EKFAC", {}),
    "EKFAC-gradient": ("EKFAC", {"moments": "gradient"}),
    "EKFAC-reduce": ("EKFAC", {"sharing": "reduce", "moments_decay": 0.9}),
    "EKFAC-narrow": ("EKFAC", {"max_dim": 5, "power": 0.5}),
    "TKFAC": ("TKFAC", {}),
    "TKFAC-cholesky": ("TKFAC", {"solver": "cholesky", "sharing": "reduce"}),
    "TEKFAC": ("TEKFAC", {}),
    "TEKFAC-gradient": ("TEKFAC", {"moments": "gradient"}),
    "CGFAC": ("CGFAC", {}),
    "CGFAC expand": ("CGFAC", {"sharing": "expand"}),
    "CGFAC empirical": ("CGFAC", {"matvec": "empirical"}),
    "SINGD": ("SINGD", {}),
    "SINGD diagonal": ("SINGD", {"structure": "diagonal"}),
    "SINGD blocks": ("SINGD", {"structure": "block-diagonal", "block_dim": 3}),
    "SINGD triangles": ("SINGD", {"structure": "lower-triangular"}),
    "SINGD hierarchical": ("SINGD", {"structure": "hierarchical", "block_dim": 4}),
    "SINGD toeplitz": ("SINGD", {"structure": "toeplitz"}),
    "SINGD reduce": ("SINGD", {"sharing": "reduce"}),
    "SINGD like K-FAC": ("SINGD", {"kfac_like": True}),
    "KFAC thermodynamic": (
        "KFAC",
        {"solver": kronfac.Thermodynamic(samples=500, bits=8, noise=0.01)},
    ),
    "KFAC thermodynamic systems": ("KFAC", {"solver": kronfac.Thermodynamic(method=2, bits=8)}),
    "TNGD": ("TNGD", {}),
    "TNGD cold, noisy": ("TNGD", {"start": "gradient", "time": 2.0, "noise": 1e-4}),
    "MLBFGS": ("MLBFGS", {}),
    "MLBFGS classical": ("MLBFGS", {"beta": 0.0, "bounds": (0.0, 1e9), "history": 3}),
    "KLDWRM": ("KLDWRM", {}),
    "KLDWRM, quadratic": ("KLDWRM", {"variant": "q", "rho": 0.9}),
    "Shampoo": ("Shampoo", {}),
    "Shampoo, sums": ("Shampoo", {"accumulate": "sum"}),
    "Shampoo, square roots": ("Shampoo", {"power": 0.5}),
    "Shampoo, narrow": ("Shampoo", {"max_dim": 4}),
    "Jorge": ("Jorge", {}),
    "Jorge, as printed": ("Jorge", {"series": "paper", "beta2": 0.0}),
    "Jorge, narrow": ("Jorge", {"max_dim": 4}),
    "AdaFisher": ("AdaFisher", {}),
    "AdaFisher true": ("AdaFisher", {"average": "true"}),
    "AdaFisher unscaled": ("AdaFisher", {"average": "true", "normalize": False}),
    "Eva": ("Eva", {}),
    "Eva input": ("Eva", {"form": "input"}),
    "Eva gradient": ("Eva", {"form": "gradient"}),
    "MKOR": ("MKOR", {}),
    "MKOR paper": ("MKOR", {"update": "paper"}),
    "MKOR code": ("MKOR", {"update": "code", "damping": 10.0}),
    "MKOR half": ("MKOR", {"half": True}),
    "MKOR hybrid": ("MKOR", {"hybrid": True}),
}

#: Those whose ranks sketch their own rows, so that they do not equal one process.
SKETCHED = frozenset({"HyLo", "HyLo kis", "HyLo switch"})
