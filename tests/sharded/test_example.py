"""The example in torchtitan's order runs, learns, and goes on with other ranks."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed" / "train_fsdp2.py"

pytestmark = pytest.mark.slow


def torchrun(ranks: int, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def loss_of(line: str) -> float:
    return float(line.split()[-1])


def test_the_example_learns_and_resumes(tmp_path: Path) -> None:
    folder = ("--checkpoint", str(tmp_path / "saved"))
    first = torchrun(2, "--steps", "40", *folder)
    assert first[0] == "2 ranks, 21 layers, step 0"
    second = torchrun(3, "--steps", "80", "--no-compile", *folder)
    assert second[0] == "3 ranks, 21 layers, step 40"
    untrained = math.log(32)  # as many words as there are
    assert loss_of(first[-1]) < untrained / 5
    assert loss_of(second[1]) < untrained / 5


def test_replicas_and_ranks_change_nothing(tmp_path: Path) -> None:
    one = torchrun(1, "--steps", "20", "--no-compile")
    several = torchrun(4, "--steps", "20", "--no-compile", "--replicas", "2")
    assert abs(loss_of(one[-1]) - loss_of(several[-1])) < 0.01
