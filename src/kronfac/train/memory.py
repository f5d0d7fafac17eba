"""How much memory a run has taken."""

from __future__ import annotations

import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """The most bytes so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
