"""Statistics that have left and are then taken back: the last word counts, with overlap or without."""

from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import assert_near, double_precision, same_bits
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.training import parameters


def trained(rank: int, settings: dict[str, Any]) -> Any:
    """One rank tries another loss first, and takes its gradients back when its statistics have left."""
    kind = KINDS["mlp"]
    with double_precision():
        plain = kind.model()
        model = DistributedDataParallel(plain)
        options: dict[str, Any] = {"factor_every": 1, "refresh_every": 2, "damping": 0.01}
        base = SGD(model.parameters(), lr=0.05)
        distribute = kronfac.Distribute(**settings)
        optimizer = kronfac.KFAC(model, base, distribute=distribute, **options)
        for number in range(6):
            x, y = kind.batch(10 * number + rank, 4)
            optimizer.zero_grad()
            with model.no_sync():
                scores = model(x)
                weight = 3.0 if rank == 1 else 1.0
                (weight * F.cross_entropy(scores, y)).backward(retain_graph=True)
            optimizer.zero_grad()
            F.cross_entropy(scores, y).backward()
            for parameter in model.parameters():  # this graph was made without averaging
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
        assert same_bits(plain)
        return parameters(plain)


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt", "mem-opt"])
def test_the_last_word_counts(scheme: str) -> None:
    early = run(2, trained, {"scheme": scheme})
    late = run(2, trained, {"scheme": scheme, "overlap": False})
    for ours, theirs in zip(early, late, strict=True):
        assert_near(ours, theirs, scheme)
