"""Meshes as trainers of large models make them: dimensions that are sliced, flattened and unflattened."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import kronfac
from tests.distributed.equivalence import Parameters, alone, assert_near, case, double_precision
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.sharded import test_tensor_parallel
from tests.sharded.harness import Way, ignore_advice, shard, train, whole_parameters

MLP = case("mlp", steps=4, momentum=0.9)
STAGES = [MLP, case("gated", steps=4, max_dim=8)]


def flattened(sizes: dict[str, int], *kept: str) -> Any:
    """Dimensions of a mesh, of which those that are not kept are sharded as one."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    rest = mesh[tuple(name for name in sizes if name not in kept)]._flatten("fsdp")
    return DeviceMesh._concatenate([mesh[kept], rest]) if kept else rest


def unflattened(sizes: dict[str, int], *names: str) -> Any:
    """Some dimensions of all ranks, which torchtitan calls the world."""
    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("world",))
    return world._unflatten(0, tuple(sizes.values()), tuple(sizes))[names]


MESHES: dict[str, Any] = {
    "flattened": lambda size: flattened({"shard": size, "context": 1}),
    "contexts": lambda size: flattened({"shard": 1, "context": size}),
    "unflattened": lambda size: unflattened({"pp": 1, "fsdp": size, "tp": 1}, "fsdp"),
    "replicas": lambda size: flattened({"copy": 2, "shard": size // 2, "context": 1}, "copy"),
    "replicas of all": lambda size: unflattened({"copy": 2, "fsdp": size // 2}, "copy", "fsdp"),
}


def on_mesh(rank: int, name: str) -> tuple[Parameters, int]:
    with double_precision():
        model = shard(KINDS["mlp"].model(), Way(), mesh=MESHES[name](dist.get_world_size()))
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **dict(MLP.options))
        train(rank, model, optimizer, MLP)
        return whole_parameters(model), optimizer.placement.grid.workers


@pytest.mark.parametrize("name", ["flattened", "unflattened"])
def test_dimensions_of_other_meshes(name: str) -> None:
    for found, rows in run(2, on_mesh, name):
        assert_near(found, alone(MLP).parameters, name)
        assert rows == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh(name: str) -> None:
    for found, rows in run(4, on_mesh, name):
        assert_near(found, alone(MLP).parameters, name)
        assert rows == (2 if "replicas" in name else 1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["root", "unflattened"])
def test_replicas_and_shards_and_tensor_parallelism(sizes: tuple[int, ...], kind: str) -> None:
    for found in run(4, in_three_dimensions, sizes, kind):
        assert_near(found, test_tensor_parallel.expected("graft"), f"{sizes} {kind}")


def in_three_dimensions(rank: int, sizes: tuple[int, ...], kind: str) -> Parameters:
    ignore_advice()
    named = dict(zip(("copy", "fsdp", "tp"), sizes, strict=True))
    if kind == "root":
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(named))
    else:
        mesh = unflattened(named, *named)
    with double_precision():
        model = test_tensor_parallel.Decoder()
        test_tensor_parallel.parallelize(model, mesh["tp"], "all")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["copy", "fsdp"])
        options = test_tensor_parallel.options_of("graft")
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **options)
        start = rank // 2 * 6
        test_tensor_parallel.steps(model, optimizer, slice(start, start + 6))
        return whole_parameters(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graft", "rows"])
def test_tensor_parallelism_in_the_outer_dimension(name: str) -> None:
    """Ranks that see the same samples, and take the same rows, are not neighbours."""
    for found in run(4, with_outer_tensors, name):
        assert_near(found, test_tensor_parallel.expected(name), name)


def with_outer_tensors(rank: int, name: str) -> Parameters:
    ignore_advice()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "fsdp"))
    with double_precision():
        model = test_tensor_parallel.Decoder()
        test_tensor_parallel.parallelize(model, mesh["tp"], "all")
        fully_shard(model, mesh=mesh["fsdp"])
        options = test_tensor_parallel.options_of(name)
        optimizer = kronfac.KFAC(model, BASES["momentum"](model), **options)
        samples = test_tensor_parallel.samples_of(name)
        own = slice(rank % 2 * samples // 2, (rank % 2 + 1) * samples // 2)
        test_tensor_parallel.steps(model, optimizer, own, samples=samples)
        return whole_parameters(model)


# --- pipeline stages ----------------------------------------------------------------------------


def stage(rank: int, gives_group: bool, alike: bool) -> Parameters | str:
    """Two stages of two ranks, each with a model and a loss of its own."""
    ignore_advice()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
    one = STAGES[0 if alike else rank // 2]
    with double_precision():
        model = shard(KINDS[one.model].model(), Way(), mesh=mesh)
        group = {"process_group": mesh.get_group()} if gives_group else {}
        try:
            optimizer = kronfac.KFAC(model, BASES["momentum"](model), **group, **dict(one.options))
        except ValueError as error:
            return str(error)
        train_stage(model, optimizer, one, slice(rank % 2 * 6, rank % 2 * 6 + 6))
        return whole_parameters(model)


def train_stage(model: nn.Module, optimizer: Any, one: Any, own: slice) -> None:
    for number in range(one.steps):
        x, y = (part[own] for part in KINDS[one.model].batch(number, 12))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()


def test_pipeline_stages_with_a_group_each() -> None:
    for rank, found in enumerate(run(4, stage, True, False)):
        assert_near(found, alone(STAGES[rank // 2]).parameters, f"rank {rank}")


@pytest.mark.parametrize("alike", [True, False])
def test_pipeline_stages_without_a_group_are_refused(alike: bool) -> None:
    for rank, found in enumerate(run(4, stage, False, alike)):
        own = "0, 1" if rank < 2 else "2, 3"
        assert (
            f"sharded over a mesh of ranks {own}, but the optimizer has ranks 0, 1, 2, 3" in found
        )
        assert "process_group=... (of each pipeline stage its own)" in found
