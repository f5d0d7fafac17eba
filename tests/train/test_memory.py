"""The peak of memory is that of a run, and not of the process."""

import sys
from pathlib import Path

import pytest
import torch

from kronfac.train.record import memory
from kronfac.train.run.run import train
from tests.train import small

CPU = torch.device("cpu")
_LARGE = 1 << 28


def _resets() -> bool:
    """Whether this system can forget a peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return sys.platform == "linux"


@pytest.mark.skipif(not _resets(), reason="this system cannot forget a peak")
def test_a_run_does_not_have_the_peak_of_an_earlier_one() -> None:
    recipe = small.recipe(train__steps=4)
    train(recipe, "sgd")  # loads what later runs find in memory
    torch.ones(_LARGE // 4)
    before = memory.peak_bytes(CPU)
    assert train(recipe, "sgd").memory < before - _LARGE // 2


def test_the_peak_grows_with_what_is_taken() -> None:
    memory.forget_peak(CPU)
    before = memory.peak_bytes(CPU)
    torch.ones(_LARGE // 4)
    assert memory.peak_bytes(CPU) > before + _LARGE // 2 or not _resets()


def test_without_the_files_of_linux_there_is_still_a_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "nothing")
    memory.forget_peak(CPU)
    assert memory.peak_bytes(CPU) > 1 << 20
