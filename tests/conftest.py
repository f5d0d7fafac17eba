"""Fixtures for all tests, and the marks of known bugs."""

from collections.abc import Iterator

import pytest
import torch

from tests.known_bugs import KNOWN_BUGS


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Run in float64, so that equal formulas give equal numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        reason = KNOWN_BUGS.get(item.name) or KNOWN_BUGS.get(item.name.partition("[")[0])
        if reason is not None and item.path.parent == item.config.rootpath / "tests":
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
