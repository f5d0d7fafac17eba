"""The examples on ranks run as they are; the batch file is read, not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
SCRIPT = EXAMPLES / "train_ddp.py"


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """Lines that the script prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_script_trains_and_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder = ("--checkpoint", str(tmp_path))
    first = torchrun(2, "--epochs", "1", "--distribute", "mem-opt", *folder)
    assert first[0] == "2 ranks, scheme mem-opt"
    assert first[1].startswith("epoch 1: accuracy ")
    assert "spread" in first[1]
    second = torchrun(1, "--epochs", "2", *folder)
    assert second[:2] == ["1 ranks, scheme of one process", "resumed after epoch 1"]
    accuracy = float(second[2].split()[3].rstrip("%;"))
    assert accuracy > 80
    assert len(second) == 3


@pytest.mark.slow
def test_the_batch_file_starts_the_script_with_arguments_that_it_has() -> None:
    path = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    call = text[text.index("srun torchrun") :]
    assert "examples/distributed/train_ddp.py" in call
    own = [word for word in call.partition("train_ddp.py")[2].split() if word.startswith("--")]
    assert own
    help_text = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    ).stdout
    launcher = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for option in own:
        assert option in help_text
    words = call.partition("examples/")[0].split()
    options = [word for word in words if word.startswith("--")]
    for option in options:
        assert option in launcher or option.replace("-", "_") in launcher
