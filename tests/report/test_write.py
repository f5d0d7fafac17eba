"""The files of a report: what they hold, and what they never replace."""

import builtins
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kronfac import report
from kronfac.report.page import pictures
from kronfac.runs.errors import UserError
from tests.report.made_up import evaluation, make_run, start, step, write_events

VOID = {"meta", "link"}
EVIL = "<script>alert('x')</script>\"&'</script>"


class Page(HTMLParser):
    """Checks nesting and collects what tests ask about."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        """What is written on the page."""
        shown = [
            t for tag, parts in self.text.items() if tag not in ("script", "style") for t in parts
        ]
        return " ".join(shown)


def page(out: Path, *runs: Path, **options: Any) -> Page:
    return Page(report.write(list(runs), out, **{"png": False, **options}))


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    for optimizer in ("kfac", "sgd", "adamw"):
        for seed in range(2):
            make_run(tmp_path / "runs", optimizer, seed, steps=200)
    return tmp_path / "runs"


HEADINGS = [
    "Progress",
    "Steps and time to the target",
    "Where the time of a step goes",
    "Layers",
    "Placement",
    "Memory",
    "Damping, KL clip and learning rate",
    "Failures and warnings",
    "Settings and environment",
]


def test_every_part_is_there(tmp_path: Path, compared: Path) -> None:
    found = page(tmp_path / "out", compared)
    assert found.text["h2"] == HEADINGS
    assert found.text["h1"] == ["digits"]
    assert "one rank, which solves all 20 layers" in found.words
    charts = [a["data-axis"] for a in found.all("figure")]
    assert charts.count("seconds") == 3  # accuracy, test loss, training loss
    assert charts.count("steps") == 3 + 3  # and damping, KL clip, learning rate


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path, compared: Path) -> None:
    found = page(tmp_path / "out", compared)
    loaded = [
        a.get(key) for _, a in found.tags for key in ("src", "href", "srcset", "data", "action")
    ]
    assert {value for value in loaded if value is not None} == {"data:,"}
    assert not re.search(r"https?:|//\w|url\(|@import|fetch\(|XMLHttp|import\(", found.source)


def test_pictures_have_titles_and_sections_have_names(tmp_path: Path, compared: Path) -> None:
    found = page(tmp_path / "out", compared)
    pictures = [i for i, (tag, _) in enumerate(found.tags) if tag == "svg"]
    assert all(found.tags[i + 1][0] == "title" for i in pictures)
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(a["aria-labelledby"] in ids for a in found.all("section"))


def test_text_is_escaped_everywhere(tmp_path: Path) -> None:
    run = make_run(tmp_path, EVIL.replace("/", ""), steps=40, recipe="digits", kind=EVIL)
    layers = [{"name": EVIL, "kind": EVIL, "shape": [3, 3], "ranks": EVIL, "seconds": {EVIL: 1.0}}]
    more = [
        {"event": "warning", "step": 3, "message": EVIL},
        {
            "event": "layers",
            "layers": layers,
            "skipped": [{"name": EVIL, "why": EVIL}],
            "scheme": EVIL,
        },
        step(50, phases={EVIL: 1.0}),
    ]
    content = (run / "events.jsonl").read_text()
    write_events(run, start(recipe=EVIL, optimizer=EVIL, kind=EVIL, world=2), *more)
    (run / "events.jsonl").write_text(
        (run / "events.jsonl").read_text() + content.partition("\n")[2]
    )
    (run / "summary.txt").write_text(EVIL)
    found = page(tmp_path / "out", run, title=EVIL)
    assert EVIL in found.text["h1"]
    assert "<script>alert" not in found.source
    assert {a.get("type") for a in found.all("script")} == {None, "application/json"}
    assert len([a for a in found.all("script") if not a]) == 1


def test_misses_are_in_the_table(tmp_path: Path) -> None:
    evals = [evaluation(10, 0.5), evaluation(20, 0.6)]
    write_events(tmp_path / "a", start(optimizer="sgd", kind="sgd"), *evals)
    found = page(tmp_path / "out", tmp_path / "a")
    assert "0 of 1" in found.words
    assert found.words.count("not reached") >= 2


def test_trouble_is_told(tmp_path: Path) -> None:
    stats = {"dropped": {"fc": 2}, "failures": {"fc": 0}, "without_solution": ["head"]}
    warning = {"event": "warning", "step": 3, "message": "loss is large"}
    failure = {"event": "failure", "step": 9, "message": "loss is not finite"}
    end = {"event": "finish", "status": "failed", "step": 9, "stats": stats}
    run = write_events(tmp_path / "a", start(), warning, warning, failure, end)
    words = page(tmp_path / "out", run).words
    assert "step 9: loss is not finite" in words
    assert "step 3: loss is large (2 times)" in words
    assert "fc: 2 statistics that were not finite were dropped" in words
    assert "raw gradient was used: head" in words
    assert "solutions could not be found" not in words


def test_runs_that_never_began_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, "kfac", steps=20)
    silent = make_run(tmp_path, "sgd", steps=20)
    (silent / "events.jsonl").write_text("")
    assert "prepared, but it has no events" in page(tmp_path / "out", tmp_path).words
    assert run.is_dir()


def test_the_map_of_ranks(tmp_path: Path) -> None:
    found = page(tmp_path / "out", make_run(tmp_path, "kfac", steps=40, world=4))
    assert "K-FAC on 4 ranks, scheme “comm-opt”" in found.words
    assert any(a.get("class") == "map" for a in found.all("table"))


def test_ranks_that_all_do_the_same(tmp_path: Path) -> None:
    layers = [{"name": "fc", "shape": [3, 3], "ranks": "all"}]
    event = {"event": "layers", "layers": layers, "scheme": "replicated"}
    found = page(tmp_path / "out", write_events(tmp_path / "run", start(world=100), event))
    assert "Every rank solves every layer" in found.words
    assert "The first 64 ranks" in found.words
    assert len([a for a in found.all("td") if "style" in a]) == 64


def test_settings_that_differ_are_side_by_side(tmp_path: Path, compared: Path) -> None:
    source = page(tmp_path / "out", compared).source
    table = source[source.index("What differs between") :]
    table = table[: table.index("</table>")]
    assert ">damping</th><td>0.001</td><td>–</td><td>–</td>" in table
    assert "momentum" not in table  # the same for all
    assert "seed" not in table


@pytest.mark.parametrize(
    "events",
    [
        [],
        [step(10)],
        [evaluation(10, 0.5)],
        [evaluation(10, 0.5, seconds=0.0), evaluation(0, 0.5, seconds=0.0)],
        [{"event": "step", "step": 10, "loss": None, "phases": None, "memory": "much"}],
        [step(1, loss=0.0), step(2, loss=-3.0), evaluation(2, 1.0, loss=0.0)],
        [step(0, damping=0.0, kl_clip=None), step(10, damping=1.0, kl_clip=1.0)],
        [{"event": "finish"}],
    ],
)
@pytest.mark.parametrize(
    "begin", [start(), start(target=None), start(metric="loss"), {"event": "start"}]
)
def test_incomplete_runs(
    tmp_path: Path, begin: dict[str, Any], events: list[dict[str, Any]]
) -> None:
    run = write_events(tmp_path / "run", begin, *events)
    assert page(tmp_path / "out", run).text["h2"][0] == "Progress"


def test_a_run_without_kfac(tmp_path: Path) -> None:
    found = page(tmp_path / "out", make_run(tmp_path, "adamw", steps=40))
    assert not {"Layers", "Placement"} & set(found.text["h2"])
    assert "KL clip was" not in found.words


def test_twenty_runs(tmp_path: Path) -> None:
    for seed in range(4):
        for optimizer in ("kfac", "sgd", "adamw", "muon", "soap"):
            make_run(tmp_path / "runs", optimizer, seed, steps=600)
    found = page(tmp_path / "out", tmp_path / "runs")
    assert len(found.source) < 1_500_000
    assert "20 runs · 5 optimizers" in found.words


def test_what_a_run_is_judged_by_comes_first(tmp_path: Path) -> None:
    images = page(tmp_path / "one", make_run(tmp_path, steps=40))
    words = page(tmp_path / "two", make_run(tmp_path, steps=40, recipe="text", text=True))
    order = ["Test accuracy", "Test loss", "Training loss"]
    for found, expected in ((images, order), (words, [order[1], order[2], order[0]])):
        titles = [title for title in found.text["b"] if title in order]
        assert list(dict.fromkeys(titles)) == expected
    assert "equal factors of the error" in images.words
    assert "equal factors of the error" not in words.words


def test_several_recipes_are_chapters(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "kfac", steps=40)
    make_run(tmp_path / "runs", "kfac", steps=40, recipe="text", text=True)
    found = page(tmp_path / "out", tmp_path / "runs")
    assert found.text["h2"] == ["digits", "text"]
    assert len(found.all("article")) == 2


def test_pictures(tmp_path: Path, compared: Path) -> None:
    report.write([compared], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "curves.png", "phases.png", "report.html",
    ]  # fmt: skip
    for name in ("curves.png", "phases.png"):
        content = (tmp_path / "out" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        width = int.from_bytes(content[16:20])
        assert width >= 1200


def test_without_matplotlib_only_the_page(
    tmp_path: Path, compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments, **options)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    found = page(tmp_path / "out", compared, png=True)
    assert "matplotlib is not installed" in found.words
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


def test_an_earlier_report_is_replaced(tmp_path: Path, compared: Path) -> None:
    report.write([compared], tmp_path)
    found = Page(report.write([compared], tmp_path, title="again"))
    assert found.text["h1"] == ["again"]


@pytest.mark.parametrize("name", ["report.html", "curves.png"])
def test_nothing_else_is_replaced(tmp_path: Path, compared: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(UserError, match="not one of ours"):
        report.write([compared], out)
    assert (out / name).read_text() == "mine"
    assert len(list(out.iterdir())) == 1


def test_a_place_that_cannot_be_written(tmp_path: Path, compared: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report.write([compared], tmp_path / "file" / "out", png=False)
    with pytest.raises(UserError, match="cannot be written"):
        report.write([compared], tmp_path / "file", png=False)


def test_other_models_are_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "kfac", steps=200)
    other = make_run(tmp_path / "runs", "sgd", steps=200)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("resnet8", "mlp"))
    found = page(tmp_path / "out", tmp_path / "runs", png=True)
    assert found.text["h2"] == ["digits (model mlp)", "digits (model resnet8)"]
    assert "than SGD" not in found.words
    assert "Runs with another model, data set, batch or metric" in found.words
    names = {path.name for path in (tmp_path / "out").glob("curves*")}
    if pictures.available():
        assert names == {"curves-digits-model-mlp.png", "curves-digits-model-resnet8.png"}


ODD = [
    0, -1, 5e-324, 1e16, 1e100, 1e308, -1e308, 10**400, float("nan"), float("-inf"), "x", [1],
]  # fmt: skip


def replaced(events: Any, key: str, value: Any) -> Any:
    """The events with this value wherever the key is."""
    if isinstance(events, list):
        return [replaced(one, key, value) for one in events]
    if not isinstance(events, dict):
        return events
    return {name: value if name == key else replaced(events[name], key, value) for name in events}


@pytest.mark.parametrize(
    "key",
    [
        "time", "world", "parameters", "target", "step", "seconds", "loss", "accuracy", "memory",
        "damping", "kl_clip", "refresh", "shape", "bytes",
    ],
)  # fmt: skip
def test_odd_numbers_are_left_out(tmp_path: Path, key: str) -> None:
    """In all events of one run, and in every second one of another."""
    folders = make_run(tmp_path / "runs", steps=40), make_run(tmp_path / "runs", seed=1, steps=40)
    written = [(folder / "events.jsonl").read_text().splitlines() for folder in folders]
    for odd in ODD:
        first, second = ([replaced(json.loads(line), key, odd) for line in one] for one in written)
        second[1::2] = [json.loads(line) for line in written[1][1::2]]
        write_events(folders[0], *first)
        write_events(folders[1], *second)
        assert page(tmp_path / "out", tmp_path / "runs").text["h1"] == ["digits"]


@pytest.mark.skipif(not pictures.available(), reason="needs matplotlib")
@pytest.mark.parametrize("values", [[0, 1e308], [1e-100, 1e100], [-1e100, 1e99], [5e-324], [0]])
def test_odd_numbers_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    evals = [
        evaluation(i, value, seconds=value, loss=value)
        for i, value in enumerate(values * 2, start=1)
    ]
    steps = [
        step(i, value, phases={"refresh": value}) for i, value in enumerate(values * 2, start=1)
    ]
    write_events(tmp_path / "run", start(), *evals, *steps)
    page(tmp_path / "out", tmp_path / "run", png=True)
    assert (tmp_path / "out" / "curves.png").is_file()


def test_targets_that_are_reached_at_once_are_told(tmp_path: Path) -> None:
    for optimizer in ("kfac", "sgd"):
        write_events(
            tmp_path / optimizer, start(optimizer=optimizer, kind=optimizer), evaluation(0, 1.0)
        )
    found = page(tmp_path / "out", tmp_path)
    said = "K-FAC reached 98 % in 0 steps and 0 µs, SGD in 0 steps and 0 µs."
    assert said in found.words.replace("\xa0", " ")
