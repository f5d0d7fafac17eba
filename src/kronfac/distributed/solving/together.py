"""Parts of several layers solved in batches, with one look at the device for all of them.

Parts of equal :meth:`Block.batch_key` are stacked and solved at once. Whether that has worked is read for
all batches together; what has failed is solved again alone, with all attempts that a solver has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.linalg.batching import MAX_BATCH_ELEMENTS, MAX_ELEMENTS
from kronfac.linalg.largest import largest_entries
from kronfac.protocol.block import Block
from kronfac.protocol.context import Given
from kronfac.protocol.statistic import Tensors


@dataclass(frozen=True, eq=False)
class Task:
    """One part of a layer, and what it is solved from."""

    block: Block
    part: str
    given: Given


def joins_others(block: Block, parts: Iterable[str]) -> bool:
    """Whether all of some parts can be solved together with those of other layers."""
    known = block.parts
    based = any(block.statistics[n].basis for part in parts for n in known[part].statistics)
    return not based and all(
        block.batch_key(part) is not None and not known[part].after for part in parts
    )


def solve_together(
    tasks: Sequence[Task], finite: Sequence[bool] | None = None
) -> list[dict[str, Tensor] | None]:
    """Solve parts for which :func:`joins_others`; ``None`` where there is no solution.

    ``finite`` says of each task whether its means are; if it is not given, that is read.
    """
    if finite is None:
        finite = all_finite([list(task.given.means.values()) for task in tasks])
    usable = [index for index, ok in enumerate(finite) if ok]
    found: dict[int, dict[str, Tensor]] = {}
    for indices in _batches(tasks, usable):
        found |= _solve_batch(tasks, indices)
    solved = list(found)
    worked = all_finite([list(found[index].values()) for index in solved])
    result: dict[int, dict[str, Tensor] | None] = {
        index: found[index] for index, ok in zip(solved, worked, strict=True) if ok
    }
    for index, task in enumerate(tasks):
        if index not in result:
            result[index] = task.block.solve(task.part, task.given)
    return [result[index] for index in range(len(tasks))]


def all_finite(lists: Sequence[Sequence[Tensor]]) -> list[bool]:
    """Of each list of tensors, whether all are finite; the host waits once."""
    found = [True] * len(lists)
    device = next((one.device for tensors in lists for one in tensors), None)
    if device is not None:
        flags, owners = finite_flags(lists, device)
        for owner, ok in zip(owners, flags.tolist(), strict=True):
            found[owner] = found[owner] and ok
    return found


def finite_flags(
    lists: Sequence[Sequence[Tensor]], device: torch.device
) -> tuple[Tensor, list[int]]:
    """Whether tensors are finite, on a device, and the number of the list that each is from."""
    alike: dict[Hashable, list[tuple[int, Tensor]]] = {}
    for number, tensors in enumerate(lists):
        for tensor in tensors:
            if tensor.numel():
                alike.setdefault((tensor.device, tensor.dtype), []).append((number, tensor))
    flags = [torch.ones(0, dtype=torch.bool, device=device)]
    owners = []
    for own in alike.values():
        found = torch.isfinite(largest_entries([tensor for _, tensor in own]))
        flags.append(found if found.device == device else found.to(device))
        owners += [number for number, _ in own]
    return torch.cat(flags), owners


def _batches(tasks: Sequence[Task], indices: Iterable[int]) -> Iterator[list[int]]:
    """Tasks that are solved at once."""
    alike: dict[Hashable, list[int]] = {}
    for index in indices:
        task = tasks[index]
        first = next(iter(task.given.means.values()))
        kind = task.block.batch_key(task.part), task.given.previous is None, first.device
        alike.setdefault(kind, []).append(index)
    for own in alike.values():
        first = next(iter(tasks[own[0]].given.means.values()))
        size = _batch_size(first)
        yield from (own[start : start + size] for start in range(0, len(own), size))


def _batch_size(mean: Tensor) -> int:
    """How many matrices like this one are solved at once: a processor is busy with one large one."""
    if mean.numel() > MAX_ELEMENTS and mean.device.type == "cpu":
        return 1
    return max(1, MAX_BATCH_ELEMENTS // max(1, mean.numel()))


def _solve_batch(tasks: Sequence[Task], indices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    chosen = [tasks[index] for index in indices]
    block, part, first = chosen[0].block, chosen[0].part, chosen[0].given
    if len(chosen) == 1:
        alone = block.solve_batch(part, first)
        return {} if alone is None else {indices[0]: alone}
    previous = [one.given.previous for one in chosen]
    stacked = replace(
        first,
        means=dict(_Stacked([one.given.means for one in chosen])),
        outlines=dict(_Stacked([one.given.outlines for one in chosen])),
        previous=_Stacked([one for one in previous if one is not None]) if first.previous else None,
        counts={},
    )
    found = block.solve_batch(part, stacked)
    if found is None:
        return {}
    parts = {name: value.unbind() for name, value in found.items()}
    # Memory of its own for each: one that is kept longer than the others would keep all of them.
    return {
        index: {name: values[place].clone() for name, values in parts.items()}
        for place, index in enumerate(indices)
    }


class _Stacked(Mapping[str, Tensor]):
    """Tensors of several layers side by side, made when somebody asks for them."""

    def __init__(self, each: Sequence[Tensors]) -> None:
        self._each = each

    def __getitem__(self, name: str) -> Tensor:
        return torch.stack([one[name] for one in self._each])

    def __iter__(self) -> Iterator[str]:
        return iter(self._each[0])

    def __len__(self) -> int:
        return len(self._each[0])
