"""Lightning's ModelParallelStrategy; Accelerate and Trainer, which shard after construction."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trainers.py")


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "accelerate", "trainer"])
def test_a_trainer_ends_where_a_plain_loop_ends(trainer: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), trainer]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(one) for one in re.findall(r"difference ([^;]*);", done.stdout)]
    assert len(found) == 2
    assert max(found) < 1e-9
