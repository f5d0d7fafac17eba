"""Steps of the base optimizer that are not part of ours."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from kronfac.capture.capture import Capture
from kronfac.options.advice import Advice


class BaseSteps:
    """Warns if somebody else steps the base optimizer while we observe on its behalf."""

    def __init__(self, base: Optimizer, advice: Advice, capture: Capture) -> None:
        self._advice, self._capture = advice, capture
        self._preconditioner = False
        self._handle = base.register_step_pre_hook(_Hook(self))
        weakref.finalize(self, self._handle.remove)

    @contextmanager
    def preconditioner(self) -> Iterator[None]:
        """Steps inside are ours."""
        before, self._preconditioner = self._preconditioner, True
        try:
            yield
        finally:
            self._preconditioner = before

    def remove(self) -> None:
        """Let the base optimizer go its own way."""
        self._handle.remove()

    def notice(self, base: Optimizer) -> None:
        """The base optimizer is about to step."""
        if not self._preconditioner and not self._capture.is_paused:
            self._advice.give(
                "base step",
                f"{type(base).__name__}.step() was called beside K-FAC, which wraps it: that step was "
                "not preconditioned as one of K-FAC's; call the step() of K-FAC alone, or detach() it.",
            )


class _Hook:
    """A hook that keeps nobody alive, and that copies as inert."""

    def __init__(self, target: BaseSteps | None = None) -> None:
        self._target = None if target is None else weakref.ref(target)

    def __call__(self, base: Optimizer, args: Any, kwargs: Any) -> None:
        target = None if self._target is None else self._target()
        if target is not None:
            target.notice(base)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
