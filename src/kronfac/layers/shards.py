"""Parameters of which each rank holds a part: ``DTensor``, and what FSDP2 does to modules.

This is the only file that knows either. A part is a *box*: a range of each dimension of the whole tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: From where to where a part reaches, in each dimension of the whole.
Box = tuple[slice, ...]


def is_dtensor(value: object) -> bool:
    """Whether this is a ``DTensor``; without importing it, which takes a second."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(value, known.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here, in the same memory; all of it unless it is a ``DTensor``."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        found: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return found


def whole(value: Any) -> Any:
    """All of a tensor, for which all ranks that have a part of it have to ask."""
    return value.full_tensor() if is_dtensor(value) else value


def is_whole(tensor: Tensor) -> bool:
    """Whether all of a tensor is on every rank that has a part of it."""
    if not is_dtensor(tensor):
        return True
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return all(one.is_replicate() or mesh.size(axis) == 1 for axis, one in enumerate(placements))


def is_cut_along(tensor: Tensor, dim: int) -> bool:
    """Whether parts of a tensor are ranges of one dimension, whole in all others."""
    placements = tensor.placements if is_dtensor(tensor) else ()  # type: ignore[attr-defined]
    return all(one.is_replicate() or one.dim == dim for one in placements)


def mesh_copies(tensor: Tensor) -> Tensor:
    """Global ranks by copy of a ``DTensor``'s mesh, and by place in it: other ranks may have copies.

    A mesh may be all ranks, or some dimensions of those, sliced, flattened or unflattened.
    """
    return _copies(tensor.device_mesh)  # type: ignore[attr-defined]


def _copies(mesh: Any) -> Tensor:
    found: Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return found


def part_of(tensor: Tensor, rank: int) -> tuple[int, ...]:
    """Which part of a tensor a global rank holds, as its place among those who hold others."""
    if not is_dtensor(tensor):
        return ()
    ((_, *place),) = (mesh_copies(tensor) == rank).nonzero().tolist()
    placements = tensor.placements  # type: ignore[attr-defined]
    return tuple(0 if how.is_replicate() else at for at, how in zip(place, placements, strict=True))


def box_of(tensor: Tensor, rank: int) -> Box:
    """The part of a tensor that a global rank holds."""
    box = [slice(0, size) for size in tensor.shape]
    if not is_dtensor(tensor):
        return tuple(box)
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    part = part_of(tensor, rank)
    # FSDP2 shards what tensor parallelism has left, although its dimension of the mesh comes first.
    order = sorted(range(len(part)), key=lambda index: _is_strided(placements[index]))
    for index in order:
        if not placements[index].is_replicate():
            dim = placements[index].dim
            box[dim] = _chunk(box[dim], part[index], mesh.size(index))
    return tuple(box)


def _chunk(whole: slice, index: int, count: int) -> slice:
    """What ``torch.chunk`` gives to one of several; the last ones may be empty."""
    size = -(-(whole.stop - whole.start) // count)
    start = min(whole.start + index * size, whole.stop)
    return slice(start, min(start + size, whole.stop))


def place_like(value: Any, parameter: Tensor) -> Any:
    """What belongs to a parameter, such as a momentum, sharded as the parameter is."""
    fits = isinstance(value, Tensor) and value.shape == parameter.shape
    if not fits or not is_dtensor(parameter) or is_dtensor(value):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    part = value[box_of(parameter, torch.distributed.get_rank())].to(parameter.device)
    kind = sys.modules["torch.distributed.tensor"].DTensor
    return kind.from_local(
        part.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def obstacle(name: str, tensor: Tensor) -> str | None:
    """Why a parameter's placement is not supported, as a sentence."""
    if not is_dtensor(tensor):
        return None
    placements = tensor.placements  # type: ignore[attr-defined]
    if all(one.is_replicate() or _is_chunked(one) for one in placements):
        box = box_of(tensor, torch.distributed.get_rank())
        if tuple(one.stop - one.start for one in box) == tuple(local(tensor).shape):
            return None
    return (
        f"parameter {name!r} is placed as {tuple(placements)}, and K-FAC knows whole parameters and "
        "chunks of a dimension (Shard) only; shard it with fully_shard or parallelize_module."
    )


def _is_chunked(placement: Any) -> bool:
    return placement.is_shard() or _is_strided(placement)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


# --- FSDP2 ------------------------------------------------------------------------------------


def _fsdp() -> Any:
    """FSDP2's module, if somebody has imported it."""
    return sys.modules.get("torch.distributed.fsdp")


def _is_sharded_module(module: nn.Module) -> bool:
    fsdp = _fsdp()
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was before ``fully_shard``, which makes a subclass of it."""
    kind = type(module)
    if not _is_sharded_module(module):
        return kind
    known: type[nn.Module] = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
    return known


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from _own_groups(module)


def _own_groups(module: nn.Module) -> list[Any]:
    """What a module shards together."""
    if not _is_sharded_module(module):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    several = getattr(state, "_fsdp_param_groups", None)  # one until torch 2.12
    found = [state._fsdp_param_group] if several is None else several
    return [one for one in found if one is not None]


def handles(model: nn.Module) -> dict[nn.Parameter, Any]:
    """By sharded parameter, what FSDP2 knows of it."""
    return {one.sharded_param: one for group in _groups(model) for one in group.fsdp_params}


def sharded_places(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """By module and attribute, the parameter that an optimizer knows, whatever is there now."""
    found = {}
    for group in _groups(model):
        for one in group.fsdp_params:
            info = one._module_info
            modules, names = [info.module, *info.shared_modules], info.shared_param_names
            for module, name in zip(modules, [info.param_name, *names], strict=True):
                found[module, name] = one.sharded_param
    return found


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters as an optimizer knows them, whatever modules hold now, each once."""
    places = sharded_places(model)
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, held in module._parameters.items():
            if held is None:
                continue
            parameter = places.get((module, name), held)
            if parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}" if prefix else name, parameter


@contextmanager
def sharded_forms(model: nn.Module) -> Iterator[None]:
    """Let modules hold the parameters that optimizers know; a forward leaves gathered ones in some."""
    gathered = []
    for (module, name), parameter in sharded_places(model).items():
        held = module._parameters[name]
        if held is not parameter:
            gathered.append((module, name, held))
            module._parameters[name] = parameter
    try:
        yield
    finally:
        for module, name, held in gathered:
            module._parameters[name] = held


def is_gathered_form(handle: Any, parameter: object) -> bool:
    """Whether a module computes with this in place of a sharded parameter."""
    return handle is not None and getattr(handle, "_unsharded_param", None) is parameter


def in_use(handle: Any, parameter: nn.Parameter) -> nn.Parameter:
    """What modules compute with in place of a parameter."""
    found: nn.Parameter = getattr(handle, "_unsharded_param", parameter)
    return found


def lasting(handle: Any, inputs: Sequence[Any], kept: list[Any]) -> list[Any]:
    """What is kept of a call beyond a backward pass, after which FSDP2 frees gathered parameters."""
    sources = [getattr(one, "_base", None) if _is_view(one) else one for one in inputs]
    if handle is None or not any(isinstance(one, nn.Parameter) for one in sources):
        return kept
    return [one.clone() if isinstance(one, Tensor) else one for one in kept]


def _is_view(value: Any) -> bool:
    return isinstance(value, Tensor) and value._is_view()


def accumulates(handle: Any) -> bool:
    """Whether FSDP2 holds gradients that it has not reduced yet, so that ``.grad`` is ``None``."""
    if handle is None:
        return False
    gathered = getattr(handle, "_unsharded_param", None)
    return handle.unsharded_accumulated_grad is not None or (
        gathered is not None and gathered.grad is not None
    )


def sums_gradients(model: nn.Module) -> bool:
    """Whether gradients are added up over ranks and not averaged (``set_gradient_divide_factor(1)``)."""
    return any(group.gradient_divide_factor == 1 for group in _groups(model))


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds parameters of a model."""
    return any(True for _ in _groups(model))


def batch_parts(model: nn.Module, ranks: Sequence[int]) -> list[int]:
    """Which part of a batch each of some global ranks has, by its place in FSDP2's mesh."""
    copies = _copies(next(_groups(model)).mesh_info.mesh).flatten(1).tolist()
    places = {rank: place for copy in copies for place, rank in enumerate(copy)}
    return [places[rank] for rank in ranks]


def settle_gradient(parameter: nn.Parameter) -> None:
    """Have a gradient placed as its parameter is, which all ranks see to together.

    Tensor parallelism leaves gradients as operations have made them, also as sums that are still to be
    added up.
    """
    grad = parameter.grad
    if grad is None or not is_dtensor(grad):
        return
    placements = parameter.placements  # type: ignore[attr-defined]
    if grad.placements != placements:  # type: ignore[attr-defined]
        parameter.grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]


def averages_gradients(model: nn.Module) -> bool:
    """Whether FSDP2, or ``replicate``, reduces gradients over ranks."""
    return any(_is_sharded_module(module) for module in model.modules())
