"""``kronfac.register_method``: from a method to the optimizer that users hold."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kronfac.optimizer.base import Preconditioned
from kronfac.optimizer.calling import explained
from kronfac.optimizer.common import Common
from kronfac.protocol.method import Method
from kronfac.protocol.registry import check_method, register


def register_method(method: type[Method]) -> type[Preconditioned]:
    """Make a method known as ``kronfac.<Name>`` and to the program, and return its optimizer.

    The optimizer is ``Name(model, base_optimizer, **own, **common)``: its own keywords are the fields of
    the method, which is a frozen dataclass called ``NameMethod``; the common ones are those of
    :class:`kronfac.KFAC`. Assign the result to ``Name`` in your module, so that it can be pickled.
    """
    check_method(method)
    clash = [one.name for one in fields(method) if one.name in Common.__annotations__]
    if clash:
        raise ValueError(
            f"{method.__name__} has an option {clash[0]!r}, which every method has already; choose "
            "another name, or set its default in defaults."
        )
    name = method.__name__.removesuffix("Method")
    body = {"__init__": _initialiser(method), "__doc__": method.__doc__, "method": method}
    optimizer = type(name, (Preconditioned,), {**body, "__module__": method.__module__})
    register(name, optimizer)
    return optimizer


def _initialiser(method: type[Method]) -> Any:
    own = [one.name for one in fields(method)]

    def __init__(
        self: Preconditioned, model: nn.Module, base_optimizer: Optimizer, **common: Any
    ) -> None:
        chosen = method(**{name: common.pop(name) for name in own if name in common})
        Preconditioned.__init__(self, model, base_optimizer, chosen, **common)

    given = inspect.signature(__init__)
    *first, common = given.parameters.values()
    keywords = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for one in inspect.signature(method).parameters.values()
    ]
    __init__.__signature__ = given.replace(  # type: ignore[attr-defined]
        parameters=[*first, *keywords, common]
    )
    return explained(Common, method.defaults)(__init__)
