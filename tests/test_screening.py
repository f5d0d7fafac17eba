"""What is not finite adds nothing, whether contributions are looked at one by one or by shape."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from kronfac.statistics import screening
from tests.operations import Operations


@pytest.mark.parametrize("most", [2**26, 8])
def test_contributions_are_zeroed_side_by_side(most: int) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in ((2, 2), (3, 3), (2, 2), (2, 2), (2,), (3, 3))]
    values[3] = values[3].mT
    values[0][1, 1], values[5][0, 2] = math.nan, math.inf
    expected = [v.clone() if v.isfinite().all() else torch.zeros_like(v) for v in values]
    bad = torch.tensor([not value.isfinite().all() for value in values])
    with mock.patch.object(screening, "_MOST_ELEMENTS", most), Operations() as counted:
        screening.zero_together(values, bad)
    assert all(map(torch.equal, values, expected))
    assert counted.kernels["masked_fill_"] == (1 if most > 8 else 5)
