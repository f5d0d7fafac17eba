"""Lightning's ModelParallelStrategy; Accelerate and Trainer, which shard after construction."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def largest_difference(script: str, *arguments: str) -> float:
    """From the parameters of one process, as both ranks print it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(HERE / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(one) for one in re.findall(r"difference ([^;]*);", done.stdout)]
    assert len(found) == 2
    return max(found)


@pytest.mark.parametrize("trainer", ["lightning", "accelerate", "trainer"])
def test_a_trainer_ends_where_a_plain_loop_ends(trainer: str) -> None:
    assert largest_difference("trainers.py", trainer) < 1e-9


@pytest.mark.parametrize("trainer", ["lightning", "accelerate", "accelerate in full", "trainer"])
def test_a_trainer_resumes_where_it_saved(trainer: str, tmp_path: Path) -> None:
    assert largest_difference("resuming.py", trainer, str(tmp_path / "saved")) < 1e-9
