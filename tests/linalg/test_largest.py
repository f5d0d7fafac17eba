"""The largest entries of many tensors."""

from unittest import mock

import pytest
import torch

from kronfac.linalg import devices
from kronfac.linalg.largest import largest_entries


@pytest.mark.parametrize("few", [False, True])
def test_it_is_the_largest_absolute_value_and_not_a_number_where_one_entry_is_none(few):
    tensors = [torch.tensor([1.0, -3.0, 2.0]), torch.eye(3), torch.tensor([[1.0, torch.nan]])]
    tensors += [torch.tensor([-torch.inf, 1.0]), torch.tensor([3e38, -3e38]), torch.zeros(2, 2)]
    with mock.patch.object(devices, "wants_few_kernels", return_value=few):
        found = largest_entries([*tensors, torch.randn(4, 4).diagonal()])
    expected = [3.0, 1.0, torch.nan, torch.inf, 3e38, 0.0]
    torch.testing.assert_close(found[:-1], torch.tensor(expected), equal_nan=True)
