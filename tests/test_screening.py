"""What is not finite adds nothing, whether contributions are looked at one by one or by shape."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from kronfac.protocol.block import Block
from kronfac.statistics import screening
from kronfac.statistics.pending import Pending, Unscreened
from kronfac.statistics.screening import _zero_alike
from tests.operations import Operations


@pytest.mark.parametrize("most", [2**26, 8])
def test_equal_shapes_are_zeroed_together(most: int) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in ((2, 2), (3, 3), (2, 2), (2, 2), (2,), (3, 3))]
    values[0][1, 1], values[5][0, 2] = math.nan, math.inf
    expected = [v.clone() if v.isfinite().all() else torch.zeros_like(v) for v in values]
    pending, nothing = mock.Mock(spec=Pending, block=mock.Mock(spec=Block)), Unscreened({})
    entries = [(pending, nothing, "A", value) for value in values]
    bad = torch.tensor([not value.isfinite().all() for value in values])
    with mock.patch.object(screening, "_MOST_ELEMENTS", most), Operations() as counted:
        _zero_alike(entries, bad)
    assert all(map(torch.equal, values, expected))
    assert counted.kernels["masked_fill_"] == (3 if most > 8 else 5)
