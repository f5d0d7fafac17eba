"""Second-order training for PyTorch models: K-FAC in one line."""

from kronfac.damping import LevenbergMarquardt
from kronfac.kfac import KFAC, param_groups

__version__ = "0.1.0"
__all__ = ["KFAC", "LevenbergMarquardt", "__version__", "param_groups"]
