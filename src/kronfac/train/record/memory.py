"""Peak memory of a run."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def forget_peak(device: torch.device) -> None:
    """Reset :func:`peak_bytes`, and free what an earlier run of this process has left.

    Where a system cannot do that, the peak stays that of the process.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The most bytes since :func:`forget_peak`: of the GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
