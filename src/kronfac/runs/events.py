"""Events of a run: plain dictionaries for any number of listeners."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from kronfac.runs.disk import explained, read_text

Event = dict[str, Any]
Listener = Callable[[Event], None]


class Recorder:
    """Passes events on to listeners; on ranks other than the first there are none."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: str, **fields: Any) -> None:
        """Call all listeners, in order."""
        if self.listeners:
            content = {"event": event, "time": time.time(), **fields}
            for listener in self.listeners:
                listener(content)


class EventFile:
    """Appends events to a file, one JSON object per line, each written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        drop_half_line(path)
        with explained(path):
            self._file: TextIO = path.open("a", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        """Write one event."""
        with explained(self.path):
            self._file.write(json.dumps(finite(event)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with explained(self.path):
            self._file.close()


def read(path: Path) -> list[Event]:
    """All events of a file; an incomplete last line is left out."""
    return read_leniently(path)[0]


def read_leniently(path: Path) -> tuple[list[Event], int]:
    """Events of a file, and how many lines are none (a killed run may leave half a line)."""
    events, broken = [], 0
    for line in read_text(path).splitlines():
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            broken += 1
    return events, broken


def finite(value: Any) -> Any:
    """The value with ``None`` for numbers that JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


def drop_half_line(path: Path) -> None:
    """Cut off a last line without end, which a killed process or a full disk has left."""
    if not path.is_file():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
