"""Where recipes come from: shipped ones by name, others by path, both with changes."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kronfac.runs.errors import UserError
from kronfac.runs.hints import nearest
from kronfac.train.recipe.recipe import EXCLUSIVE, SHORT, Recipe

FOLDER = Path(__file__).parent.parent / "recipes"
#: Changes that come before all others, because what else is in these tables depends on them.
_FIRST = {"model": 0, "data": 0, "model.name": 1, "data.name": 1}


def shipped() -> dict[str, Path]:
    """Files of the recipes in this package, by name; those in a folder are ``folder/name``."""
    found = sorted(FOLDER.rglob("*.toml"))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in found}


def find(name: str) -> Path:
    """The file of a shipped recipe or of a path."""
    known = shipped()
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix == ".toml":
        if path.is_file():
            return path
        raise UserError(f"there is no recipe file {name!r}; `kronfac recipes` lists what there is.")
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else "`kronfac recipes` lists what there is."
    raise UserError(f"unknown recipe {name!r}; {hint}")


def text(name: str) -> str:
    """What the file of a recipe says."""
    path = find(name)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no valid TOML: {error}.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def load(name: str, changes: Iterable[str] | Mapping[str, Any] = ()) -> Recipe:
    """Read a recipe by name or path, with changes such as ``"train.epochs=3"``."""
    path = find(name)
    try:
        content = tomllib.loads(text(name))
    except (ValueError, RecursionError) as error:  # numbers too long, tables too deep
        raise UserError(f"{path} is no valid TOML: {error}.") from error
    return change(Recipe.from_dict(_short_name(name, path), content), changes)


def change(recipe: Recipe, changes: Iterable[str] | Mapping[str, Any]) -> Recipe:
    """A recipe with some values set, by dotted keys: texts ``"key=value"``, or a mapping.

    Another ``model.name`` or ``data.name`` leaves nothing of its table but what is among the changes.
    """
    if not isinstance(changes, Mapping):
        items = [parse(text) for text in changes]
    else:
        items = list(changes.items())
    content = copy.deepcopy(recipe.to_dict())
    for key, value in sorted(items, key=lambda item: _FIRST.get(item[0], 2)):
        _set(content, key, copy.deepcopy(value))  # later changes go into it
    return Recipe.from_dict(recipe.name, content)


def parse(text: str) -> tuple[str, Any]:
    """Split ``key=value``; the value is TOML, or a text without quotes."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key or not value:
        raise UserError(f"--set {text!r} must look like key=value, for example train.epochs=3.")
    try:
        found = tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return key, value
    # TOML also knows dates, which no key wants: a folder may be called like one.
    return key, found if isinstance(found, bool | int | float | str | list | dict) else value


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    place = content
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise UserError(f"cannot set {key!r}: {table!r} is a value and not a table.")
    if len(tables) == 2 and tables[0] == "optimizers" and last in SHORT:
        _set(content, f"{key.removesuffix(last)}train.{last}", value)
        return
    if key in ("model.name", "data.name") and place.get(last) != value:
        place.clear()  # options of another model or data set
    place[last] = value
    if last in EXCLUSIVE and value is not None:
        place.pop(EXCLUSIVE[last], None)
    if tables in (["train"], ["schedule"]):
        _forget(content, tables[0], last)


def _forget(content: dict[str, Any], part: str, key: str) -> None:
    """What is set for all optimizers holds for all: their own values of the same key go."""
    for own in _tables(content.get("optimizers")):
        if isinstance(own.get(part), dict):
            for name in (key, EXCLUSIVE.get(key, key)):
                own[part].pop(name, None)


def _tables(value: Any) -> list[dict[str, Any]]:
    """The tables in a table; what else a user has put in their place is refused later."""
    return (
        [one for one in value.values() if isinstance(one, dict)] if isinstance(value, dict) else []
    )


def _short_name(name: str, path: Path) -> str:
    """Names become folders of runs."""
    return path.stem if name.endswith(".toml") else name.replace("/", "-")
