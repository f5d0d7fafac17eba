"""Who makes steps orthogonal: the ranks that precondition a layer, and nobody else."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.rescale import factors
from tests.distributed.models import KINDS
from tests.distributed.ranks import run

#: Scheme, ranks, and how many of them work on each layer.
SCHEMES = [
    ("replicated", 2, 2),
    ("mem-opt", 2, 1),
    pytest.param(kronfac.Hybrid(0.5), 4, 2, marks=pytest.mark.slow),
    pytest.param("layer-parallel", 2, 1, marks=pytest.mark.slow),
]


def counted(rank: int, scheme: Any) -> tuple[int, int]:
    """Matrices that this rank makes orthogonal in two steps, and those of the model."""
    torch.manual_seed(0)
    kind = KINDS["cnn"]
    model = DistributedDataParallel(kind.model())
    base = SGD(model.parameters(), lr=0.01)
    optimizer = kronfac.KFAC(model, base, distribute=scheme, factor_every=1)
    matrices: list[Tensor] = []
    compute = factors.nearest_orthogonal_all

    def watched(stacks: Any, narrow: bool) -> Any:
        matrices.extend(one for stack in stacks for one in stack)
        return compute(stacks, narrow)

    with mock.patch.object(factors, "nearest_orthogonal_all", watched):
        for number in range(2):
            x, y = kind.batch(10 * number + rank, 3)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    of_model = sum(
        state.rule == "orthogonal" for state in optimizer._preconditioner.layers.values()
    )
    optimizer.detach()
    return len(matrices), of_model


@pytest.mark.parametrize(("scheme", "ranks", "workers"), SCHEMES)
def test_each_matrix_is_made_orthogonal_where_it_is_worked_on(
    scheme: Any, ranks: int, workers: int
) -> None:
    found = run(ranks, counted, scheme)
    of_model = found[0][1]
    assert of_model > 1
    assert sum(count for count, _ in found) == 2 * workers * of_model
    assert max(count for count, _ in found) < 2 * of_model or workers == ranks
