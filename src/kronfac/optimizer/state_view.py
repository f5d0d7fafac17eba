"""``optimizer.state`` as others see it: the base optimizer's, and the names of what is ours.

Loaders of flat checkpoints (``flatten_optimizer_state_dict=True``) ask ``optimizer.state[parameter]``
which tensors there are. Everything else, writing included, is done to the base optimizer's own state.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any

#: What is ours of a parameter.
Ours = Callable[[Any], Mapping[str, Any]]


class StateView(MutableMapping[Any, Any]):
    """The state of a base optimizer; entries that are asked for one by one also show what is ours."""

    def __init__(self, base: MutableMapping[Any, Any], ours: Ours) -> None:
        self.own = base
        self._ours = ours

    def __getitem__(self, parameter: Any) -> Any:
        entry, found = self.own[parameter], self._ours(parameter)
        return _Entry(entry, found) if found else entry

    def __setitem__(self, parameter: Any, entry: Any) -> None:
        self.own[parameter] = entry.own if isinstance(entry, _Entry) else entry

    def __delitem__(self, parameter: Any) -> None:
        del self.own[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.own

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def items(self) -> ItemsView[Any, Any]:
        """The base optimizer's own."""
        return self.own.items()

    def values(self) -> ValuesView[Any]:
        """The base optimizer's own."""
        return self.own.values()

    def __repr__(self) -> str:
        return repr(self.own)


class _Entry(MutableMapping[str, Any]):
    """What there is for one parameter."""

    def __init__(self, base: MutableMapping[str, Any], ours: Mapping[str, Any]) -> None:
        self.own = base
        self._ours = ours

    def __getitem__(self, key: str) -> Any:
        return self._ours[key] if key in self._ours else self.own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.own[key] = value

    def __delitem__(self, key: str) -> None:
        del self.own[key]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self._ours

    def __len__(self) -> int:
        return len(self.own) + len(self._ours)

    def __repr__(self) -> str:
        return repr(self.own)
