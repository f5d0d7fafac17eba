"""docs/support.md has the rows, columns and exceptions of the cells, and no failure."""

from docs.support import PAGE, mark, notes, page, summed
from tests.support.cells import EXCEPTIONS, LAYERS, Cell, all_cells, obstacle


def test_the_page_is_that_of_the_cells() -> None:
    *written, made = PAGE.read_text(encoding="utf-8").splitlines()
    outcomes = dict.fromkeys(all_cells(), "passed")
    assert written == page(outcomes, made).splitlines()[:-1]
    assert made.startswith("Made on ")


def test_every_cell_has_a_test_of_its_own() -> None:
    names = [str(cell) for cell in all_cells()]
    assert len(set(names)) == len(names)


def test_every_exception_is_about_some_cell_and_in_the_notes() -> None:
    used = [obstacle(cell) for cell in all_cells()]
    assert all(known in used and known.reason in notes() for known in EXCEPTIONS.values())


def test_a_failure_shows() -> None:
    cells = [Cell(LAYERS[0], "float32"), Cell(LAYERS[0], "float64")]
    outcomes = {cells[0]: "passed", cells[1]: "failed"}
    assert [mark(cell, outcomes) for cell in cells] == ["✓", "✗"]
    assert summed(cells, outcomes) == "✓ 1 ✗"
    assert mark(Cell(LAYERS[1], "float32"), outcomes) == "✗"  # it did not run
