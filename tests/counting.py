"""How much work something is, on a machine that may be busy with anything else."""

import cProfile
import pstats
from collections.abc import Callable
from typing import Any


def calls(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Function calls that ``function(*args)`` takes, those into C included, and its result."""
    profile = cProfile.Profile()
    result = profile.runcall(function, *args)
    return pstats.Stats(profile).total_calls, result  # type: ignore[attr-defined]
