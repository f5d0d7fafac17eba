"""Fixtures for all tests."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator

# Tests run side by side, and so do the ranks and programs that some of them start: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Two runs in two processes are compared bit for bit: MKL rounds as its memory happens to lie otherwise.
os.environ.setdefault("MKL_CBWR", "AUTO")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Other work on the machine is no failure, and neither is an example that nobody has ever met:
# `--hypothesis-profile explore` looks for those.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", patient)
settings.register_profile("kronfac", patient, derandomize=True)
settings.load_profile("kronfac")


#: How many modules were imported when the collector was last told to leave alone what there is.
_frozen = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give every test the same random numbers, whichever tests have run before it in this process.

    What imports leave behind is not looked at again by the garbage collector: runs and optimizers call
    it, and with trainers and compilers in memory that takes a second each time.
    """
    global _frozen
    random.seed(0)
    torch.manual_seed(0)
    if len(sys.modules) > _frozen + 50:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Run in float64, so that equal formulas give equal numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """Hear of a closed terminal, also where tests run under ``nohup``, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
