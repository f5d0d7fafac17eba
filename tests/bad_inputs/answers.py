"""What a library may answer to a bad input: a refusal, a warning, or nothing if all is well."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest

import kronfac

Answer = Literal["refused", "warns", "fine"]
#: A name, what is done, the kind of answer, and a phrase of it.
Row = tuple[str, Callable[[], Any], Answer, str]

_PACKAGE = str(Path(kronfac.__file__).parent)
_HERE = str(Path(__file__).parent)


def rows(table: Iterable[Row]) -> Any:
    """Parametrize a test by the rows of a table."""
    cases = [pytest.param(*row[1:], id=re.sub(r" at 0x\w*", "", row[0])) for row in table]
    return pytest.mark.parametrize(("call", "answer", "phrase"), cases)


def check(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    """Do it and compare what is heard; no error of somebody else, nothing silent, nothing twice."""
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as found:
            error = found
    if answer == "refused":
        assert error is not None, "accepted in silence"
        _check_refusal(error, phrase)
        return
    if error is not None:
        raise error
    heard = [str(one.message) for one in caught if one.category is UserWarning]
    assert len(heard) == (answer == "warns"), heard
    if heard:
        assert re.search(phrase, heard[0]), heard[0]
        line = Path(next(one.filename for one in caught if one.category is UserWarning))
        assert _PACKAGE not in str(line), "the warning points into the library"


def _check_refusal(error: Exception, phrase: str) -> None:
    message = str(error)
    assert isinstance(error, ValueError | TypeError | RuntimeError), repr(error)
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    assert where.startswith(_PACKAGE), f"raw error from {where}: {message}"
    assert re.search(phrase, message), message
    assert message.endswith((".", "?")), message
    assert len(message) < 600, message
