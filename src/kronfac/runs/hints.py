"""Sentences about names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if one is near enough."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def advice(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the list of what there is."""
    known = list(known)
    near = nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"choose one of {', '.join(sorted(known))}."
