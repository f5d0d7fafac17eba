"""Elements of HTML and SVG as text; everything that is not markup is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import NewType

Markup = NewType("Markup", str)

_EMPTY = {"meta", "link", "rect", "path", "line", "circle"}


def escape(text: object) -> Markup:
    """Text as markup."""
    return Markup(html.escape(str(text), quote=True))


def join(parts: Iterable[Markup], between: str = "") -> Markup:
    """Several pieces as one."""
    return Markup(between.join(parts))


def tag(name: str, /, *children: Markup | str, **attributes: object) -> Markup:
    """An element. Children that are plain ``str`` come from :func:`escape` or another :func:`tag`.

    Attributes: ``class_`` is ``class``, other underscores are hyphens; ``None`` and ``False`` are left
    out, ``True`` has no value.
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        opening += f" {shown}" if value is True else f' {shown}="{escape(value)}"'
    if name in _EMPTY and not children:
        return Markup(f"<{opening}>" if name in {"meta", "link"} else f"<{opening}/>")
    return Markup(f"<{opening}>{''.join(children)}</{name}>")


def svg(title: str, *children: Markup, box: str | None = None, **attributes: object) -> Markup:
    """An inline picture with a title that is read aloud.

    With a ``box`` the drawing is stretched to its frame; lines keep their width by style.
    """
    stretched = {} if box is None else {"viewBox": box, "preserveAspectRatio": "none"}
    return tag("svg", tag("title", escape(title)), *children, role="img", **stretched, **attributes)


def path(points: Iterable[tuple[float, float]]) -> str:
    """A line through points; a single point becomes a dot."""
    places = [f"{x:.1f} {y:.1f}".replace(".0", "") for x, y in points]
    if len(places) == 1:
        places *= 2
    return "M" + "L".join(places)
