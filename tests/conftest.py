"""Fixtures for all tests."""

import os
from collections.abc import Iterator

# Tests run side by side, and so do the ranks and programs that some of them start: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("kronfac", deadline=None)  # other work on the machine is no failure
settings.load_profile("kronfac")


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Run in float64, so that equal formulas give equal numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
