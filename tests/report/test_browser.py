"""The page in a real browser: wide, on a phone, dark, and without the script."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kronfac import report
from tests.report.browser import Tab, find, launched
from tests.report.made_up import make_run

pytestmark = pytest.mark.skipif(
    find() is None, reason="needs a browser: no chromium, chromium-browser or google-chrome on PATH"
)

DESKTOP, PHONE = 1280, 375


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    for optimizer in ("kfac", "sgd", "a-rather-long-name-of-an-optimizer"):
        for seed in range(2):
            make_run(root / "runs", optimizer, seed, steps=200, world=4)
    return report.write([root / "runs"], root, png=False)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with launched(tmp_path_factory.mktemp("profile")) as found:
        yield found


def count(tab: Tab, selector: str) -> int:
    """How many elements are to be seen."""
    visible = "e => e.getClientRects().length"
    found = tab.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter({visible}).length"
    )
    return int(found)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_it_shows_without_complaints(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.load(page, width=width, dark=dark)
    assert count(tab, "h1") == 1
    assert count(tab, "section") == 9
    assert count(tab, ".lead") == 1
    assert count(tab, "figure .median") >= 6
    assert count(tab, ".bar rect") > 10
    assert count(tab, "table.map td svg") >= 20
    assert tab.complaints == []
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}


@pytest.mark.parametrize("width", [320, PHONE, 768, DESKTOP])
def test_the_page_never_scrolls_sideways(tab: Tab, page: Path, width: int) -> None:
    tab.load(page, width=width)
    tab.ask("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("innerWidth") == width


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_follow_the_system_and_the_button(tab: Tab, page: Path, dark: bool) -> None:
    tab.load(page, width=DESKTOP, dark=dark)
    colour = "getComputedStyle(document.body).backgroundColor"
    light_page, dark_page = "rgb(252, 252, 251)", "rgb(20, 22, 26)"
    assert tab.ask(colour) == (dark_page if dark else light_page)
    tab.click("#theme")
    assert tab.ask(colour) == (light_page if dark else dark_page)
    tab.click("#theme")
    tab.ask("localStorage.clear()")


def test_a_phone_shows_one_axis_at_a_time(tab: Tab, page: Path) -> None:
    tab.load(page, width=PHONE)
    shown = ".pair:not(.fixed) [data-axis={}]"
    assert (count(tab, shown.format("steps")), count(tab, shown.format("seconds"))) == (3, 0)
    tab.click("button[data-axes=seconds]")
    assert (count(tab, shown.format("steps")), count(tab, shown.format("seconds"))) == (0, 3)
    tab.click("button[data-axes=both]")
    assert (count(tab, shown.format("steps")), count(tab, shown.format("seconds"))) == (3, 3)


def test_lines_can_be_hidden(tab: Tab, page: Path) -> None:
    tab.load(page, width=DESKTOP)
    before = count(tab, "[data-series='1']")
    tab.click("[data-toggle='1']")
    assert (before > 0, count(tab, "[data-series='1']")) == (True, 0)
    assert tab.ask("document.querySelector('[data-toggle=\"1\"]').ariaPressed") == "false"
    tab.click("[data-toggle='1']")
    assert count(tab, "[data-series='1']") == before


def test_the_pointer_shows_values(tab: Tab, page: Path) -> None:
    tab.load(page, width=DESKTOP)
    tab.point(".area", 0.5)
    assert count(tab, ".spot") == 3
    said = tab.ask("document.querySelector('.tip').innerText")
    assert "K-FAC" in said
    assert "step 100" in said
    tab.click("[data-toggle='1']")
    tab.point(".area", 0.2)
    assert count(tab, ".spot") == 2
    tab.point("h1")
    assert count(tab, ".tip") == 0
    assert tab.complaints == []


def test_arrow_keys_show_values(tab: Tab, page: Path) -> None:
    tab.load(page, width=DESKTOP)
    tab.ask("document.querySelector('.plot').focus()")
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
    assert count(tab, ".tip") == 1


def test_it_is_readable_without_the_script(tab: Tab, page: Path) -> None:
    tab.load(page, width=DESKTOP, script=False)
    tab.call(
        "Emulation.setScriptExecutionDisabled", value=False
    )  # to ask; the page's own has not run
    assert count(tab, ".pair [data-axis=steps]") == 3 + 3
    assert count(tab, ".pair [data-axis=seconds]") == 3
    assert (count(tab, ".legend .key"), count(tab, ".switch"), count(tab, "#theme")) == (3, 0, 0)


def test_it_prints(tab: Tab, page: Path) -> None:
    tab.load(page, width=DESKTOP, dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert (count(tab, "#theme"), count(tab, ".switch")) == (0, 0)
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(tab.call("Page.printToPDF")["data"]) > 10_000
    assert tab.ask("[...document.querySelectorAll('details')].every(d => d.open)")
    tab.call("Emulation.setEmulatedMedia", media="")
