"""Which methods there are, by name."""

from __future__ import annotations

from kronfac.protocol.method import Method

#: Optimizers by name, in the order of their registration.
_OPTIMIZERS: dict[str, type] = {}


def register(name: str, optimizer: type) -> None:
    """Make an optimizer known as ``kronfac.<name>`` and to the program."""
    if not name.isidentifier():
        raise ValueError(
            f"{name!r} cannot be the name of a method; it must be a Python identifier."
        )
    _OPTIMIZERS[name] = optimizer


def optimizers() -> dict[str, type]:
    """Optimizers of all methods, by name."""
    return dict(_OPTIMIZERS)


def check_method(method: object) -> None:
    """Raise unless this is a class of methods."""
    if not isinstance(method, type) or not issubclass(method, Method):
        raise TypeError(
            f"register_method takes a subclass of kronfac.Method, not {method!r}; a layer type is "
            "registered by kronfac.register_layer."
        )
