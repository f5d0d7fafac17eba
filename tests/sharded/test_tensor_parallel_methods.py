"""Every method under tensor parallelism, alone and with FSDP2, equals one process (a few minutes)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kronfac
from kronfac.protocol.registry import optimizers
from tests.distributed.equivalence import assert_near, case, double_precision
from tests.distributed.models import BASES
from tests.distributed.ranks import run
from tests.sharded.harness import ignore_advice, whole_parameters
from tests.sharded.test_tensor_parallel import Decoder, parallelize, steps

pytestmark = pytest.mark.slow


def made(model: nn.Module, method: str, factor_every: int) -> Any:
    options = dict(case("mlp", factor_every=factor_every, momentum=0.5).options)
    if method == "HyLo":  # what it leaves out depends on who has which rows
        options |= {"mode": "kis", "rank": 1.0}
    return getattr(kronfac, method)(model, BASES["momentum"](model), **options)


@functools.cache
def expected(method: str, factor_every: int) -> dict[str, Tensor]:
    with double_precision():
        model = Decoder()
        steps(model, made(model, method, factor_every), slice(0, 12))
        return {key: p.detach().clone() for key, p in model.named_parameters()}


def trained(
    rank: int, method: str, factor_every: int, data: int, names: tuple[str, str] = ("dp", "tp")
) -> dict[str, Tensor]:
    ignore_advice()
    with double_precision():
        mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=names)
        model = Decoder()
        parallelize(model, mesh["tp"], "all")
        if data > 1:
            fully_shard(model, mesh=mesh["dp"])
        size = 12 // data
        start = mesh["dp"].get_local_rank() * size
        steps(model, made(model, method, factor_every), slice(start, start + size))
        return whole_parameters(model)


@pytest.mark.parametrize("factor_every", [1, 2])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("method", sorted(optimizers()))
def test_every_method(method: str, data: int, factor_every: int) -> None:
    for found in run(2 * data, trained, method, factor_every, data):
        assert_near(found, expected(method, factor_every), f"{method}, {data} x 2")


@pytest.mark.parametrize("method", ["EmpiricalNGD", "IEF", "HyLo"])
def test_rows_are_gathered_once_whichever_ranks_see_them(method: str) -> None:
    for found in run(4, trained, method, 1, 2, ("tp", "dp")):
        assert_near(found, expected(method, 1), f"{method}, tensor parallelism outside")
