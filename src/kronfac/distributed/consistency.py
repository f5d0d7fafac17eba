"""What all ranks have to agree on, compared before it can do harm: one clear error instead of a hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.layers.shards import averages_gradients, local

#: Gradients that were averaged by the same collective differ by less than this.
TOLERANCE = 1e-6


def uses_ddp(model: nn.Module) -> bool:
    """Whether gradients are averaged over ranks when a backward pass ends."""
    return averages_gradients(model) or any(
        isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
    )


def group_of(model: nn.Module) -> Any:
    """The process group whose ranks a wrapped model averages its gradients over, if it says so."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module.process_group
    return None


def check_gradients(world: ProcessGroup, parameters: Iterable[nn.Parameter]) -> None:
    """Raise on all ranks unless they have the same gradients."""
    if _differs(world, [p.grad for p in parameters if p.grad is not None]):
        raise RuntimeError(
            "the gradients differ between ranks: wrap the model in "
            "torch.nn.parallel.DistributedDataParallel, which averages them, or choose "
            "distribute='layer-parallel', which does so itself."
        )


def check_parameters(world: ProcessGroup, parameters: Iterable[nn.Parameter]) -> None:
    """Raise on all ranks unless they start from the same parameters."""
    if _differs(world, [p.detach() for p in parameters]):
        raise RuntimeError(
            "the parameters differ between ranks: give all of them the same seed before the model is "
            "built, or load the same weights everywhere."
        )


def _differs(world: ProcessGroup, tensors: Iterable[Tensor]) -> bool:
    sums = torch.zeros(3, dtype=torch.float64, device="cpu")
    for number, tensor in enumerate(map(local, tensors), start=1):
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        wide = values.detach().double() if values.device.type != "mps" else values.detach()
        sums[0] += float(wide.sum()) * number
        sums[1] += float(wide.abs().sum())
        sums[2] += number
    finite = bool(torch.isfinite(sums).all())
    sums = torch.cat([torch.nan_to_num(sums), sums.new_tensor([float(finite)])])
    least = world.total(sums, dist.ReduceOp.MIN)
    most = world.total(sums, dist.ReduceOp.MAX)
    scale = torch.maximum(most[1].abs(), torch.finfo(torch.float64).tiny * torch.ones_like(most[1]))
    count = max(float(most[2]), 1.0)
    if float(least[3]) < 1:
        return bool((least[3] != most[3]).item())
    return bool((((most - least)[:2].abs() / (scale * count)) > TOLERANCE).any()) or bool(
        least[2] != most[2]
    )


def shape_of(parameter: nn.Parameter) -> str:
    """Shape and precision as text."""
    if isinstance(parameter, UninitializedParameter):
        return "not initialised yet"
    return f"{tuple(parameter.shape)} {parameter.dtype}"


def described(values: Mapping[str, Any]) -> dict[str, str]:
    """Options as text that can be compared; of callables only the rule that they follow, if any."""
    return {name: _described(getattr(value, "rule", value)) for name, value in values.items()}


def _described(value: Any) -> str:
    return "a callable" if callable(value) and not isinstance(value, type) else repr(value)


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
