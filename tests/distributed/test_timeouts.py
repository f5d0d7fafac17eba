"""Messages of ours fail after the time that the user gave, in every group that we make."""

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kronfac
from kronfac.distributed.distributed import Distributed
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.training import loss_of


def limits(optimizer: kronfac.KFAC) -> set[float]:
    """Seconds after which messages fail, over all groups."""
    coordinator = optimizer._preconditioner.coordinator
    assert isinstance(coordinator, Distributed)
    groups = [one.group for one in coordinator.world._collectives.values() if one.group is not None]
    assert len(groups) >= 2
    cpu = torch.device("cpu")
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}


def build(scheme: Any, group: Any = None) -> kronfac.KFAC:
    """With every group that it will ever need: one step has been taken."""
    kind = KINDS["mlp"]
    model = kind.model()
    if scheme != "layer-parallel":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    base = BASES["sgd"](model)
    optimizer = kronfac.KFAC(model, base, distribute=scheme, process_group=group)
    loss_of(model, kind.batch(0, 4)).backward()
    optimizer.step()
    return optimizer


def look(rank: int, scheme: Any) -> list[set[float]]:
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=177))
    given = build(scheme, group)
    found = [limits(build(scheme)), limits(given)]
    if scheme == "layer-parallel":  # DDP in a group cannot be copied
        found.append(limits(copy.deepcopy(given)))
    return found


@pytest.mark.parametrize(
    "scheme", ["auto", "comm-opt", kronfac.Hybrid(0.5), "layer-parallel"], ids=str
)
def test_groups_of_ours_have_the_timeout_of_the_group_that_was_given(scheme: Any) -> None:
    for found in run(4, look, scheme, timeout=155):
        assert found[:2] == [{155}, {177}]
        assert found[2:] in ([], [{177}])
