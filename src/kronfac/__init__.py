"""Second-order training for PyTorch models: K-FAC in one line."""

import kronfac.requirements  # noqa: F401 - first of all: it says what is missing
from kronfac import layers
from kronfac.adaptive.damping import LevenbergMarquardt
from kronfac.adaptive.interval import StaleInterval
from kronfac.layers import register_layer
from kronfac.methods.kfac.front import KFAC, param_groups
from kronfac.placement.scheme import Distribute, Hybrid

__version__ = "0.1.0"
__all__ = [
    "KFAC",
    "Distribute",
    "Hybrid",
    "LevenbergMarquardt",
    "StaleInterval",
    "__version__",
    "layers",
    "param_groups",
    "register_layer",
]
