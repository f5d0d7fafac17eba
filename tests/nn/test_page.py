"""The page and the example of Kronecker layers do what they say."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_page_runs() -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "kronecker-layers.md").read_text(), re.DOTALL
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert sum(p.numel() for p in names["trainable"]) == 128  # type: ignore[attr-defined]


def test_kronecker_adapters_learn_more_than_low_rank_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(ROOT / "examples" / "kronecker_adapters.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    kronecker, low_rank = (line for line in printed if "parameters" in line)
    assert kronecker.split()[2] == low_rank.split()[3] == "256"
    reached = [float(line.rstrip("%").split()[-1]) for line in (kronecker, low_rank)]
    assert reached[0] > reached[1]
    assert float(printed[-1].split()[-1]) < 1e-4


def compressed(hidden: int, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Accuracies of the whole net, the compressed one and the fine-tuned one, by the example."""
    example = runpy.run_path(str(ROOT / "examples" / "kronecker_compression.py"))
    example["main"](["--hidden", str(hidden), *arguments])
    printed = [line for line in capsys.readouterr().out.splitlines() if "parameters" in line]
    sizes = [int(line.split(":")[1].split()[0]) for line in printed]
    assert sizes[0] == 4 * hidden * (8 + hidden)
    assert sizes[1] == sizes[2] <= sizes[0] / 16
    return (float(line.rstrip("%").split()[-1]) for line in printed)


def test_a_compressed_recurrent_net_learns_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--whole-steps", "120", "--steps", "40"]
    whole, before, tuned = compressed(32, arguments, capsys)
    assert before < 50 < whole
    assert tuned > before + 20


@pytest.mark.slow
def test_a_compressed_recurrent_net_is_tuned_to_what_it_knew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, before, tuned = compressed(64, [], capsys)
    assert before < 50
    assert tuned > whole - 3


def test_the_page_quotes_the_benchmark() -> None:
    """Parameters, bytes and accuracy of every row, and the ratios of the times."""
    file = ROOT / "benchmarks" / "results" / "kronecker.json"
    results = json.loads(file.read_text())["results"]
    page = (ROOT / "docs" / "kronecker-layers.md").read_text()
    for kind, rate in results["learning_rates"].items():
        for factor in (1, 16, 30):
            names = [f"{kind} {factor} {seed} {rate}" for seed in range(9)]
            rows = [results["runs"][name] for name in names if name in results["runs"]]
            if rows:
                reached = 100 * sum(row["test"] for row in rows) / len(rows)
                sizes = f"{rows[0]['parameters']:,} | {rows[0]['bytes']:,}"
                assert f"| {kind} | {sizes} | {reached:.1f} % |" in page
    for row in results["inference"]:
        name = f"{row['hidden']}, {row['batch']}"
        (line,) = (one for one in page.splitlines() if one.startswith(f"| {name} |"))
        assert f"{row['ratio']:.2f}" in line
