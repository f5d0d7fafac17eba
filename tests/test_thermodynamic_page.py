"""`docs/thermodynamic.md` quotes what was measured, and its code runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "thermodynamic.md").read_text()


def curves() -> dict[str, dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / "thermodynamic.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]["curves"]
    return found


def test_the_page_quotes_the_results() -> None:
    rows = re.findall(r"^\| (method \d, damping \S+|TNGD from \w+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for name, cells in rows:
        measured = [f"{100 * one['accuracy']:.1f}" for one in curves()[name].values()]
        assert [cell.strip() for cell in cells.split("|")] == measured


def test_the_page_quotes_what_they_are_compared_with() -> None:
    for name in ("SGD", "Cholesky, damping 0.01", "Cholesky, damping 0.0001"):
        assert f"{100 * curves()[name]['']['accuracy']:.1f} %" in PAGE


def test_the_code_of_the_page_trains() -> None:
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, names)
    for _ in range(2):
        names["optimizer"].zero_grad()
        names["model"](torch.randn(16, 64)).square().mean().backward()
        names["optimizer"].step()
    assert all(bool(torch.isfinite(p).all()) for p in names["model"].parameters())
