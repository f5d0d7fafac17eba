"""The rooms of the package: who imports whom, how large they are, what stays private.

A room is a folder of the package's root. Imports inside functions and for types count as well.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "kronfac"
FILES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
FOLDERS = sorted({path.parent for path in FILES})

#: What each room may import. The root may import all of them, and none imports the root.
ALLOWED = {
    "linalg": "",
    "nn": "",
    "options": "",
    "placement": "",
    "runs": "",
    "layers": "linalg options",
    "planner": "placement",
    "protocol": "layers options",
    "report": "runs",
    "statistics": "layers linalg protocol",
    "rescale": "capture layers linalg options statistics",
    "state": "layers options protocol statistics",
    "adaptive": "options state",
    "capture": "layers linalg options protocol state statistics",
    "distributed": "capture layers linalg options placement planner protocol state statistics",
    "step": "adaptive capture distributed layers linalg options protocol rescale state statistics",
    "optimizer": "adaptive capture distributed layers options placement protocol rescale state step",
    "methods": "adaptive layers linalg optimizer options placement protocol rescale step",
    "train": "adaptive distributed layers methods optimizer options placement planner protocol "
    "report runs state",
}


def imports(tree: ast.Module) -> Iterator[Path]:
    """The package's own files that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            parent = node.module or ""
            names = [(f"{parent}.{alias.name}", parent) for alias in node.names]
        else:
            continue
        for name, parent in names:
            found = file_of(name) or file_of(parent)
            if found is not None:
                yield found


def file_of(name: str) -> Path | None:
    """The file of a module or package of this name."""
    path = ROOT.parent.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in FILES), None)


def part_of(folder: Path, path: Path) -> str:
    """The subfolder that holds a file, or ``"."`` for the folder's own modules."""
    parts = path.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else "."


def directions(folder: Path) -> dict[str, set[str]]:
    """By part of a folder, the other parts that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in FILES.items():
        if path.is_relative_to(folder):
            others = [other for other in imports(tree) if other.is_relative_to(folder)]
            found[part_of(folder, path)] |= {part_of(folder, other) for other in others}
    return {part: others - {part} for part, others in found.items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.relative_to(ROOT.parent).as_posix())
def test_packages_do_not_import_in_circles(folder: Path) -> None:
    TopologicalSorter(directions(folder)).prepare()


def test_rooms_import_in_the_allowed_directions() -> None:
    found = {room: others for room, others in directions(ROOT).items() if room != "."}
    too_many = {room: others - set(ALLOWED[room].split()) for room, others in found.items()}
    assert not {room: others for room, others in too_many.items() if others}


def test_folders_and_files_are_small() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10
    counts = {folder: sum(path.is_file() for path in folder.iterdir()) for folder in FOLDERS}
    assert not {f for f, count in counts.items() if count > 24 and f != ROOT / "methods"}
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in FILES}
    assert not {name for name, length in lengths.items() if length > 450}


def is_private(name: str) -> bool:
    """Whether a name has one underscore in front."""
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a module defines: functions, classes, variables and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr] if ast.unparse(node.value) == "self" else []
        else:
            continue
        yield from filter(is_private, names)


def reached_into(tree: ast.Module) -> Iterator[str]:
    """Private names that a module takes from other objects, or imports from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kronfac"):
            yield from (alias.name for alias in node.names if is_private(alias.name))


def test_no_private_name_is_used_in_another_room() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for path, tree in FILES.items():
        for name in defined(tree):
            owners[name].add(part_of(ROOT, path))
    crossed = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in FILES.items()
        for name in reached_into(tree)
        if name in owners and part_of(ROOT, path) not in owners[name]
    ]
    assert not crossed
