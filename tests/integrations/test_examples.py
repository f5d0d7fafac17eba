"""The example scripts run as they are, learn, say nothing odd and leave nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "script",
    ["lightning_digits.py", "huggingface_trainer.py", "accelerate_loop.py", "plain_loop.py"],
)
def test_the_loss_falls(script: str, tmp_path: Path) -> None:
    last = lines_of(script, tmp_path)[-1]
    found = re.fullmatch(r"loss (\d+\.\d+) -> (\d+\.\d+)", last)
    assert found, last
    before, after = map(float, found.groups())
    assert after < 0.8 * before


def test_agents_learn_by_steps_of_about_their_radius(tmp_path: Path) -> None:
    divergence, rewards = lines_of("multi_agent.py", tmp_path)
    before, after = map(float, re.findall(r"-\d+\.\d+", rewards))
    assert after > 0.8 * before  # they are negative
    assert 0.005 < float(re.findall(r"\d+\.\d+", divergence)[0]) < 0.03  # the radius is 0.01


def lines_of(script: str, tmp_path: Path) -> list[str]:
    """What a script prints."""
    # A path of its own to the modules, and one thread: the networks are small.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--steps", "40"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "kronfac" not in run.stderr
    assert list(tmp_path.iterdir()) == []
    return run.stdout.splitlines()
