"""Layers whose statistics a checkpoint should have, and has not.

Each rank keeps statistics of its own layers. A file that holds the state of one rank lacks those of
others, and loaders leave the zeros there that they were given to fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from kronfac.options.advice import warn_caller
from kronfac.state.layer_state import LayerState


def forget_lost(solved: Iterable[LayerState]) -> bool:
    """Let layers start again that had been solved, and whose statistics have not been loaded.

    A solution that has been loaded stays. Returns whether there are any.
    """
    lost = [state for state in solved if _lacks_statistics(state)]
    for state in lost:
        for name in _kept(state):
            state.running[name].forget()
        if _is_empty(state.solution):
            state.forget_solution()
        if _is_empty(state.buffers):
            state.buffers.clear()
    if lost:
        _warn([state.name for state in lost])
    return bool(lost)


def _kept(state: LayerState) -> list[str]:
    """Statistics of a layer that this rank keeps, as long as the layer has a solution."""
    kinds = state.block.statistics
    plain = [n for n, one in kinds.items() if one.combine == "sum" and not one.is_replicated]
    own = [n for n in plain if state.keeps(n) and state.lender(n) is state]
    return [name for name in own if not kinds[name].may_be_missing]


def _lacks_statistics(state: LayerState) -> bool:
    """Whether there are zeros, or neither statistics nor a solution.

    Without zeros, layers that share their input may have moved since the loader has looked for keys.
    """
    counts = [state.running[name].count for name in _kept(state)]
    if any(count is not None and not float(count) > 0 for count in counts):
        return True
    absent = bool(counts) and all(count is None for count in counts)
    return absent and bool(state.held) and state.solution is None


def _is_empty(values: Mapping[str, Tensor] | None) -> bool:
    return not any(bool(value.any()) for value in (values or {}).values())


def _warn(names: Sequence[str]) -> None:
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    warn_caller(
        f"the checkpoint has no statistics of {len(names)} layers of this rank ({shown}), and they start "
        "again: it holds what another rank had. Save with torch.distributed.checkpoint without "
        "full_state_dict=True (SHARDED_STATE_DICT in Accelerate), or save optimizer.full_state_dict()."
    )
