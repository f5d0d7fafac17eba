"""Where a run took place."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from kronfac.distributed.consistency import version
from kronfac.train.launch.ranks import Ranks


def describe(ranks: Ranks, device: torch.device, source: object) -> dict[str, Any]:
    """Versions, the machine, and data that may be other there: published sets have known checksums."""
    return {
        "kronfac": version("kronfac"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "world": ranks.size,
        "data_sha256": getattr(source, "sha256", None),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
