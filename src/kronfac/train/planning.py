"""What K-FAC would cost on many ranks, for ``kronfac plan``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from kronfac.distributed.units import Compute, Link
from kronfac.distributed.workload import unit_of
from kronfac.optimizer import Preconditioned
from kronfac.planner.choose import choose
from kronfac.train.errors import UserError
from kronfac.train.ranks import Ranks
from kronfac.train.recipe import Recipe
from kronfac.train.setup import prepare

_WIDTH = 256
