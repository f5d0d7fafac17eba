"""Tables of a recipe become dataclasses: every key known, every value of its type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from kronfac.runs.errors import UserError
from kronfac.runs.hints import advice

Part = TypeVar("Part")

#: What an example of a key that is wanted looks like.
_EXAMPLES = {"train.batch": "64", "model.name": '"cnn"', "data.name": '"digits"'}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def fill(kind: type[Part], table: Mapping[str, Any], where: str) -> Part:
    """Make a dataclass of a table; a field ``options`` takes all keys that are not fields."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    known = [name for name in names if name != "options"]
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in table.items():
        if key in known:
            values[key] = convert(value, hints[key], f"{where}.{key}")
        elif "options" in names:
            rest[key] = value
        else:
            raise UserError(f"unknown key {key!r} in [{where}]; {advice(key, known)}")
    if "options" in names:
        values["options"] = rest
    required = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in values:
            example = _EXAMPLES.get(f"{where.rpartition('.')[2]}.{name}", "a value")
            raise UserError(
                f"[{where}] has no {name!r}; give one, for example {where}.{name} = {example}."
            )
    return kind(**values)


def convert(value: Any, hint: Any, where: str) -> Any:
    """Check a value against a type; whole numbers may stand for numbers, and lists for tuples."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [one for one in typing.get_args(hint) if one is not type(None)]
        lists = [one for one in options if typing.get_origin(one) is tuple]
        chosen = lists if lists and isinstance(value, list | tuple) else options
        return None if value is None else convert(value, chosen[0], where)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"{where} = {value!r} is not supported; {advice(str(value), choices)}")
        return value
    if origin is tuple:
        return _tuple(value, typing.get_args(hint), where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UserError(f"{where} = {value!r} must be {_NAMES[hint]}.")
    return value


def _tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """``kinds`` are those of the members, or one and an ellipsis if all are alike."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{where} = {value!r} must be a list.")
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(value)
    elif len(value) != len(kinds):
        wanted = ", ".join(_NAMES[kind] for kind in kinds)
        raise UserError(f"{where}: {value!r} must have {len(kinds)} members: {wanted}.")
    return tuple(convert(one, kind, where) for one, kind in zip(value, kinds, strict=True))


def defaults(kind: type[Any]) -> dict[str, Any]:
    """The keys that a table may leave out, with what they are then; ``options`` are no key."""
    return {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }


def to_table(part: Any) -> dict[str, Any]:
    """The table that :func:`fill` would make this of, without what is left at its default."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "options":
            table.update(value)
        elif value != field.default:
            table[field.name] = _lists(value)
    return table


def _lists(value: Any) -> Any:
    return [_lists(one) for one in value] if isinstance(value, tuple) else value
