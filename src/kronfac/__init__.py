"""Second-order training for PyTorch models: K-FAC in one line."""

from typing import Any

import kronfac.requirements  # noqa: F401 - first of all: it says what is missing
from kronfac import layers, nn
from kronfac.adaptive.damping import LevenbergMarquardt
from kronfac.adaptive.interval import StaleInterval
from kronfac.adaptive.relative import Relative
from kronfac.layers import register_layer
from kronfac.methods.adafisher import AdaFisher
from kronfac.methods.cgfac import CGFAC
from kronfac.methods.dual_gauss_newton import DualGaussNewton
from kronfac.methods.ekfac.method import EKFAC
from kronfac.methods.empirical_ngd import EmpiricalNGD
from kronfac.methods.eva import Eva
from kronfac.methods.fngd import FNGD
from kronfac.methods.hylo import HyLo
from kronfac.methods.ief import IEF
from kronfac.methods.jorge import Jorge
from kronfac.methods.kfac.front import KFAC, param_groups
from kronfac.methods.kfac.thermodynamic import Thermodynamic
from kronfac.methods.kldwrm import KLDWRM
from kronfac.methods.mkor.method import MKOR
from kronfac.methods.mlbfgs import MLBFGS
from kronfac.methods.shampoo import Shampoo
from kronfac.methods.singd.method import SINGD
from kronfac.methods.tekfac import TEKFAC
from kronfac.methods.tkfac import TKFAC
from kronfac.methods.tngd import TNGD
from kronfac.optimizer.fronts import register_method
from kronfac.optimizer.mup import mup_init_, mup_param_groups
from kronfac.placement.scheme import Distribute, Hybrid
from kronfac.protocol import registry
from kronfac.protocol.method import Defaults, Method

__version__ = "0.1.0"

registry.register("KFAC", KFAC)
__all__ = [
    "CGFAC",
    "EKFAC",
    "FNGD",
    "IEF",
    "KFAC",
    "KLDWRM",
    "MKOR",
    "MLBFGS",
    "SINGD",
    "TEKFAC",
    "TKFAC",
    "TNGD",
    "AdaFisher",
    "Defaults",
    "Distribute",
    "DualGaussNewton",
    "EmpiricalNGD",
    "Eva",
    "HyLo",
    "Hybrid",
    "Jorge",
    "LevenbergMarquardt",
    "Method",
    "Relative",
    "Shampoo",
    "StaleInterval",
    "Thermodynamic",
    "__version__",
    "layers",
    "mup_init_",
    "mup_param_groups",
    "nn",
    "param_groups",
    "register_layer",
    "register_method",
]


def __getattr__(name: str) -> Any:
    """Methods that were registered later."""
    found = registry.optimizers().get(name)
    if found is None:
        raise AttributeError(f"module 'kronfac' has no attribute {name!r}")
    return found
