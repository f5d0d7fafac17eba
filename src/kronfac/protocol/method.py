"""A method of the family: its own options, its defaults, and the block that it has for a layer.

A method is a frozen dataclass. Its fields are the keywords that users give; everything else (damping,
intervals, momentum, length of steps, ranks) belongs to the engine and is the same for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kronfac.layers import Layer
from kronfac.options.config import Fisher, Options
from kronfac.protocol.block import Block
from kronfac.protocol.transform import Transform


@dataclass(frozen=True)
class Defaults:
    """Values of the engine's options that suit a method."""

    damping: Any = 1e-3
    factor_every: int = 10
    refresh_every: int = 100
    decay: float = 0.5
    rescale: str | None = "auto"
    fisher: Fisher = "empirical"


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """What a method knows of itself; it sees no rank, no hook and no parameter group."""

    defaults: ClassVar[Defaults] = Defaults()
    #: Learning rate of SGD as the base, and further options, of the line to start with: what the program
    #: takes where a recipe has no table of this method.
    line: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return type(self).__name__.removesuffix("Method")

    @property
    def needs_observe(self) -> bool:
        """Whether ``optimizer.observe(outputs)`` has to be called, whatever the Fisher."""
        return False

    def check(self, options: Options) -> None:  # noqa: B027 - most methods go with everything
        """Raise if the engine's options do not go with this method's."""

    def refusal(self, layer: Layer) -> str | None:
        """Say why a layer is left to the base optimizer, as half a sentence, or nothing."""
        return None

    @abstractmethod
    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """The curvature of a layer; ``grouped`` says that its rows can be told apart by sample."""

    def transforms(self) -> tuple[Transform, ...]:
        """Rules of its own that change gradients before or after they are preconditioned, in order."""
        return ()

    def described(self) -> dict[str, Any]:
        """Its options by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}
