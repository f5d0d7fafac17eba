"""K-FAC state inside the base optimizer's ``state_dict``: keyed by parameter, matched by name.

Every tensor of a layer sits in the entry of the layer's weight under a ``kronfac.*`` key, beside what
the base optimizer keeps there; names and shapes of all parameters sit in ``param_groups``. Only tensors,
numbers, strings and lists are saved, so ``torch.load(..., weights_only=True)`` reads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kronfac.protocol.block import Shape, fits
from kronfac.state.layer_state import LayerState
from kronfac.state.row_choice import BUFFER
from kronfac.statistics.running import count_dtype
from kronfac.statistics.sampled import Stride

PREFIX = "kronfac."
_NAMES, _SHAPES = f"{PREFIX}names", f"{PREFIX}shapes"
#: What several ranks have agreed on (empty in one process).
_PLAN = f"{PREFIX}plan"
_NEVER = -(2**62)  # staggered layers may have refreshed at negative steps


def merge(
    base: dict[str, Any],
    names: list[list[str]],
    shapes: list[list[list[int]]],
    entries: Mapping[str, dict[str, Any]],
    plan: str = "",
) -> dict[str, Any]:
    """Add our entries, keyed by parameter name, to a base optimizer's state dict."""
    groups = []
    state = {key: dict(value) for key, value in base["state"].items()}
    for group, group_names, group_shapes in zip(base["param_groups"], names, shapes, strict=True):
        groups.append({**group, _NAMES: group_names, _SHAPES: group_shapes, _PLAN: plan})
        for index, name in zip(group["params"], group_names, strict=True):
            if name in entries:
                mine = {f"{PREFIX}{key}": value for key, value in entries[name].items()}
                state.setdefault(index, {}).update(mine)
    return {**base, "state": state, "param_groups": groups}


def split(
    saved: Mapping[str, Any], names: list[list[str]], shapes: list[list[list[int]]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]] | None]:
    """Separate a state dict into the base optimizer's and ours, keyed by parameter name.

    Parameters are matched by name, so that a change of their order does no harm. The second part is
    ``None`` for a checkpoint that a plain optimizer wrote.
    """
    groups = [dict(group) for group in saved["param_groups"]]
    ours_too = any(_is_ours(key) for entry in saved["state"].values() for key in entry)
    if ours_too and not any(_NAMES in group for group in groups):
        for group, known, sizes in zip(groups, names, shapes, strict=True):
            # A flat state dict has no names, but it was read parameter by parameter.
            group |= {_NAMES: known, _SHAPES: sizes}
    if not all(_NAMES in group for group in groups):
        plain = {
            index: {key: value for key, value in entry.items() if not _is_ours(key)}
            for index, entry in saved["state"].items()
        }
        theirs = [{k: v for k, v in group.items() if not _is_ours(k)} for group in groups]
        return {**saved, "state": plain, "param_groups": theirs}, None
    _check_match(groups, names, shapes)
    state: dict[int, dict[str, Any]] = {}
    ours: dict[str, dict[str, Any]] = {}
    start = 0
    for group, current in zip(groups, names, strict=True):
        saved_names = group.pop(_NAMES)
        where = dict(zip(saved_names, group["params"], strict=True))
        if "param_names" in group:
            own = dict(zip(saved_names, group["param_names"], strict=True))
            group["param_names"] = [own[name] for name in current]
        del group[_SHAPES]
        group.pop(_PLAN, None)
        group["params"] = list(range(start, start + len(current)))
        for index, name in zip(group["params"], current, strict=True):
            entry = saved["state"].get(where[name], {})
            others = {key: value for key, value in entry.items() if not _is_ours(key)}
            if others:
                state[index] = others
            ours[name] = {
                key.removeprefix(PREFIX): value for key, value in entry.items() if _is_ours(key)
            }
        start += len(current)
    return {**saved, "state": state, "param_groups": groups}, ours


def plan_of(saved: Mapping[str, Any]) -> str:
    """What the ranks that wrote a checkpoint had agreed on; empty if it was one process."""
    return next((group[_PLAN] for group in saved["param_groups"] if _PLAN in group), "")


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(PREFIX)


def _check_match(
    groups: list[dict[str, Any]], names: list[list[str]], shapes: list[list[list[int]]]
) -> None:
    if len(groups) != len(names):
        raise ValueError(
            f"the checkpoint has {len(groups)} parameter groups, this optimizer has {len(names)}; "
            "build the base optimizer with the same groups before loading."
        )
    problems = []
    for number, (group, here, sizes) in enumerate(zip(groups, names, shapes, strict=True)):
        saved = dict(zip(group[_NAMES], group[_SHAPES], strict=True))
        problems += [f"{name!r} is not in the checkpoint" for name in here if name not in saved]
        problems += [f"{name!r} is not in group {number}" for name in saved if name not in here]
        problems += [
            f"{name!r} is {tuple(saved[name])} in the checkpoint and {tuple(size)} here"
            for name, size in zip(here, sizes, strict=True)
            if name in saved and tuple(saved[name]) != tuple(size)
        ]
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise ValueError(f"the checkpoint does not fit this model: {shown}.")


def layer_entry(state: LayerState, place: Mapping[LayerState, int]) -> dict[str, Any]:
    """Return what is saved of one layer, without the prefix, given the places of all layers.

    Layers that are parts of one weight put their name before their keys.
    """
    entry: dict[str, Any] = {}
    for name, running in state.running.items():
        if running.sum is not None and state.keeps(name):
            entry[f"{name}.sum"], entry[f"{name}.count"] = running.sum, running.count
        if running.statistic.occurrences:
            rows = [running.row_share, float(running.fresh)]
            entry[f"{name}.rows"] = torch.tensor(rows, dtype=torch.float64, device="cpu")
    for name, (last, before) in state.history.items():
        entry[f"{name}.last"], entry[f"{name}.before"] = last, before
    if state.compares:
        entry["compared"] = torch.tensor(state.compared, dtype=torch.int64, device="cpu")
    for name, value in (state.solution or {}).items():
        entry[f"solution.{name}"] = value
    entry |= {name: state.view.to_save(value) for name, value in state.buffers.items()}
    if state.row_form is not None:
        entry |= state.row_form.entry()
    if state.broadcast:
        entry["broadcast"] = torch.tensor(state.broadcast_size, dtype=torch.int64, device="cpu")
    if state.block.leaves_out != "nothing":
        fixed = state.stride or Stride(0, 0, 0)
        numbers = [fixed.target, fixed.samples, fixed.positions, fixed.total]
        entry["stride"] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if state.layer.input_form is not None and state.block.input_key is not None:
        alone = -1 if state.group_settled else -2
        group = alone if state.group is None else place[state.group.leader]
        entry["group"] = torch.tensor(group, dtype=torch.int64, device="cpu")
    times = (state.solved_at, state.last_refresh)
    numbers = [_NEVER if time is None else time for time in times]
    numbers += [state.offset, state.failures, state.failures_in_a_row, int(state.fell_back)]
    entry["schedule"] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if state.pending.dropped is not None:
        entry["dropped"] = state.pending.dropped
    return {_part_key(state, key): value for key, value in entry.items()}


def _part_key(state: LayerState, key: str) -> str:
    return f"{state.layer.part}.{key}" if state.layer.part else key


def _own_part(state: LayerState, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo what :func:`layer_entry` puts before the keys."""
    prefix = _part_key(state, "")
    return {k.removeprefix(prefix): v for k, v in entry.items() if k.startswith(prefix)}


def check_layer(state: LayerState, entry: Mapping[str, Any]) -> None:
    """Raise if what was saved of a layer does not fit the layer as it is now."""
    entry = _own_part(state, entry)
    block = state.block
    if "schedule" in entry and bool(entry["schedule"][-1]) and block.holds_rows:
        block = state.method.block(state.layer, grouped=False)  # as load_layer will have it
    expected: dict[str, Shape] = {"dropped": (), **state.buffer_shapes}
    for name, statistic in block.statistics.items():
        whole = statistic.sum_shape
        expected |= {f"{name}.sum": whole, f"{name}.count": (), f"{name}.rows": (2,)}
        expected |= {f"{name}.last": whole, f"{name}.before": whole}
    for name, shape in block.solution_shapes.items():
        expected[f"solution.{name}"] = shape
    if "schedule" not in entry and any(key in entry for key in expected):
        raise ValueError(
            f"layer {state.name!r}: the checkpoint holds statistics or a solution, but no schedule to go "
            "with them: it is damaged; load another checkpoint."
        )
    for key, shape in expected.items():
        if key in entry and not fits(shape, entry[key]):
            raise ValueError(
                f"layer {state.name!r}: {key} is {tuple(entry[key].shape)} in the checkpoint and "
                f"{shape} here; load it with the same bias, max_dim, block_dim, sharing and fisher as it "
                "was saved with."
            )


def saved_group(state: LayerState, entry: Mapping[str, Any]) -> int | None:
    """The number of the layers that shared a layer's input; -1 if it had none to share it with.

    ``None`` if that was not settled. Earlier versions shared nothing.
    """
    entry = _own_part(state, entry)
    if "schedule" not in entry:
        return None
    number = int(entry["group"]) if "group" in entry else -1
    return None if number < -1 else number


def holds_all(state: LayerState, entry: Mapping[str, Any]) -> bool:
    """Whether an entry has every tensor that this rank would hold of a layer."""
    entry = _own_part(state, entry)
    wanted = [
        f"{name}.sum"
        for name, one in state.running.items()
        if state.keeps(name) and not one.statistic.may_be_missing
    ]
    wanted += [f"solution.{name}" for name in state.held]
    return all(key in entry for key in wanted)


def was_solved(state: LayerState, entry: Mapping[str, Any]) -> bool:
    """Whether a layer had a solution when it was saved, on whichever rank."""
    schedule = _own_part(state, entry).get("schedule")
    return schedule is not None and int(schedule[0]) != _NEVER


def load_layer(state: LayerState, entry: Mapping[str, Any]) -> None:
    """Restore one layer; tensors are copied, into the precision that the layer's factors have."""
    state.reset()
    state.stride = None
    entry = _own_part(state, entry)
    if state.row_form is not None:
        state.row_form.load(entry)
    if "schedule" not in entry:
        return
    solved, last, offset, failures, in_a_row, fell_back = entry["schedule"].tolist()
    if state.block.holds_rows and fell_back:
        state.fall_back_to_expand()
    state.offset, state.failures, state.failures_in_a_row = offset, failures, in_a_row
    device, dtype = state.layer.weight.device, state.layer.factor_dtype

    def read(key: str, dtype: torch.dtype) -> Tensor:
        value: Tensor = entry[key]
        return value.detach().to(device, dtype, copy=True)

    for name, running in state.running.items():
        if f"{name}.sum" in entry and state.keeps(name):
            running.sum = read(f"{name}.sum", dtype)
            running.count = read(f"{name}.count", count_dtype(device))
        running.fresh = f"{name}.rows" not in entry
        if not running.fresh:
            running.row_share, fresh = entry[f"{name}.rows"].tolist()
            running.fresh = fresh > 0
        if f"{name}.last" in entry and state.keeps(name) and state.compares:
            state.history[name] = (read(f"{name}.last", dtype), read(f"{name}.before", dtype))
    _load_compared(state, entry)
    state.broadcast = "broadcast" in entry
    state.broadcast_size = int(entry["broadcast"]) if state.broadcast else 0
    numbers = entry["stride"].tolist() if "stride" in entry else [0]
    state.stride = Stride(*numbers) if min(numbers[:3]) > 0 else None
    for name in state.buffer_shapes:
        if name in entry and state.is_worker:
            value = state.view.from_saved(entry[name])
            state.buffers[name] = value.detach().to(device, dtype, copy=True).contiguous()
    if state.row_form is not None and state.row_form.solved_at is None:
        state.buffers.pop(BUFFER, None)
    if "dropped" in entry:
        state.pending.dropped = read("dropped", torch.int64)
    names = state.held
    if state.has_curvature:
        state.solved_at = None if solved == _NEVER else solved
    state.last_refresh = None if last == _NEVER else last
    if not names:
        return
    if all(f"solution.{name}" in entry for name in names):
        state.solution = {name: read(f"solution.{name}", state.dtype_of(name)) for name in names}
    elif solved != _NEVER:
        state.forget_solution()
        if all(one.sum is None for one in state.running.values()):
            return
        warnings.warn(
            f"layer {state.name!r}: the checkpoint holds the solution of another solver; it is "
            "computed again from the saved statistics at the next step.",
            stacklevel=2,
        )


def _load_compared(state: LayerState, entry: Mapping[str, Any]) -> None:
    """How many of the earlier statistics are true; none unless all that are kept here were read."""
    if not state.compares:
        return
    sums = [
        name
        for name, one in state.running.items()
        if one.statistic.combine == "sum" and not one.statistic.basis
    ]
    kept = [name for name in sums if state.keeps(name)]
    if "compared" in entry and all(name in state.history for name in kept):
        state.compared = int(entry["compared"])
    else:
        state.forget_history()
