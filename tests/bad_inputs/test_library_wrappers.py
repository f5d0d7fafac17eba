"""Models that cannot be watched are refused in one sentence when the optimizer is built."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import kronfac
from tests.training import batch, kfac, layers, mlp, step


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """A process group of one rank: no port, no other process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        mlp(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP:UserWarning")
@pytest.mark.parametrize("inside", [False, True], ids=["the wrapper", "what it wraps"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused(use_orig_params: bool, inside: bool, lone_rank: None) -> None:
    wrapped = sharded(use_orig_params)
    base = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel \(FSDP1\)"):
        kronfac.KFAC(wrapped.module if inside else wrapped, base)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP:UserWarning")
def test_one_layer_wrapped_by_fsdp1_is_refused(lone_rank: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), sharded(use_orig_params=True))
    with pytest.raises(ValueError, match="FSDP1"):
        kfac(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_scripted_model_is_refused(how: str) -> None:
    model = mlp()
    scripted = torch.jit.script(model) if how == "script" else torch.jit.trace(model, batch()[0])
    with pytest.raises(ValueError, match=r"scripted or traced .* torch.compile"):
        kfac(scripted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_left_to_the_base_optimizer() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 3))
    optimizer = kfac(model)
    step(model, optimizer, batch())
    assert list(layers(optimizer)) == ["1"]


def test_a_process_group_of_one_rank_is_fine(lone_rank: None) -> None:
    model = mlp()
    optimizer = kfac(model, process_group=dist.group.WORLD)
    step(model, optimizer, batch())
    assert optimizer.stats()["steps"] == 1


@pytest.mark.parametrize("group", ["x", 0, [0, 1]])
def test_a_process_group_of_another_type_is_refused(group: object, lone_rank: None) -> None:
    with pytest.raises(TypeError, match=r"process_group=.*new_group"):
        kfac(mlp(), process_group=group)


def test_a_process_group_before_initialisation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        kfac(mlp(), process_group="x")
