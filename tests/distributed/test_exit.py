"""How a rank ends: no thread of a process group may outlive the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, pathlib
import torch, torch.distributed as dist
import kronfac

def threads():
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same gradients everywhere
    model = torch.nn.Linear(3, 2)
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()

main()
atexit._run_exitfuncs()  # what the interpreter does first
assert threads() <= 3, threads()  # torch keeps those of the first group: a loop and two workers
"""


@pytest.mark.slow
def test_threads_of_groups_end_before_the_interpreter(tmp_path: Path) -> None:
    """One that still drops a tensor while the interpreter ends would abort the process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
