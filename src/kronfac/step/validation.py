"""Combinations that would train wrongly, refused with one sentence each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kronfac.layers import Layer
from kronfac.layers.shards import obstacle
from kronfac.linalg.narrow import in_words
from kronfac.options.config import Options, ShareOf
from kronfac.state.layer_state import LayerState


def check_module(model: object) -> None:
    """Raise unless this is a model at all."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")


def check_model(model: nn.Module) -> None:
    """Raise unless the model can be watched in this process."""
    check_module(model)
    _refuse_deepspeed(model, "model")
    _refuse_flat_parameters(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is scripted or traced (torch.jit), so its layers run where nothing can be "
            "observed; build the optimizer with the model as it was before, or use torch.compile."
        )
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "torch.nn.DataParallel copies the model in every forward, so nothing can be observed; "
            "use one process per device."
        )
    for name, parameter in model.named_parameters():
        if (sentence := obstacle(name, parameter)) is not None:
            raise ValueError(sentence)


def check_process_group(group: object) -> None:
    """Raise unless this is a process group that is in use, or nothing."""
    if group is None:
        return
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"process_group={group!r} was given, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group(...) first, or leave process_group out."
        )
    stranger = group is dist.GroupMember.NON_GROUP_MEMBER  # told apart where ranks are counted
    if not stranger and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group={group!r} must be what torch.distributed.new_group(...) or "
            "DeviceMesh.get_group() returns."
        )


def check_ranks(scheme: object, rescale: str | None, adapts_damping: bool) -> None:
    """Raise if several ranks cannot do together what one process does."""
    if scheme != "layer-parallel":
        return
    for name, used in (
        ("rescale='quadratic'", rescale == "quadratic"),
        ("damping=LevenbergMarquardt(...)", adapts_damping),
    ):
        if used:
            raise ValueError(
                f"{name} needs every rank's gradients, which distribute='layer-parallel' leaves with "
                "their owners: choose another scheme."
            )


def check_sharded(rescale: str | None, adapts_damping: bool) -> None:
    """Raise if a step needs whole gradients of all layers at once, which no rank has of sharded ones."""
    for name, used in (
        ("rescale='quadratic'", rescale == "quadratic"),
        ("damping=LevenbergMarquardt(...)", adapts_damping),
    ):
        if used:
            raise ValueError(
                f"{name} needs the whole gradient of every layer on each rank, and the parameters of "
                "this model are sharded; choose another, or train with DistributedDataParallel."
            )


def check_rank(to: object, size: int) -> None:
    """Raise unless there is a rank of this number."""
    if not isinstance(to, int) or isinstance(to, bool) or not 0 <= to < size:
        raise ValueError(f"to={to!r} must be the number of a rank, from 0 to {size - 1}.")


def check_join(rescale: str | None, adapts_damping: bool) -> None:
    """Raise if a rank that has run out of batches could not take part in what the others do."""
    if rescale == "quadratic" or adapts_damping:
        raise RuntimeError(
            "damping=LevenbergMarquardt(...) and rescale='quadratic' run the closure again, which a "
            "rank without batches cannot: give all ranks the same number of batches instead of Join."
        )


def check_base(base: object) -> None:
    """Raise unless the base optimizer can step on gradients that are already there."""
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base_optimizer must be a torch.optim.Optimizer, not {type(base).__name__}; build it "
            "first, for example torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    _refuse_deepspeed(base, "base optimizer")
    closure = inspect.signature(type(base).step).parameters.get("closure")
    if isinstance(base, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise ValueError(
            f"{type(base).__name__} evaluates the loss inside its step and cannot use "
            "preconditioned gradients; use a base such as SGD, AdamW, RMSprop or NAdam."
        )


def check_lever(adapts_damping: bool, rescale: str | None) -> None:
    """Raise if the damping adapts itself but a rule fixes the length that it should change."""
    if adapts_damping and rescale in ("auto", "graft", "unit", "orthogonal"):
        raise ValueError(
            f"rescale={rescale!r} fixes the length of a step, so that damping=LevenbergMarquardt(...) "
            "could not change it; build the optimizer with rescale=None, 'kl-clip', 'trust-region' "
            "or 'quadratic'."
        )


def check_curvature(adapts_damping: bool, states: Iterable[LayerState]) -> None:
    """Raise if the damping adapts itself but a layer keeps no curvature without damping."""
    if not adapts_damping:
        return
    for state in states:
        if not state.block.undamped:
            raise ValueError(
                f"damping=LevenbergMarquardt(...) needs the undamped curvature of every layer, which "
                f"layer {state.name!r} ({state.block.label}) does not keep; give solver='eigen'."
            )


def check_relative(relative: ShareOf | None, rescale: str | None) -> None:
    """Raise if the damping is a share of curvature where a number in its units is needed."""
    if relative is not None and rescale == "quadratic":
        raise ValueError(
            "rescale='quadratic' adds the damping to the curvature of the whole model, so it needs a "
            "number or kronfac.LevenbergMarquardt(...), not damping=kronfac.Relative(...)."
        )


def check_mean_curvature(relative: ShareOf | None, states: Iterable[LayerState]) -> None:
    """Raise if the damping is a share of a curvature that a method does not know."""
    if relative is None:
        return
    for state in states:
        if not state.block.knows_curvature:
            raise ValueError(
                f"damping=kronfac.Relative(...) is a share of the mean curvature, which layer "
                f"{state.name!r} ({state.block.label}) does not know; give damping=1e-3, for example."
            )
        if relative == "trace" and not state.block.knows_trace:
            raise ValueError(
                f"damping=kronfac.Relative(..., to='trace') is not supported for layer {state.name!r} "
                f"({state.block.label}); give kronfac.Relative(...), a share of the mean."
            )


def check_stagger(stagger: bool, adapts_interval: bool) -> None:
    """Raise if layers are to be refreshed one after another, but together as well."""
    if stagger and adapts_interval:
        raise ValueError(
            "stagger=True spreads refreshes over an interval, but refresh_every=StaleInterval(...) "
            "compares all layers at the same steps; choose one of the two."
        )


def check_plain_steps(rescale: str | None, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if the quadratic model chooses the momentum but the base optimizer has its own."""
    if rescale != "quadratic":
        return
    for number, group in enumerate(groups):
        for name in ("momentum", "betas"):
            if group.get(name):
                raise ValueError(
                    f"rescale='quadratic' chooses the momentum itself, but group {number} of the base "
                    f"optimizer has {name}={group[name]!r}; use torch.optim.SGD(..., lr=1.0) without "
                    "momentum."
                )


def check_closure(closure: object) -> None:
    """Raise unless this can be called, or is nothing."""
    if closure is not None and not callable(closure):
        raise TypeError(
            f"step({closure!r}): the argument is a closure, a function that computes the loss, calls "
            "backward() and returns the loss; without one, call step()."
        )


def check_param_group(group: object) -> None:
    """Raise unless this has parameters for the base optimizer."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"add_param_group({group!r}): give a dict with the parameters under 'params', for example "
            "{'params': layer.parameters(), 'lr': 0.1}."
        )


def check_tensors(layers: Iterable[Layer], groups: Iterable[dict[str, Any]]) -> None:
    """Raise if somebody has replaced the tensors of the model or of the parameter groups."""
    trained = {p for group in groups for p in group["params"]}
    for layer in layers:
        if layer.weight.requires_grad and layer.weight not in trained:
            raise RuntimeError(
                f"the weight of layer {layer.name!r} is no longer in param_groups: DeepSpeed or another "
                "wrapper that flattens parameters has replaced it, and K-FAC needs each layer's own "
                "gradient; train without that wrapper."
            )
        known = (*layer.module.parameters(), getattr(layer.handle, "sharded_param", None))
        if all(p is not layer.weight for p in known):
            raise RuntimeError(
                f"the weight of layer {layer.name!r} was replaced after the optimizer was made (by "
                "to_empty or assignment, for example); build the optimizer after that."
            )


def _refuse_flat_parameters(model: nn.Module) -> None:
    """FSDP1 flattens the parameters of many layers into one vector; FSDP2 does not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
    wrapper = () if fsdp is None else fsdp.FullyShardedDataParallel
    wrapped = any(isinstance(module, wrapper) for module in model.modules())
    if wrapped or any(getattr(p, "_fsdp_flattened", False) for p in model.parameters()):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters, and "
            "K-FAC needs each layer's own gradient; use fully_shard (FSDP2) or DistributedDataParallel."
        )


def _refuse_deepspeed(value: object, role: str) -> None:
    if type(value).__module__.partition(".")[0] == "deepspeed":
        raise ValueError(
            f"the {role} is a {type(value).__name__} of DeepSpeed, which flattens parameters, so that "
            "layers no longer have gradients of their own; K-FAC needs those: train without DeepSpeed."
        )


def narrow_products(options: Options, layers: Iterable[Layer]) -> str:
    """Whether layers are multiplied in bfloat16 here, in words that ranks compare."""
    return in_words(options.narrow, (layer.weight for layer in layers))
