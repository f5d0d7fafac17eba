"""Second-order training for PyTorch models: K-FAC in one line."""

from typing import Any

import kronfac.requirements  # noqa: F401 - first of all: it says what is missing
from kronfac import layers
from kronfac.adaptive.damping import LevenbergMarquardt
from kronfac.adaptive.interval import StaleInterval
from kronfac.adaptive.relative import Relative
from kronfac.layers import register_layer
from kronfac.methods.adafisher import AdaFisher
from kronfac.methods.eva import Eva
from kronfac.methods.kfac.front import KFAC, param_groups
from kronfac.methods.mkor.method import MKOR
from kronfac.optimizer.fronts import register_method
from kronfac.placement.scheme import Distribute, Hybrid
from kronfac.protocol import registry
from kronfac.protocol.method import Defaults, Method

__version__ = "0.1.0"

registry.register("KFAC", KFAC)
__all__ = [
    "KFAC",
    "MKOR",
    "AdaFisher",
    "Defaults",
    "Distribute",
    "Eva",
    "Hybrid",
    "LevenbergMarquardt",
    "Method",
    "Relative",
    "StaleInterval",
    "__version__",
    "layers",
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
